"""Items of a conversation as they are stored: only what templates render and clients can list."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from inflight.server.errors import ApiError
from inflight.server.http.body import MAX_PARTS
from inflight.server.openai.responses.schemas import (
    FunctionCallItem,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    ItemReference,
    OutputText,
    ReasoningItem,
    Refusal,
)

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class StoredText(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # always empty, but clients expect the field in an output_text


class ConversationItem(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An item without the fields that no template renders (annotations, logprobs, encrypted content)."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"]
    id: str
    status: str
    role: Literal["user", "assistant", "system", "developer"] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[StoredText] | None = None
    summary: list[StoredText] | None = None
    content: list[StoredText] | None = None


class StoredItem(msgspec.Struct, frozen=True, array_like=True):
    """One encoded item. Conversations share these, so a follow-up neither copies nor parses earlier turns."""

    item_id: str
    data: bytes  # JSON, in the form in which clients list it
    num_parts: int  # counted as in a request's body: keys, objects and lists

    @classmethod
    def of_input(cls, item: InputItem) -> StoredItem:
        return cls._of(_reduced(item))

    @classmethod
    def of_output(cls, item: dict[str, Any]) -> StoredItem:
        """Encode an item of a response's output."""
        return cls._of(msgspec.convert(item, ConversationItem))

    @classmethod
    def _of(cls, item: ConversationItem) -> StoredItem:
        lists = (value for value in (item.output, item.summary, item.content) if isinstance(value, list))
        return cls(item.id, msgspec.json.encode(item), 5 + 3 * sum(map(len, lists)))

    def read(self) -> ConversationItem:
        return _DECODER.decode(self.data)


_DECODER = msgspec.json.Decoder(ConversationItem)


def check_conversation(items: Sequence[StoredItem], max_bytes: int, param: str) -> None:
    """Raise ApiError 400 where a conversation exceeds what one request's body could hold."""
    num_bytes = sum(len(item.data) for item in items)
    if num_bytes > max_bytes:
        raise conversation_too_large(f"{num_bytes} bytes", f"{max_bytes} (--max-body-size)", param)
    num_parts = sum(item.num_parts for item in items)
    if num_parts > MAX_PARTS:
        raise conversation_too_large(f"{num_parts} keys, objects and lists", str(MAX_PARTS), param)


def conversation_too_large(size: str, limit: str, param: str) -> ApiError:
    message = f"the conversation, with all that {param} refers to, has {size}: at most {limit} are allowed"
    return ApiError(400, message, code="conversation_too_large", param=param)


def _reduced(item: InputItem) -> ConversationItem:
    """Return the item with an id, and without what is never rendered."""
    assert not isinstance(item, ItemReference)  # these are resolved before
    item_id = f"{_PREFIXES[item.type]}_{secrets.token_hex(24)}" if item.id is None else item.id
    common: Any = {"type": item.type, "id": item_id, "status": item.status or "completed"}
    match item:
        case InputMessage(role=role, content=str(text)):
            part = _output_text(text) if role == "assistant" else StoredText("input_text", text)
            return ConversationItem(**common, role=role, content=[part])
        case InputMessage():
            return ConversationItem(**common, role=item.role, content=list(map(_part, item.content)))
        case FunctionCallItem():
            call_id, name, arguments = item.call_id, item.name, item.arguments
            return ConversationItem(**common, call_id=call_id, name=name, arguments=arguments)
        case FunctionCallOutput(call_id=call_id, output=str(text)):
            return ConversationItem(**common, call_id=call_id, output=text)
        case FunctionCallOutput(call_id=call_id):
            return ConversationItem(**common, call_id=call_id, output=list(map(_part, item.output)))
        case ReasoningItem(content=[_, *_] as parts):
            return ConversationItem(**common, summary=[], content=list(map(_part, parts)))
        case ReasoningItem():  # a summary is rendered only where there is nothing else
            return ConversationItem(**common, summary=list(map(_part, item.summary or ())))


def _part(part: Any) -> StoredText:
    if isinstance(part, OutputText):
        return _output_text(part.text)
    if isinstance(part, Refusal):
        return StoredText("refusal", refusal=part.refusal)
    return StoredText(part.type, part.text)


def _output_text(text: str) -> StoredText:
    return StoredText("output_text", text, annotations=[])
