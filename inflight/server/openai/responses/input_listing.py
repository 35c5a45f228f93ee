"""Pages of what a stored response was made from: `GET /v1/responses/{id}/input_items`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from inflight.server.errors import ApiError
from inflight.server.openai.responses.stored_items import StoredItem

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
MAX_PAGE_BYTES = 1 << 20  # a page ends before the item that would exceed it, but has at least one


class PageQuery(msgspec.Struct, frozen=True):
    limit: int
    order: str
    after: str | None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> PageQuery:
        """Raise ApiError for a query that makes no sense."""
        limit = query.get("limit", str(DEFAULT_LIMIT))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_LIMIT):
            raise _wrong("limit", f"limit is {limit!r:.100}: it must be an integer from 1 to {MAX_LIMIT}")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise _wrong("order", f"order is {order!r:.100}: allowed are asc and desc")
        return cls(int(limit), order, query.get("after"))


class InputPage(msgspec.Struct, frozen=True):
    items: list[StoredItem]
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[StoredItem], query: PageQuery) -> InputPage:
        """Raise ApiError where no item has the id after which the page begins. Items with the same id are listed once:
        `after` could not tell them apart, and pages would repeat without end."""
        unique = list({item.item_id: item for item in items}.values())
        ordered = unique if query.order == "asc" else unique[::-1]
        start = 0 if query.after is None else _place(ordered, query.after) + 1
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


def _place(items: Sequence[StoredItem], item_id: str) -> int:
    for place, item in enumerate(items):
        if item.item_id == item_id:
            return place
    raise _wrong("after", f"after is {item_id!r:.200}: there is no such item in this response's input")


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
