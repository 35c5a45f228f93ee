"""Bodies and answers of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from inflight.frontend.chat import CLIENT_FIELDS, MAX_TOOLS
from inflight.frontend.text.chat_template import MAX_MESSAGES
from inflight.sampling_params import MAX_LOGPROBS
from inflight.server.schemas import (
    Body,
    ConstrainedBody,
    FinishReason,
    Ignored,
    Items,
    TextsOrIds,
    Unset,
    Usage,
    images_as,
    missing,
    optional,
    ranged,
)


class CompletionBody(ConstrainedBody):
    prompt: TextsOrIds
    max_tokens: int | None = ranged(
        minimum=0, description="0 is allowed with echo: it returns only the prompt's logprobs."
    )
    logprobs: int | None = ranged(minimum=0, maximum=MAX_LOGPROBS)
    echo: bool | None = None

    add_special_tokens: bool | None = optional("Add special tokens to a text prompt; true by default.")

    suffix: Unset = missing("put the suffix into the prompt, in the format that the model was trained on")
    best_of: Literal[1] | None = missing("request n answers and choose by their logprobs")
    prompt_embeds: Unset = missing("send text or token ids")


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """An answer. In a stream, each event is one, with the new text."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


Nothing = Annotated[list[Any], Field(max_length=0)]


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. The fields of an answer may be sent back with the next request."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[Annotated[TextPart, images_as("text")]] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    annotations: Nothing | None = None

    # Fields that openai's helpers and litellm add to an answer, and send back with it.
    parsed: Any = None
    provider_specific_fields: Any = None

    def set_fields(self) -> dict[str, Any]:
        """Return the fields that are set and meant for the model."""
        return self.model_dump(exclude_none=True, exclude=set(CLIENT_FIELDS))


Messages = Annotated[Items[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


Tools = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]
MAX_ARGUMENTS = 64  # more than any chat template has


def _check_count(arguments: Any) -> Any:
    """Refuse too many arguments before each is validated: every wrong one would be four errors."""
    if isinstance(arguments, dict) and len(arguments) > MAX_ARGUMENTS:
        raise ValueError(f"it has {len(arguments)} arguments, at most {MAX_ARGUMENTS} are allowed")
    return arguments


TemplateArguments = Annotated[dict[str, str | int | float | bool | None], BeforeValidator(_check_count)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Prediction(Body):
    type: Literal["content"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(ConstrainedBody):
    messages: Messages
    max_completion_tokens: int | None = ranged(minimum=1)
    max_tokens: int | None = ranged(minimum=1, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: int | None = ranged(minimum=0, maximum=MAX_LOGPROBS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None

    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description='none, auto, required, {"type": "function", "function": {"name": ...}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}.',
    )
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = optional(
        "What the answer may be like. With --speculative-config, an answer that agrees with it comes faster."
    )
    reasoning_effort: Effort | None = optional("For templates that support it; none disables reasoning.")
    max_reasoning_tokens: int | None = optional("The reasoning ends after this many tokens.", ge=0)
    thinking_token_budget: int | None = optional(
        "vLLM's name for max_reasoning_tokens; -1 is no limit.", ge=-1
    )
    include_reasoning: bool | None = optional("Return the reasoning; true by default.")
    verbosity: Ignored = None  # chat templates do not support it

    # Only values without effect are accepted.
    modalities: Items[Literal["text"]] | None = missing("only text output is supported")
    functions: Nothing | None = missing("send them as tools")
    function_call: Literal["none", "auto"] | None = missing("use tool_choice")
    audio: None = missing("only text input and output are supported")
    web_search_options: None = missing("put search results into a message")
    moderation: None = missing("content is not moderated")
    chat_template: Unset = missing("templates come with the checkpoint, never with a request")
    documents: Unset = missing("put their text into a message")
    echo: Unset = missing("prepend the message yourself, or set continue_final_message")
    add_special_tokens: Unset = missing("the chat template adds them")


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob] | None = None
    refusal: None = None


class FunctionText(BaseModel):
    name: str
    arguments: str = Field(description="JSON text.")


class AnswerToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionText


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="Null if there are only tool calls.")
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = optional("The same as reasoning_content.")
    tool_calls: list[AnswerToolCall] | None = None


ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """Part of a tool call: the first has the id, type and name, later ones have more of the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    """One event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
