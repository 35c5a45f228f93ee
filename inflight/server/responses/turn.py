"""One request to /v1/responses: the conversation before the answer, and what is kept of both."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from inflight.frontend import OutputProcessor
from inflight.server.errors import ApiError
from inflight.server.formatters import encode
from inflight.server.keys import Caller
from inflight.server.prepare import GenerationParams, prepare_chat
from inflight.server.responses.conversation import chat_of, input_items, user_of
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.schemas.response_items import InputItem, ItemReference
from inflight.server.schemas.responses import ResponsesBody
from inflight.server.state import ServerState

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ResponseTurn:
    """Looks up what it refers to when it is made, before anything of that is forgotten."""

    def __init__(self, state: ServerState, caller: Caller, body: ResponsesBody) -> None:
        """Raises ApiError where what it goes on from is not stored."""
        self._state, self._caller, self._body = state, caller, body
        self._earlier = _earlier(state.responses, caller, body.previous_response_id)
        self._items = input_items(body)
        self._references = {
            item.id: _referenced(state.responses, caller, item.id)
            for item in self._items
            if isinstance(item, ItemReference)
        }
        self._conversation = b""  # with all items before the answer

    def prepare(self, params: GenerationParams) -> list[OutputProcessor]:
        """Takes long."""
        body = self._body
        items = [*_ITEMS.validate_json(self._earlier), *self._resolved()]
        if body.store is not False:
            self._conversation = _ITEMS.dump_json(items, exclude_none=True)
        return prepare_chat(
            *(self._state, self._caller, chat_of(body, items), params),
            priority=body.priority or 0,
            user=user_of(body),
            cache_salt=body.cache_salt or "",
        )

    def _resolved(self) -> list[InputItem]:
        conversations = {data: _ITEMS.validate_json(data) for data in set(self._references.values())}
        stored = {
            item_id: [item for item in conversations[data] if item.id == item_id]
            for item_id, data in self._references.items()
        }
        found: list[InputItem] = []
        for item in self._items:
            found += stored[item.id] if isinstance(item, ItemReference) else [item]
        return found

    def keep(self, response: dict[str, Any]) -> None:
        """For those who go on from it."""
        output = response["output"]
        before = self._conversation.removesuffix(b"]")
        stored = StoredResponse(
            response["id"],
            encode(response),
            before + b"," + encode(output).removeprefix(b"["),
            tuple(item["id"] for item in output),
        )
        self._state.responses.add(self._caller, stored)


def _earlier(store: ResponseStore, caller: Caller, response_id: str | None) -> bytes:
    """The items of the conversation that is gone on with."""
    if response_id is None:
        return b"[]"
    found = store.find(caller, response_id)
    if found is None:
        message = f"there is no response {response_id!r:.200} to go on from: it was not stored, or is forgotten by now"
        raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
    return found.items


def _referenced(store: ResponseStore, caller: Caller, item_id: str) -> bytes:
    found = store.find_item(caller, item_id)
    if found is None:
        message = f"there is no item {item_id!r:.200}: its response was not stored, or is forgotten by now"
        raise ApiError(400, message, code="item_not_found", param="input")
    return found.items
