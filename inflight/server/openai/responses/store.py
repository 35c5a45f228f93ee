"""Stored responses: the encoded items of their conversations, pages of these, and the bounded store in memory."""

from __future__ import annotations

import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from inflight.errors import shown
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError, invalid
from inflight.server.http.bodies import MAX_PARTS
from inflight.server.openai.responses.schemas import (
    CallOutput,
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    InputMessage,
    ItemReference,
    OutputText,
    PastCallItem,
    ReasoningItem,
    Refusal,
)

NOT_STORED = "it was never stored, or has been deleted or evicted"
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class StoredText(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # always empty, but clients expect the field in an output_text


class ConversationItem(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An item without the fields that no template renders (annotations, logprobs, encrypted content)."""

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
    ]
    id: str
    status: str
    role: Literal["user", "assistant", "system", "developer"] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
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
    """Raise ApiError 400 if a conversation is larger than the body of a request may be."""
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
    """Return the item with an id, and without the fields that are never rendered."""
    assert not isinstance(item, ItemReference)  # references are resolved before
    if isinstance(item, PastCallItem):
        item = _as_message(item)
    item_id = f"{_PREFIXES[item.type]}_{secrets.token_hex(24)}" if item.id is None else item.id
    common: Any = {"type": item.type, "id": item_id, "status": item.status or "completed"}
    match item:
        case InputMessage(role=role, content=str(text)):
            part = _output_text(text) if role == "assistant" else StoredText("input_text", text)
            return ConversationItem(**common, role=role, content=[part])
        case InputMessage():
            return ConversationItem(**common, role=item.role, content=list(map(_part, item.content)))
        case FunctionCallItem() | CustomCallItem():
            fields = item.model_dump(include={"call_id", "name", "namespace", "arguments", "input"})
            return ConversationItem(**common, **fields)
        case CallOutput(call_id=call_id, output=str(text)):
            return ConversationItem(**common, call_id=call_id, output=text)
        case CallOutput(call_id=call_id):
            return ConversationItem(**common, call_id=call_id, output=list(map(_part, item.output)))
        case ReasoningItem(content=[_, *_] as parts):
            return ConversationItem(**common, summary=[], content=list(map(_part, parts)))
        case ReasoningItem():  # a summary is rendered only where there is nothing else
            return ConversationItem(**common, summary=list(map(_part, item.summary or ())))


def _as_message(item: PastCallItem) -> InputMessage:
    """Return a text in place of what a tool that is not offered here has done."""
    action = item.action or {}
    if item.type == "local_shell_call_output":
        return InputMessage(role="user", content=f"Output of the shell command:\n{item.output or ''}")
    if item.type == "local_shell_call":
        command = action.get("command", "")
        words = " ".join(map(str, command)) if isinstance(command, list) else str(command)
        return InputMessage(role="assistant", content=f"I ran the shell command: {words}")
    query = action.get("query") or action.get("url") or action.get("pattern") or ""
    return InputMessage(role="assistant", content=f"I searched the web: {query}")


def _part(part: Any) -> StoredText:
    if isinstance(part, OutputText):
        return _output_text(part.text)
    if isinstance(part, Refusal):
        return StoredText("refusal", refusal=part.refusal)
    return StoredText(part.type, part.text)


def _output_text(text: str) -> StoredText:
    return StoredText("output_text", text, annotations=[])


DEFAULT_LIMIT, MAX_LIMIT = 20, 100
MAX_PAGE_BYTES = 1 << 20  # a page ends before the item that would exceed it, but has at least one


class PageQuery(msgspec.Struct, frozen=True):
    limit: int
    order: str
    after: str | None

    @classmethod
    def from_params(cls, query: Mapping[str, str]) -> PageQuery:
        """Read the query of a request. Raise ApiError if it is not valid."""
        limit = query.get("limit", str(DEFAULT_LIMIT))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_LIMIT):
            raise invalid("limit", f"limit is {shown(limit)}: it must be an integer from 1 to {MAX_LIMIT}")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", f"order is {shown(order)}: allowed are asc and desc")
        return cls(int(limit), order, query.get("after"))


class InputPage(msgspec.Struct, frozen=True):
    items: list[StoredItem]
    has_more: bool

    @classmethod
    def from_items(cls, items: Sequence[StoredItem], query: PageQuery) -> InputPage:
        """Return the page that a query asks for. Raise ApiError if no item has the id after which it starts.

        Items with the same id are listed once: `after` could not tell them apart, and pages would repeat forever.
        """
        unique = list({item.item_id: item for item in items}.values())
        ordered = unique if query.order == "asc" else unique[::-1]
        start = 0 if query.after is None else _index(ordered, query.after) + 1
        page: list[StoredItem] = []
        num_bytes = 0
        for item in ordered[start : start + query.limit]:
            num_bytes += len(item.data)
            if page and num_bytes > MAX_PAGE_BYTES:
                break
            page.append(item)
        return cls(page, len(ordered) > start + len(page))

    def encode(self) -> bytes:
        """Return the JSON of an `InputItemList`; the items are JSON already."""
        first_id, last_id = (self.items[0].item_id, self.items[-1].item_id) if self.items else (None, None)
        return b'{"object":"list","data":[%b],"first_id":%b,"last_id":%b,"has_more":%b}' % (
            b",".join([item.data for item in self.items]),
            *map(msgspec.json.encode, (first_id, last_id, self.has_more)),
        )


def _index(items: Sequence[StoredItem], item_id: str) -> int:
    for index, item in enumerate(items):
        if item.item_id == item_id:
            return index
    raise invalid("after", f"after is {shown(item_id, 200)}: there is no such item in this response's input")


OVERHEAD = 1024  # bytes of a response in addition to its content and items
ITEM_OVERHEAD = 256  # bytes of an item in addition to its JSON


class ResponseContent(msgspec.Struct, frozen=True, weakref=True):
    """The JSON of a response. Concurrent readers share one copy."""

    data: bytes
    version: str = ""  # differs between stored responses of the same id


class StoredResponse(msgspec.Struct, frozen=True):
    """A response that has ended, and the conversation up to its end."""

    response_id: str
    content: ResponseContent
    items: tuple[StoredItem, ...]  # shared with the conversation that it continues
    num_outputs: int  # how many of the items, at the end, are the response's output

    @property
    def size(self) -> int:
        num_bytes = sum(len(item.data) for item in self.items)
        return len(self.content.data) + num_bytes + len(self.items) * ITEM_OVERHEAD + OVERHEAD

    @property
    def inputs(self) -> tuple[StoredItem, ...]:
        return self.items[: len(self.items) - self.num_outputs]

    @property
    def outputs(self) -> tuple[StoredItem, ...]:
        return self.items[len(self.items) - self.num_outputs :]


@dataclass(eq=False, slots=True)
class _CallerResponses:
    """The stored responses of one caller, the oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    outputs: dict[str, StoredItem] = field(default_factory=dict)  # of all responses, by id
    size: int = 0

    def put(self, stored: StoredResponse) -> None:
        self.responses[stored.response_id] = stored
        self.size += stored.size
        self.outputs.update((item.item_id, item) for item in stored.outputs)

    def take(self, response_id: str) -> StoredResponse:
        stored = self.responses.pop(response_id)
        self.size -= stored.size
        for item in stored.outputs:
            self.outputs.pop(item.item_id, None)
        return stored


class Responses(Protocol):
    """A store that may be in another process: each method transfers no more than it needs."""

    async def content(self, caller: Caller, response_id: str) -> ResponseContent | None: ...

    async def conversation(self, caller: Caller, response_id: str) -> Sequence[StoredItem] | None: ...

    async def input_page(self, caller: Caller, response_id: str, query: PageQuery) -> InputPage | None: ...

    async def find_items(
        self, caller: Caller, item_ids: Sequence[str], max_bytes: int
    ) -> dict[str, StoredItem | None]: ...

    async def add(self, caller: Caller, stored: StoredResponse) -> None: ...

    async def remove(self, caller: Caller, response_id: str) -> None: ...


class ResponseStore:
    """Implements `Responses` in memory. Callers see only their own.

    When the store is full, the caller with the most loses its oldest: nobody can evict the responses of others.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_caller: defaultdict[str, _CallerResponses] = defaultdict(_CallerResponses)
        self._num_responses = 0
        self._size = 0

    def __len__(self) -> int:
        return self._num_responses

    @property
    def size(self) -> int:
        """The size of all responses in bytes."""
        return self._size

    async def content(self, caller: Caller, response_id: str) -> ResponseContent | None:
        stored = self.find(caller, response_id)
        return None if stored is None else stored.content

    async def conversation(self, caller: Caller, response_id: str) -> Sequence[StoredItem] | None:
        stored = self.find(caller, response_id)
        return None if stored is None else stored.items

    async def input_page(self, caller: Caller, response_id: str, query: PageQuery) -> InputPage | None:
        stored = self.find(caller, response_id)
        return None if stored is None else InputPage.from_items(stored.inputs, query)

    async def add(self, caller: Caller, stored: StoredResponse) -> None:
        if self.find(caller, stored.response_id) is not None:  # clients may choose their ids
            self._remove(caller.name, stored.response_id)
        if stored.size > self._max_bytes:
            return
        self._by_caller[caller.name].put(stored)
        self._num_responses += 1
        self._size += stored.size
        while self._num_responses > self._max_responses:
            self._remove_oldest(max(self._by_caller, key=lambda name: len(self._by_caller[name].responses)))
        while self._size > self._max_bytes:
            self._remove_oldest(max(self._by_caller, key=lambda name: self._by_caller[name].size))

    def find(self, caller: Caller, response_id: str) -> StoredResponse | None:
        stored = self._by_caller.get(caller.name)
        return None if stored is None else stored.responses.get(response_id)

    async def find_items(
        self, caller: Caller, item_ids: Iterable[str], max_bytes: int
    ) -> dict[str, StoredItem | None]:
        """Find output items by their ids. Raise ApiError if together they have more than `max_bytes`."""
        stored = self._by_caller.get(caller.name)
        items = {item_id: None if stored is None else stored.outputs.get(item_id) for item_id in item_ids}
        num_bytes = sum(len(item.data) for item in items.values() if item is not None)
        if num_bytes > max_bytes:
            raise conversation_too_large(f"{num_bytes} bytes", f"{max_bytes} (--max-body-size)", "input")
        return items

    async def remove(self, caller: Caller, response_id: str) -> None:
        """Remove a response. Raise ApiError 404 if there is none."""
        if self.find(caller, response_id) is None:
            raise not_stored(response_id)
        self._remove(caller.name, response_id)

    def _remove_oldest(self, name: str) -> None:
        self._remove(name, next(iter(self._by_caller[name].responses)))

    def _remove(self, name: str, response_id: str) -> None:
        stored = self._by_caller[name]
        self._size -= stored.take(response_id).size
        self._num_responses -= 1
        if not stored.responses:
            del self._by_caller[name]


def not_stored(response_id: str) -> ApiError:
    message = f"there is no response {shown(response_id, 200)}: {NOT_STORED}"
    return ApiError(404, message, code="response_not_found")
