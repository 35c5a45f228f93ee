"""Bodies and answers of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, Tag

from inflight.frontend.text.chat_template import MAX_MESSAGES
from inflight.sampling_params import MAX_LOGPROBS
from inflight.server.openai.schemas import Effort, TemplateArguments
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
    by_type("only text is supported, as input_text or output_text"),
    images_as("input_text"),
]
OutputPart = Annotated[
    Annotated[InputText, Tag("<input_text>")],
    by_type("only text is supported, as input_text"),
    images_as("input_text"),
]


class InputMessage(ReturnedPart):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[MessagePart]
    id: str | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class DirectCaller(Body):
    """Marks a call made by the model itself."""

    type: Literal["direct"]


class CallPart(ReturnedPart):
    """The fields of calls and their outputs."""

    call_id: str
    id: str | None = None
    status: ItemStatus | None = None
    caller: DirectCaller | None = None


class FunctionCallItem(CallPart):
    type: Literal["function_call"]
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(CallPart):
    type: Literal["custom_tool_call"]
    name: str
    namespace: str | None = None
    input: str


class CallOutput(CallPart):
    type: Literal["function_call_output", "custom_tool_call_output"]
    output: str | Items[OutputPart]
    name: str | None = None


class PastCallItem(ReturnedPart):
    """An earlier call of a tool that is not offered here. The model reads it as text."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["local_shell_call", "local_shell_call_output", "web_search_call"]
    id: str | None = None
    call_id: str | None = None
    status: str | None = None
    action: dict[str, Any] | None = None
    output: str | None = None


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
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CallOutput, Tag("<function_call_output>")]
    | Annotated[PastCallItem, Tag("<local_shell_call>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    by_type(
        "its type must be message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, "
        "local_shell_call, local_shell_call_output, web_search_call, reasoning or item_reference",
        "message",
        {
            "custom_tool_call_output": "function_call_output",
            "local_shell_call_output": "local_shell_call",
            "web_search_call": "local_shell_call",
        },
    ),
]


class FunctionTool(ReturnedPart):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    # Accepted and ignored: every tool is in the prompt, and the model itself calls it.
    defer_loading: bool | None = None
    allowed_callers: Items[Literal["direct"]] | None = None
    output_schema: dict[str, Any] | None = None


class TextInput(Body):
    type: Literal["text"]


class GrammarFormat(Body):
    """A grammar that the input of a custom tool must match."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class FreeTextTool(ReturnedPart):
    """A tool whose input is free text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: Annotated[TextInput | GrammarFormat, Field(discriminator="type")] | None = None
    defer_loading: bool | None = None
    allowed_callers: Items[Literal["direct"]] | None = None


class NamespaceTool(ReturnedPart):
    """A group of tools."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Items[
        Annotated[
            Annotated[FunctionTool, Tag("<function>")] | Annotated[FreeTextTool, Tag("<custom>")],
            by_type("only functions and custom tools can be in a namespace"),
        ]
    ]


ServerToolType = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]
_SERVER_TOOLS = dict.fromkeys(get_args(ServerToolType), "server")


class ServerTool(Body):
    """A tool that OpenAI's own servers run, or that OpenAI's own models know. It is dropped here."""

    model_config = ConfigDict(extra="allow")

    type: ServerToolType


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[FreeTextTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[ServerTool, Tag("<server>")],
    by_type("its type must be function, custom or namespace", others=_SERVER_TOOLS),
]


class ChosenTool(Body):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


_CHOSEN = {"custom": "function", **_SERVER_TOOLS}


class AllowedTools(Body):
    """A tool choice that allows only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[
        Annotated[
            Annotated[ChosenTool, Tag("<function>")] | Annotated[ServerTool, Tag("<server>")],
            by_type("its type must be function or custom", others=_CHOSEN),
        ]
    ]


ResponseToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[ChosenTool, Tag("<function>")]
        | Annotated[AllowedTools, Tag("<allowed_tools>")]
        | Annotated[ServerTool, Tag("<server>")],
        by_type(
            "it must be none, auto, required, a function, a custom tool, or allowed_tools", others=_CHOSEN
        ),
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
    verbosity: Literal["low", "medium", "high"] | None = optional(
        "Ignored: chat templates do not support it."
    )


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = optional(
        "Return the whole reasoning as its summary."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


TEXT_LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
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


class ResponseConversationBody(Body):
    """The parameters of responses and of counting their input tokens."""

    model: str | None = optional("A name from /v1/models; optional.")
    input: str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=128)
    tools: Items[ResponseTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_reasoning_tokens: int | None = ranged(minimum=0)
    chat_template_kwargs: TemplateArguments | None = None

    # Only values without effect are accepted.
    truncation: Literal["disabled"] | None = missing(
        "remove old items from the input; a conversation that does not fit is refused"
    )
    conversation: Unset = missing("use previous_response_id")


class InputTokensBody(ResponseConversationBody):
    pass


class ResponsesBody(ResponseConversationBody, SampledBody):
    store: bool | None = optional(
        "Store the response so that it can be read and continued later; true by default."
    )
    max_output_tokens: int | None = ranged(minimum=1)
    metadata: Metadata | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Items[Included] | None = optional(
        f"{TEXT_LOGPROBS} returns logprobs; the others have no effect."
    )
    top_logprobs: int | None = ranged(minimum=0, maximum=MAX_LOGPROBS)

    # These have no effect on the answer.
    safety_identifier: str | None = optional("Used in place of a missing user.", max_length=256)
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    max_tool_calls: int | None = optional("Ignored: the server runs no tools.")

    service_tier: Ignored = None
    client_metadata: Ignored = None

    # Only values without effect are accepted.
    background: Unset = missing("leave it out, and stream the answer")
    prompt: Unset = missing("put it into instructions and input")
    context_management: Unset = missing("remove old items from the input")
    moderation: None = missing("content is not moderated")
    mm_processor_kwargs: Unset = missing("only text input is supported")


# ---- responses ----


class OutputTextPart(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputItem(BaseModel):
    """A message, a call of a function or of a custom tool, or the reasoning before them."""

    type: Literal["message", "function_call", "custom_tool_call", "reasoning"]
    id: str
    status: ItemStatus
    role: Literal["assistant"] | None = None
    content: list[OutputTextPart] | list[dict[str, Any]] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None


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
    """An answer, together with the parameters of its request."""

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
    presence_penalty: float
    frequency_penalty: float
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
    """One event of a streamed answer; its other fields depend on its type."""

    type: str
    sequence_number: int


class InputItemList(BaseModel):
    """The input items of a response: those of the earlier responses that it continues, and its own."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True
