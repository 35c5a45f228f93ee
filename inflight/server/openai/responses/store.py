"""Responses that clients may go on from. In memory, and so few that it stays small."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.openai.responses.input_listing import InputPage, PageQuery
from inflight.server.openai.responses.stored_items import StoredItem, conversation_too_large

OVERHEAD = 1024  # bytes that a response takes beside its content and its items
ITEM_OVERHEAD = 256  # bytes that an item takes beside its JSON


class ResponseContent(msgspec.Struct, frozen=True, weakref=True):
    """The JSON of a response. All who read it at the same time share one copy."""

    data: bytes
    version: str = ""  # of a stored one: another response of the same id has another


class StoredResponse(msgspec.Struct, frozen=True):
    """A response that has ended, and the conversation up to its end."""

    response_id: str
    content: ResponseContent
    items: tuple[StoredItem, ...]  # shared with the conversation that it continues
    num_outputs: int  # the last of the items, which are its own

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
class _Shelf:
    """One caller's, the oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    outputs: dict[str, StoredItem] = field(default_factory=dict)  # of all of them, by id
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


class ResponseStore:
    """Callers see their own alone. Who has the most gives way first: no one can push out what others have."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)  # by the caller's name
        self._num_responses = 0
        self._size = 0

    def __len__(self) -> int:
        return self._num_responses

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    def add(self, caller: Caller, stored: StoredResponse) -> None:
        if self.find(caller, stored.response_id) is not None:  # a client may choose its ids
            self._remove(caller.name, stored.response_id)
        if stored.size > self._max_bytes:
            return
        self._shelves[caller.name].put(stored)
        self._num_responses += 1
        self._size += stored.size
        while self._num_responses > self._max_responses:
            self._remove_oldest(max(self._shelves, key=lambda name: len(self._shelves[name].responses)))
        while self._size > self._max_bytes:
            self._remove_oldest(max(self._shelves, key=lambda name: self._shelves[name].size))

    def find(self, caller: Caller, response_id: str) -> StoredResponse | None:
        shelf = self._shelves.get(caller.name)
        return None if shelf is None else shelf.responses.get(response_id)

    def find_items(
        self, caller: Caller, item_ids: Iterable[str], max_bytes: int
    ) -> dict[str, StoredItem | None]:
        """Find output items by their ids. Raises ApiError where together they have more bytes than allowed."""
        shelf = self._shelves.get(caller.name)
        items = {item_id: None if shelf is None else shelf.outputs.get(item_id) for item_id in item_ids}
        num_bytes = sum(len(item.data) for item in items.values() if item is not None)
        if num_bytes > max_bytes:
            raise conversation_too_large(f"{num_bytes} bytes", f"{max_bytes} (--max-body-size)", "input")
        return items

    def remove(self, caller: Caller, response_id: str) -> None:
        """Raises ApiError 404 where there is none."""
        if self.find(caller, response_id) is None:
            raise not_stored(response_id)
        self._remove(caller.name, response_id)

    def _remove_oldest(self, name: str) -> None:
        self._remove(name, next(iter(self._shelves[name].responses)))

    def _remove(self, name: str, response_id: str) -> None:
        shelf = self._shelves[name]
        self._size -= shelf.take(response_id).size
        self._num_responses -= 1
        if not shelf.responses:
            del self._shelves[name]


class Responses(Protocol):
    """A store that may be in another process. Each question is answered with no more than it asks for."""

    async def content(self, caller: Caller, response_id: str) -> ResponseContent | None: ...

    async def conversation(self, caller: Caller, response_id: str) -> Sequence[StoredItem] | None: ...

    async def input_page(self, caller: Caller, response_id: str, query: PageQuery) -> InputPage | None: ...

    async def find_items(
        self, caller: Caller, item_ids: Sequence[str], max_bytes: int
    ) -> dict[str, StoredItem | None]: ...

    async def add(self, caller: Caller, stored: StoredResponse) -> None: ...

    async def remove(self, caller: Caller, response_id: str) -> None: ...


class LocalResponses:
    """A store in this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def content(self, caller: Caller, response_id: str) -> ResponseContent | None:
        stored = self._store.find(caller, response_id)
        return None if stored is None else stored.content

    async def conversation(self, caller: Caller, response_id: str) -> Sequence[StoredItem] | None:
        stored = self._store.find(caller, response_id)
        return None if stored is None else stored.items

    async def input_page(self, caller: Caller, response_id: str, query: PageQuery) -> InputPage | None:
        stored = self._store.find(caller, response_id)
        return None if stored is None else InputPage.of(stored.inputs, query)

    async def find_items(
        self, caller: Caller, item_ids: Sequence[str], max_bytes: int
    ) -> dict[str, StoredItem | None]:
        return self._store.find_items(caller, item_ids, max_bytes)

    async def add(self, caller: Caller, stored: StoredResponse) -> None:
        self._store.add(caller, stored)

    async def remove(self, caller: Caller, response_id: str) -> None:
        self._store.remove(caller, response_id)


def not_stored(response_id: str) -> ApiError:
    message = f"there is no response {response_id!r:.200}: it was not stored, or is forgotten by now"
    return ApiError(404, message, code="response_not_found")
