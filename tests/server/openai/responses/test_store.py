"""Stored responses: few, small, and their caller's own."""

from __future__ import annotations

import json

import pytest

from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.openai.responses.store import (
    ITEM_OVERHEAD,
    MAX_PAGE_BYTES,
    OVERHEAD,
    InputPage,
    PageQuery,
    ResponseContent,
    ResponseStore,
    StoredItem,
    StoredResponse,
)

ALICE, BOB = Caller("alice"), Caller("bob")
LARGEST = 1 << 20


def item(name: str, size: int = 2) -> StoredItem:
    return StoredItem(name, b'"%b"' % (b"x" * (size - 2)), 1)


def stored(name: str, size: int = 0) -> StoredResponse:
    return StoredResponse(name, ResponseContent(b"x" * size), (item("in"), item(f"msg-{name}")), 1)


SMALLEST = stored("").size


def kept(store: ResponseStore, caller: Caller, names: str) -> str:
    return "".join(name for name in names if store.find(caller, name))


async def test_callers_see_only_their_own_responses() -> None:
    store = ResponseStore(10, 1 << 20)
    await store.add(ALICE, stored("a"))
    assert store.find(ALICE, "a") == stored("a")
    assert await store.find_items(ALICE, ["msg-a", "in"], LARGEST) == {"msg-a": item("msg-a"), "in": None}
    assert store.find(BOB, "a") is None
    assert await store.find_items(BOB, ["msg-a"], LARGEST) == {"msg-a": None}
    with pytest.raises(ApiError) as refused:
        await store.remove(BOB, "a")
    assert refused.value.status == 404
    await store.remove(ALICE, "a")
    assert store.find(ALICE, "a") is None
    assert await store.find_items(ALICE, ["msg-a"], LARGEST) == {"msg-a": None}
    assert (len(store), store.size) == (0, 0)


async def test_full_store_evicts_from_the_caller_with_the_most() -> None:
    store = ResponseStore(4, 1 << 20)
    await store.add(BOB, stored("b"))
    for name in "vwxyz":
        await store.add(ALICE, stored(name))
    assert kept(store, ALICE, "vwxyz") == "xyz"
    assert kept(store, BOB, "b") == "b"
    assert len(store) == 4


async def test_store_is_bounded_in_bytes() -> None:
    size = 3 * SMALLEST
    store = ResponseStore(100, 10 * SMALLEST)
    await store.add(BOB, stored("b"))
    for name in "xyz":
        await store.add(ALICE, stored(name, size))
    assert kept(store, ALICE, "xyz") == "yz"
    assert store.size == 9 * SMALLEST
    await store.add(BOB, stored("c", 10 * SMALLEST))
    assert kept(store, BOB, "bc") == "b"


def test_size_counts_content_and_items() -> None:
    conversation = tuple(item(str(number), 100) for number in range(5))
    whole = StoredResponse("a", ResponseContent(b"x" * 50), conversation, 1)
    assert whole.size == 50 + 5 * (100 + ITEM_OVERHEAD) + OVERHEAD
    assert [one.item_id for one in whole.inputs] == ["0", "1", "2", "3"]
    assert [one.item_id for one in whole.outputs] == ["4"]


async def test_items_that_are_too_large_together_are_rejected() -> None:
    store = ResponseStore(10, 1 << 20)
    outputs = (item("a", 600), item("b", 600))
    await store.add(ALICE, StoredResponse("r", ResponseContent(b""), outputs, 2))
    assert await store.find_items(ALICE, ["a"], 1000) == {"a": outputs[0]}
    with pytest.raises(ApiError, match="has 1200 bytes: at most 1000") as refused:
        await store.find_items(ALICE, ["a", "b"], 1000)
    assert (refused.value.status, refused.value.code) == (400, "conversation_too_large")


async def test_reused_id_replaces_the_earlier_response() -> None:
    store = ResponseStore(10, 1 << 20)
    await store.add(ALICE, stored("a", 5))
    await store.add(ALICE, stored("a", 7))
    assert store.find(ALICE, "a") == stored("a", 7)
    assert (len(store), store.size) == (1, 7 + SMALLEST)


async def test_store_of_size_0_stores_nothing() -> None:
    store = ResponseStore(0, 1 << 20)
    await store.add(ALICE, stored("a"))
    assert store.find(ALICE, "a") is None


def test_pages_are_bounded_in_bytes_and_items() -> None:
    size = MAX_PAGE_BYTES // 2 + 2
    items = [item("a", 10), item("b", size), item("c", size), item("d", 3 * MAX_PAGE_BYTES), item("e", 10)]
    pages, after = [], None
    while True:
        page = InputPage.from_items(items, PageQuery(100, "asc", after))
        pages.append("".join(one.item_id for one in page.items))
        if not page.has_more:
            break
        after = page.items[-1].item_id
    assert pages == ["ab", "c", "d", "e"]  # each item is in a page, also one that is larger than a page
    assert len(InputPage.from_items(items, PageQuery(1, "desc", None)).items) == 1


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_items_with_the_same_id_are_listed_once(order: str) -> None:
    items = [item(name) for name in "abcbbcbd"]
    listed: list[str] = []
    after, has_more = None, True
    while has_more:
        assert len(listed) < len(items)
        page = InputPage.from_items(items, PageQuery(1, order, after))
        listed += [item.item_id for item in page.items]
        after, has_more = listed[-1], page.has_more
    assert listed == sorted("abcd", reverse=order == "desc")


def test_page_is_json() -> None:
    page = json.loads(InputPage([item("a"), item('"b')], True).encode())
    assert page == {"object": "list", "data": ["", ""], "first_id": "a", "last_id": '"b', "has_more": True}
    empty = json.loads(InputPage([], False).encode())
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
