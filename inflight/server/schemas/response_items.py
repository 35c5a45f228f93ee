"""What a conversation of /v1/responses is made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Tag

from inflight.server.schemas.common import Body, Items
from inflight.server.schemas.tagged import ReturnedPart, by_type

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
