"""What a conversation of /v1/responses is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, Tag

from inflight.server.schemas import (
    Body,
    Ignored,
    Items,
    ReturnedPart,
    SampledBody,
    Unset,
    by_type,
    missing,
    ranged,
)
from inflight.text.chat import MAX_MESSAGES

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(ReturnedPart):
    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Any = None


class OutputText(ReturnedPart):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(ReturnedPart):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


MessagePart = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[Refusal, Tag("<refusal>")],
    by_type("only text is read here, as input_text or output_text"),
]
OutputPart = Annotated[
    Annotated[InputText, Tag("<input_text>")], by_type("only text is read here, as input_text")
]


class InputMessage(ReturnedPart):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[MessagePart]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class DirectCaller(Body):
    """The model itself."""

    type: Literal["direct"]


class FunctionCallItem(ReturnedPart):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None
    caller: DirectCaller | None = None


class FunctionCallOutput(ReturnedPart):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[OutputPart]
    id: str | None = None
    name: str | None = None
    status: ItemStatus | None = None
    caller: DirectCaller | None = None


class SummaryText(ReturnedPart):
    type: Literal["summary_text"]
    text: str


class ReasoningText(ReturnedPart):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ReturnedPart):
    type: Literal["reasoning"]
    summary: Items[SummaryText] | None = None
    content: Items[ReasoningText] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: ItemStatus | None = None


class ItemReference(ReturnedPart):
    type: Literal["item_reference"]
    id: str


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    by_type(
        "its type must be message, function_call, function_call_output, reasoning or item_reference",
        "message",
    ),
]


class FunctionTool(ReturnedPart):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    # Taken, and without effect: every tool is shown, and the model itself calls it.
    defer_loading: bool | None = None
    allowed_callers: Items[Literal["direct"]] | None = None
    output_schema: dict[str, Any] | None = None


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")],
    by_type("only tools of type function can be called; the server runs none of its own"),
]


class ChosenFunction(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    """Of the tools, only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ChosenFunction]


ResponseToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[ChosenFunction, Tag("<function>")] | Annotated[AllowedTools, Tag("<allowed_tools>")],
        by_type("it must be none, auto, required, a function, or allowed_tools"),
    ]
)


class FreeTextFormat(Body):
    type: Literal["text"]


class TextObjectFormat(Body):
    type: Literal["json_object"]


class TextSchemaFormat(ReturnedPart):
    type: Literal["json_schema"]
    name: str = Field(max_length=64)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


TextFormatChoice = Annotated[
    Annotated[FreeTextFormat, Tag("<text>")]
    | Annotated[TextObjectFormat, Tag("<json_object>")]
    | Annotated[TextSchemaFormat, Tag("<json_schema>")],
    by_type("its type must be text, json_object or json_schema"),
]


class TextOptions(Body):
    format: TextFormatChoice | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Taken, and without effect: templates know no such thing."
    )


class ReasoningOptions(Body):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Taken, and without effect: the reasoning itself is in the answer."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponsesBody(SampledBody):
    input: str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = Field(
        None, description="Whether the answer can be asked for later; true unless told."
    )
    max_output_tokens: int | None = ranged(minimum=1)
    max_reasoning_tokens: int | None = ranged(minimum=0)
    tools: Items[OfferedTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    stream_options: ResponseStreamOptions | None = None

    # Taken, and without effect on the answer.
    include: Items[Included] | None = None
    safety_identifier: str | None = Field(
        None, max_length=256, description="As user, where that is not given."
    )
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    max_tool_calls: int | None = Field(None, description="Of tools that the server runs: it has none.")

    service_tier: Ignored = None

    # Accepted as far as they change nothing.
    background: Unset = missing("leave it out, and read the answer as a stream")
    truncation: Literal["disabled"] | None = missing(
        "leave out what is no longer needed; what does not fit is refused"
    )
    top_logprobs: Unset = missing("use /v1/chat/completions, which tells them")
    conversation: Unset = missing("use previous_response_id")
    prompt: Unset = missing("put it into instructions and input")
    context_management: Unset = missing("leave out what is no longer needed")
    moderation: None = missing("no one looks at what is written here")
    mm_processor_kwargs: Unset = missing("only text is read")


# ---- what comes back ----


class OutputTextPart(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputItem(BaseModel):
    """A message, a call of a function, or the reasoning before them."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: ItemStatus
    role: Literal["assistant"] | None = None
    content: list[OutputTextPart] | list[dict[str, Any]] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class CachedDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: CachedDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """An answer, and what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: bool
    service_tier: str = "default"
    metadata: dict[str, str]
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    top_logprobs: int = 0


class ResponseEvent(BaseModel):
    """One event of a streamed answer; what else it has depends on its type."""

    type: str
    sequence_number: int


class InputItemList(BaseModel):
    """Items that a response was made from: those of earlier responses that it went on from, and its own input."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True
