"""Stored responses: few, small, and their caller's own."""

from __future__ import annotations

import pytest

from inflight.server.errors import ApiError
from inflight.server.keys import Caller
from inflight.server.responses.store import OVERHEAD, ResponseStore, StoredResponse

ALICE, BOB = Caller("alice"), Caller("bob")


def stored(name: str, size: int = 0) -> StoredResponse:
    return StoredResponse(name, b"x" * size, b"", (f"msg-{name}",))


def kept(store: ResponseStore, caller: Caller, names: str) -> str:
    return "".join(name for name in names if store.find(caller, name))


def test_one_caller_never_sees_anothers() -> None:
    store = ResponseStore(10, 1 << 20)
    store.add(ALICE, stored("a"))
    assert store.find(ALICE, "a") == store.find_item(ALICE, "msg-a") == stored("a")
    assert store.find(BOB, "a") is store.find_item(BOB, "msg-a") is None
    with pytest.raises(ApiError) as refused:
        store.remove(BOB, "a")
    assert refused.value.status == 404
    store.remove(ALICE, "a")
    assert store.find(ALICE, "a") is store.find_item(ALICE, "msg-a") is None
    assert (len(store), store.size) == (0, 0)


def test_who_has_the_most_gives_way() -> None:
    store = ResponseStore(4, 1 << 20)
    store.add(BOB, stored("b"))
    for name in "vwxyz":
        store.add(ALICE, stored(name))
    assert kept(store, ALICE, "vwxyz") == "xyz"
    assert kept(store, BOB, "b") == "b"
    assert len(store) == 4


def test_bytes_are_bounded() -> None:
    store = ResponseStore(100, 10 * OVERHEAD)
    store.add(BOB, stored("b"))
    for name in "xyz":
        store.add(ALICE, stored(name, 3 * OVERHEAD))
    assert kept(store, ALICE, "xyz") == "yz"
    assert store.size == 9 * OVERHEAD
    store.add(BOB, stored("c", 10 * OVERHEAD))
    assert kept(store, BOB, "bc") == "b"


def test_an_id_that_is_used_again_is_the_later_one() -> None:
    store = ResponseStore(10, 1 << 20)
    store.add(ALICE, stored("a", 5))
    store.add(ALICE, stored("a", 7))
    assert store.find(ALICE, "a") == stored("a", 7)
    assert (len(store), store.size) == (1, 7 + OVERHEAD)


def test_a_store_for_none() -> None:
    store = ResponseStore(0, 1 << 20)
    store.add(ALICE, stored("a"))
    assert store.find(ALICE, "a") is None
