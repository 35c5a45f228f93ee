"""Bodies and answers of /v1/messages and /v1/messages/count_tokens, in Anthropic's format."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Tag

from inflight.frontend.text.chat_template import MAX_MESSAGES
from inflight.server.schemas import (
    Body,
    Ignored,
    Items,
    ReturnedPart,
    SampledBody,
    Unset,
    by_type,
    images_as,
    missing,
    optional,
    ranged,
)


class CachedPart(ReturnedPart):
    """A part that may ask for caching, which has no effect: prefixes are always cached."""

    cache_control: dict[str, Any] | None = None


# ---- requests ----


class TextBlock(CachedPart):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ToolUseBlock(CachedPart):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


SystemPart = Annotated[Annotated[TextBlock, Tag("<text>")], by_type("only text is supported")]


class TextSource(Body):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Body):
    type: Literal["content"]
    content: str | Items[Annotated[SystemPart, images_as("text")]]


class DocumentBlock(CachedPart):
    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("<text>")] | Annotated[ContentSource, Tag("<content>")],
        by_type("only documents of text are supported: the type of their source must be text or content"),
    ]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None


class SearchResultBlock(CachedPart):
    type: Literal["search_result"]
    source: str
    title: str
    content: Items[TextBlock]
    citations: dict[str, Any] | None = None


class ToolReferenceBlock(CachedPart):
    """The name of a tool with `defer_loading` that may be called from now on."""

    type: Literal["tool_reference"]
    tool_name: str


ResultPart = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    by_type("its type must be text, document, search_result or tool_reference"),
    images_as("text"),
]


class ToolResultBlock(CachedPart):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[ResultPart] | None = None
    is_error: bool | None = None


class ThinkingBlock(CachedPart):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(CachedPart):
    type: Literal["redacted_thinking"]
    data: str


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[DocumentBlock, Tag("<document>")]
    | Annotated[SearchResultBlock, Tag("<search_result>")],
    by_type(
        "its type must be text, tool_use, tool_result, thinking, redacted_thinking, document or search_result"
    ),
    images_as("text"),
]


class SentMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Items[ContentBlock]


class CustomTool(CachedPart):
    type: Literal["custom"] = "custom"
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    input_examples: Items[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: Items[Literal["direct"]] | None = None


MessageTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")],
    by_type("only tools with an input_schema can be called; the server itself runs none", "custom"),
]


class MessageToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = ranged(minimum=1)
    display: Literal["summarized", "updates", "omitted"] | None = None  # the first two are the same here


class JsonOutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputOptions(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class MessageMetadata(Body):
    user_id: str | None = Field(None, max_length=4096)


class ConversationBody(Body):
    """The parameters of messages and of counting their tokens."""

    model: str | None = optional("A name from /v1/models; optional.")
    messages: Annotated[Items[SentMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Items[SystemPart] | None = None
    tools: Items[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    cache_control: dict[str, Any] | None = None


class CountTokensBody(ConversationBody):
    pass


class MessagesBody(ConversationBody, SampledBody):
    max_tokens: int = ranged(..., minimum=1)
    stop_sequences: Items[str] | None = None
    metadata: MessageMetadata | None = None

    # Accepted and ignored: conversations are never shortened, and there is no choice of region.
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None

    service_tier: Ignored = None

    # Only values without effect are accepted.
    speed: Literal["standard"] | None = missing("there is only one speed")
    container: Unset = missing("the server runs no code")
    mcp_servers: Unset = missing("pass their tools as tools, and call them yourself")
    thread: Unset = missing("conversations are not stored, send all messages")


# ---- responses ----


class ThinkingDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """Token counts. `input_tokens` excludes those found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens_details: ThinkingDetails


class AnswerBlock(BaseModel):
    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageObject(BaseModel):
    """A whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """One event of a streamed answer; its other fields depend on its type."""

    type: str


class ModelInfo(BaseModel):
    """A model in Anthropic's format."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime  # when the server started
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelInfos(BaseModel):
    """One page with all models."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str
    last_id: str


class TokenCount(BaseModel):
    input_tokens: int


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageErrorBody(BaseModel):
    """An error in Anthropic's format."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str | None
