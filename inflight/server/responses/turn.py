"""One request to /v1/responses: the conversation before the answer, and what is kept of both."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from inflight.frontend import OutputProcessor
from inflight.server.errors import ApiError
from inflight.server.formatters import encode
from inflight.server.generation_params import GenerationParams
from inflight.server.keys import Caller
from inflight.server.prepare import prepare_chat
from inflight.server.responses.conversation import chat_of, input_items, user_of
from inflight.server.responses.input_listing import with_id
from inflight.server.responses.store import Responses, StoredResponse
from inflight.server.schemas.response_items import InputItem, ItemReference
from inflight.server.schemas.responses import ResponsesBody
from inflight.server.state import ServerState

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ResponseTurn:
    """`look_up` before anything else, and before anything of that is forgotten."""

    def __init__(self, state: ServerState, caller: Caller, body: ResponsesBody) -> None:
        self._state, self._caller, self._body = state, caller, body
        self._items = input_items(body)
        self._earlier = b"[]"  # the items of the conversation that is gone on with
        self._references: dict[str, bytes] = {}
        self._conversation = b""  # with all items before the answer
        self._ended: StoredResponse | None = None

    async def look_up(self) -> None:
        """What it refers to. Raises ApiError where what it goes on from is not stored."""
        responses, caller = self._state.responses, self._caller
        self._earlier = await _earlier(responses, caller, self._body.previous_response_id)
        for item in self._items:
            if isinstance(item, ItemReference):
                self._references[item.id] = await _referenced(responses, caller, item.id)

    def prepare(self, params: GenerationParams) -> list[OutputProcessor]:
        """Takes long."""
        body = self._body
        items = [*_ITEMS.validate_json(self._earlier), *self._resolved()]
        if body.store is not False:
            self._conversation = _ITEMS.dump_json([with_id(item) for item in items], exclude_none=True)
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

    def ended(self, response: dict[str, Any]) -> None:
        """It is to be kept as it is now."""
        output = response["output"]
        before = self._conversation.removesuffix(b"]")
        self._ended = StoredResponse(
            response["id"],
            encode(response),
            before + b"," + encode(output).removeprefix(b"["),
            tuple(item["id"] for item in output),
        )

    async def keep(self) -> None:
        """For those who go on from it: once they know of its end, it must be there, whatever process they ask."""
        if self._ended is not None:
            await self._state.responses.add(self._caller, self._ended)


async def _earlier(responses: Responses, caller: Caller, response_id: str | None) -> bytes:
    """The items of the conversation that is gone on with."""
    if response_id is None:
        return b"[]"
    found = await responses.find(caller, response_id)
    if found is None:
        message = f"there is no response {response_id!r:.200} to go on from: it was not stored, or is forgotten by now"
        raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
    return found.items


async def _referenced(responses: Responses, caller: Caller, item_id: str) -> bytes:
    found = await responses.find_item(caller, item_id)
    if found is None:
        message = f"there is no item {item_id!r:.200}: its response was not stored, or is forgotten by now"
        raise ApiError(400, message, code="item_not_found", param="input")
    return found.items
