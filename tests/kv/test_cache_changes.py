"""The reported changes of a prefix cache match its content."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.events import CACHE_HASH_LENGTH, CacheUpdate
from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import CacheChanges, ChainHashCache, PrefixCache
from tests.support.requests import make_request

SIZE = 4


def names(packed: bytes) -> list[bytes]:
    return [packed[at : at + CACHE_HASH_LENGTH] for at in range(0, len(packed), CACHE_HASH_LENGTH)]


def apply(known: set[bytes], update: CacheUpdate | None) -> None:
    if update is not None:
        if update.cleared:
            known.clear()
        known |= set(names(update.stored))
        known -= set(names(update.evicted))


def in_cache(cache: ChainHashCache) -> set[bytes]:
    return {name[:CACHE_HASH_LENGTH] for name in cache._bundle_of[0]}


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(st.lists(st.one_of(PROMPTS, st.sampled_from(["take", "clear"])), max_size=30))
def test_reported_changes_add_up_to_the_cache(events: list[list[int] | str]) -> None:
    cache = ChainHashCache(KVLayout(SIZE))
    blocks, changes, known = BlockManager(5, KVLayout(SIZE), cache), CacheChanges(), {b"old entry"}
    cache.report(changes)
    for event in events:
        if event == "take":
            apply(known, changes.take())
            assert known == in_cache(cache)
        elif event == "clear":
            blocks.drop_cache()
        else:
            request = make_request(list(event))  # type: ignore[arg-type]
            blocks.attach(request, blocks.match(request))
            if blocks.grow(request, len(event)) is not None:
                blocks.publish(request, len(event))
            blocks.free(request)
        assert len(changes._stored) + len(changes._evicted) <= 2 * 5
    apply(known, changes.take())
    assert known == in_cache(cache)
    assert changes.take() is None


def test_late_observer_gets_the_whole_content() -> None:
    cache = ChainHashCache(KVLayout(SIZE))
    blocks = BlockManager(8, KVLayout(SIZE), cache)
    request = make_request(list(range(9)))
    blocks.attach(request, blocks.match(request))
    blocks.grow(request, 9)
    blocks.publish(request, 9)
    changes = CacheChanges()
    cache.report(changes)
    update = changes.take()
    assert update is not None
    assert update.cleared
    assert set(names(update.stored)) == in_cache(cache)
    cache.report(None)
    blocks.drop_cache()
    assert not changes


def test_null_cache_reports_nothing() -> None:
    changes = CacheChanges()
    PrefixCache().report(changes)
    assert not changes
