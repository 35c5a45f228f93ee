"""One request to /v1/responses: the conversation before the answer, and what is kept of both."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from inflight.frontend import OutputProcessor
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.formatters import encode
from inflight.server.openai.params import GenerationParams
from inflight.server.openai.responses.conversation import chat_of, check_repeated, input_items, user_of
from inflight.server.openai.responses.schemas import ItemReference, ResponsesBody
from inflight.server.openai.responses.store import ResponseContent, StoredResponse
from inflight.server.openai.responses.stored_items import StoredItem, check_conversation
from inflight.server.prepare import prepare_chat
from inflight.server.state import ServerState


class ResponseTurn:
    """`look_up` once the request is admitted, then `prepare`; `ended` and `keep` after the answer."""

    def __init__(self, state: ServerState, caller: Caller, body: ResponsesBody) -> None:
        self._state, self._caller, self._body = state, caller, body
        self._input = input_items(body)
        self._earlier: Sequence[StoredItem] = ()  # the conversation that this one continues
        self._referenced: dict[str, StoredItem] = {}
        self._conversation: list[StoredItem] = []  # all items before the answer, where they are to be stored
        self._ended: StoredResponse | None = None

    async def look_up(self) -> None:
        """Fetch what the body refers to. Raises ApiError where that is not stored."""
        responses, response_id = self._state.responses, self._body.previous_response_id
        if response_id is not None:
            earlier = await responses.conversation(self._caller, response_id)
            if earlier is None:
                message = f"there is no response {response_id!r:.200} to go on from"
                message += ": it was not stored, or is forgotten by now"
                raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id")
            self._earlier = earlier
        item_ids = list(dict.fromkeys(item.id for item in self._input if isinstance(item, ItemReference)))
        if item_ids:
            found = await responses.find_items(self._caller, item_ids, self._state.options.max_body_size)
            for item_id, item in found.items():
                if item is None:
                    message = f"there is no item {item_id!r:.200}: its response was not stored, or is forgotten by now"
                    raise ApiError(400, message, code="item_not_found", param="input")
                self._referenced[item_id] = item

    def prepare(self, params: GenerationParams) -> list[OutputProcessor]:
        """Render the conversation. Takes long."""
        body = self._body
        check_repeated(body)
        items = [*self._earlier, *self._own_items()]
        if self._earlier or self._referenced:  # else all of it was in the body, whose limits are checked
            param = "previous_response_id" if self._earlier else "input"
            check_conversation(items, self._state.options.max_body_size, param)
        if body.store is not False:
            self._conversation = items
        return prepare_chat(
            # Items are decoded one by one, so that no other thread waits long for Python's lock.
            *(self._state, self._caller, chat_of(body, (item.read() for item in items)), params),
            priority=body.priority or 0,
            user=user_of(body),
            cache_salt=body.cache_salt or "",
        )

    def _own_items(self) -> Iterator[StoredItem]:
        """Yield the items of the body, references replaced by what they refer to."""
        for item in self._input:
            yield self._referenced[item.id] if isinstance(item, ItemReference) else StoredItem.of_input(item)

    def ended(self, response: dict[str, Any]) -> None:
        """Remember the response as it is now, to be stored."""
        outputs = tuple(map(StoredItem.of_output, response["output"]))
        content = ResponseContent(encode(response), secrets.token_hex(8))
        items = (*self._conversation, *outputs)
        self._ended = StoredResponse(response["id"], content, items, len(outputs))

    async def keep(self) -> None:
        """Store the response before its client hears of its end, so that any process can continue from it."""
        if self._ended is not None:
            await self._state.responses.add(self._caller, self._ended)
