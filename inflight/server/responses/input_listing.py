"""What a stored response was made from, a page at a time: `GET /v1/responses/{id}/input_items`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from inflight.server.errors import ApiError
from inflight.server.responses.store import StoredResponse
from inflight.server.schemas.response_items import InputItem
from inflight.server.schemas.responses import InputItemList

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def with_id(item: InputItem) -> InputItem:
    """The item with an id to find it by, where its client gave it none."""
    if item.id is not None:
        return item
    return item.model_copy(update={"id": f"{_PREFIXES[item.type]}_{secrets.token_hex(24)}"})


def listed(
    stored: StoredResponse, conversation: list[dict[str, Any]], query: Mapping[str, str]
) -> InputItemList:
    """A page of the conversation before the response. Raises ApiError for a query that makes no sense."""
    items = conversation[: len(conversation) - len(stored.item_ids)]
    limit, order = _limit(query), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _wrong("order", f"order is {order!r:.100}: allowed are asc and desc")
    if order == "desc":
        items.reverse()
    if "after" in query:
        items = items[_place(items, query["after"]) + 1 :]
    page = [_whole(item) for item in items[:limit]]
    return InputItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > limit,
    )


def _limit(query: Mapping[str, str]) -> int:
    given = query.get("limit", str(DEFAULT_LIMIT))
    if not (given.isascii() and given.isdigit() and len(given) < 4 and 1 <= int(given) <= MAX_LIMIT):
        raise _wrong("limit", f"limit is {given!r:.100}: it must be an integer from 1 to {MAX_LIMIT}")
    return int(given)


def _place(items: list[dict[str, Any]], item_id: str) -> int:
    for place, item in enumerate(items):
        if item["id"] == item_id:
            return place
    raise _wrong("after", f"after is {item_id!r:.200}: there is no such item in this response's input")


def _whole(item: dict[str, Any]) -> dict[str, Any]:
    """As clients get items: contents are lists of parts, whatever shorter form was sent."""
    found = {"status": "completed", **item}
    if item["type"] == "message" and isinstance(item["content"], str):
        by_model = item["role"] == "assistant"
        part: dict[str, Any] = {"type": "output_text" if by_model else "input_text", "text": item["content"]}
        found["content"] = [part | ({"annotations": []} if by_model else {})]
    return found


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
