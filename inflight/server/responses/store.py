"""Responses that clients may go on from. In memory, and so few that it stays small."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from inflight.server.errors import ApiError
from inflight.server.keys import Caller

OVERHEAD = 1024  # bytes that an entry takes beside its texts


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One that has ended. As JSON: so it takes the memory that is counted."""

    response_id: str
    content: bytes  # the response itself
    items: bytes  # the conversation up to its end, a list of items
    item_ids: tuple[str, ...]  # of its own

    @property
    def size(self) -> int:
        return len(self.content) + len(self.items) + OVERHEAD


@dataclass(eq=False, slots=True)
class _Shelf:
    """One caller's, the oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    by_item: dict[str, str] = field(default_factory=dict)  # ids of the responses that the items are of
    size: int = 0

    def put(self, stored: StoredResponse) -> None:
        self.responses[stored.response_id] = stored
        self.size += stored.size
        self.by_item.update(dict.fromkeys(stored.item_ids, stored.response_id))

    def take(self, response_id: str) -> StoredResponse:
        stored = self.responses.pop(response_id)
        self.size -= stored.size
        for item_id in stored.item_ids:
            del self.by_item[item_id]
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

    def find_item(self, caller: Caller, item_id: str) -> StoredResponse | None:
        """The response that has an item of that id."""
        shelf = self._shelves.get(caller.name)
        response_id = None if shelf is None else shelf.by_item.get(item_id)
        return None if shelf is None or response_id is None else shelf.responses[response_id]

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
    """A store that may be in another process."""

    async def find(self, caller: Caller, response_id: str) -> StoredResponse | None: ...

    async def find_item(self, caller: Caller, item_id: str) -> StoredResponse | None: ...

    async def add(self, caller: Caller, stored: StoredResponse) -> None: ...

    async def remove(self, caller: Caller, response_id: str) -> None: ...


class LocalResponses:
    """One that is in this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def find(self, caller: Caller, response_id: str) -> StoredResponse | None:
        return self._store.find(caller, response_id)

    async def find_item(self, caller: Caller, item_id: str) -> StoredResponse | None:
        return self._store.find_item(caller, item_id)

    async def add(self, caller: Caller, stored: StoredResponse) -> None:
        self._store.add(caller, stored)

    async def remove(self, caller: Caller, response_id: str) -> None:
        self._store.remove(caller, response_id)


def not_stored(response_id: str) -> ApiError:
    message = f"there is no response {response_id!r:.200}: it was not stored, or is forgotten by now"
    return ApiError(404, message, code="response_not_found")
