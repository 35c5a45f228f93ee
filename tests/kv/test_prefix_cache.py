"""Block hashes: equal whether computed or copied from a request with a common prefix."""

from __future__ import annotations

from array import array
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import NUM_RECENT, BlockHasher, ChainHashCache
from inflight.request import Request
from inflight.sampling_params import SamplingParams

SIZE = 4


def ask(token_ids: list[int], salt: str = "") -> Request:
    return Request.create("r", token_ids, SamplingParams(), max_tokens=50, cache_salt=salt)


def documented_hashes(token_ids: list[int], salt: str) -> list[bytes]:
    """Return the hashes of all full blocks, computed as the module documents it."""
    root = sha256(salt.encode()).digest()
    ends = range(SIZE, len(token_ids) + 1, SIZE)
    return [sha256(root + array("q", token_ids[:end]).tobytes()).digest() for end in ends]


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=5 * SIZE)


@given(st.lists(st.tuples(IDS, IDS, st.sampled_from(["", "a"])), max_size=2 * NUM_RECENT))
def test_hashes_do_not_depend_on_other_requests(prompts: list[tuple[list[int], list[int], str]]) -> None:
    cache = ChainHashCache(KVLayout(SIZE))
    for beginning, rest, salt in prompts:
        for token_ids in (beginning + rest, beginning, beginning + rest[::-1]):
            request = ask(token_ids, salt)
            cache.match(request)
            hashes = request.block_hashes
            assert len(hashes) >= (len(token_ids) - 1) // SIZE
            assert hashes == documented_hashes(token_ids, salt)[: len(hashes)]


@given(IDS, st.sampled_from(["", "a"]), st.sets(st.integers(1, 5)))
def test_hashes_at_marks_equal_the_full_list(token_ids: list[int], salt: str, chosen: set[int]) -> None:
    marks = sorted(mark for mark in chosen if mark * SIZE <= len(token_ids))
    every = documented_hashes(token_ids, salt)
    assert BlockHasher(SIZE).hashes_at(ask(token_ids, salt), marks) == [every[mark - 1] for mark in marks]


def test_output_blocks_are_hashed_too() -> None:
    cache = ChainHashCache(KVLayout(SIZE))
    cache.match(ask(list(range(9))))
    request = ask(list(range(9)))
    cache.match(request)
    request.token_ids += range(9, 22)
    request.tables = [list(range(5))]
    cache.publish(request, 20)
    assert request.block_hashes == documented_hashes(request.token_ids, "")
    # They are not copied to requests with another prompt.
    other = ask([*range(9), 7, 7, 7, 7, 7])
    assert cache.match(other).tables == ([0, 1],)
    assert other.block_hashes == documented_hashes(other.token_ids, "")


def test_one_recent_request_is_kept_per_prefix() -> None:
    cache = ChainHashCache(KVLayout(SIZE))
    for kind in [*range(NUM_RECENT), *[0] * 20]:
        cache.match(ask([kind] * 9))
    assert [request.spec.token_ids[0] for request in cache._hasher.recent] == [*range(1, NUM_RECENT), 0]
    cache.match(ask([99] * 9))
    assert [request.spec.token_ids[0] for request in cache._hasher.recent] == [*range(2, NUM_RECENT), 0, 99]
