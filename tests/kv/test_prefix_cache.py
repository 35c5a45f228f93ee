"""Names of blocks: the same whether they were hashed or taken from a request that begins alike."""

from __future__ import annotations

from array import array
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from inflight.kv.block_names import NUM_RECENT
from inflight.kv.prefix_cache import ChainHashCache
from inflight.request import Request, SamplingParams

SIZE = 4


def ask(token_ids: list[int], salt: str = "") -> Request:
    return Request("r", token_ids, SamplingParams(), max_tokens=50, cache_salt=salt)


def names(token_ids: list[int], salt: str) -> list[bytes]:
    """As the module says they are made, of all full blocks."""
    made = [sha256(salt.encode()).digest()]
    for start in range(0, len(token_ids) // SIZE * SIZE, SIZE):
        made.append(sha256(made[-1] + array("q", token_ids[start : start + SIZE]).tobytes()).digest())
    return made[1:]


IDS = st.lists(st.integers(0, 2), min_size=1, max_size=5 * SIZE)


@given(st.lists(st.tuples(IDS, IDS, st.sampled_from(["", "a"])), max_size=2 * NUM_RECENT))
def test_names_depend_on_nobody_else(prompts: list[tuple[list[int], list[int], str]]) -> None:
    cache = ChainHashCache(SIZE)
    for beginning, rest, salt in prompts:
        for token_ids in (beginning + rest, beginning, beginning + rest[::-1]):
            request = ask(token_ids, salt)
            cache.match(request)
            found = request.block_hashes
            assert len(found) >= (len(token_ids) - 1) // SIZE
            assert found == names(token_ids, salt)[: len(found)]


def test_outputs_are_named_too() -> None:
    cache = ChainHashCache(SIZE)
    cache.match(ask(list(range(9))))
    request = ask(list(range(9)))
    cache.match(request)
    request.token_ids += range(9, 22)
    request.block_ids = list(range(5))
    cache.publish(request, 20)
    assert request.block_hashes == names(request.token_ids, "")
    # And nobody takes them for a prompt's.
    other = ask([*range(9), 7, 7, 7, 7, 7])
    assert cache.match(other) == [0, 1]
    assert other.block_hashes == names(other.token_ids, "")


def test_of_many_that_begin_alike_one_is_remembered() -> None:
    cache = ChainHashCache(SIZE)
    for kind in [*range(NUM_RECENT), *[0] * 20]:
        cache.match(ask([kind] * 9))
    assert [request.first_ids[0] for request in cache._namer.recent] == [*range(1, NUM_RECENT), 0]
    cache.match(ask([99] * 9))
    assert [request.first_ids[0] for request in cache._namer.recent] == [*range(2, NUM_RECENT), 0, 99]
