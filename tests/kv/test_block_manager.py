"""A state machine over the block manager: blocks always balance, and shared content is right in every KV group."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.errors import KVBudgetError
from inflight.kv.block_manager import BlockManager
from inflight.kv.budget import blocks_for_memory, fit_context, most_blocks
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import BlockHasher, ChainHashCache, PrefixCache, PrefixHit
from inflight.kv.snapshots import StateCopies
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from tests.support.requests import make_request

BLOCK_SIZE = 4
NUM_BLOCKS = 12
LAYOUTS = {
    "full": KVLayout(BLOCK_SIZE),
    "full and window": KVLayout(BLOCK_SIZE, (None, 6, 6)),
    "windows": KVLayout(BLOCK_SIZE, (3, 9)),
    "full and state": KVLayout(BLOCK_SIZE, (None,), 3),
    "full, windows and state": KVLayout(BLOCK_SIZE, (1, None, 5, None), 2),
}

# Few ids and few salts, so that prefixes meet often.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
SALTS = st.sampled_from(["", "a"])
Content = tuple[str, tuple[int, ...]]  # the salt and the whole prefix that a block or a snapshot ends


def naive_hit(cache: ChainHashCache, layout: KVLayout, request: Request) -> int:
    """Return the blocks of the longest prefix for which every group has what it needs, by the definition."""
    size = layout.block_size
    most = (len(request.token_ids) - 1) // size
    hashes = BlockHasher(size).hashes(
        make_request(request.token_ids, cache_salt=request.spec.cache_key), most
    )
    for count in range(most, 0, -1):
        complete = not layout.snapshot_blocks or hashes[count - 1] in cache._bundle_of[-1]
        for group, bundle_of in zip(layout.groups, cache._bundle_of, strict=False):
            reach = count * size if group.window is None else group.window - 1
            blocks = {position // size for position in range(max(0, count * size - reach), count * size)}
            complete = complete and all(hashes[block] in bundle_of for block in blocks)
        if complete:
            return count
    return 0


class BlockMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(LAYOUTS)), times=st.sampled_from([1, 2, 4]))
    def start(self, name: str, times: int) -> None:
        self.layout = LAYOUTS[name]
        self.cache = ChainHashCache(self.layout)
        self.blocks = BlockManager(NUM_BLOCKS * times, self.layout, self.cache)
        self.live: list[Request] = []
        self.content: dict[int, Content] = {}  # of every block, as the model would have written it

    def compute(self, request: Request, count: int) -> bool:
        """Compute tokens in their own step; return whether there is memory for them."""
        start, salt, ids = request.num_computed, request.spec.cache_key, request.token_ids
        if self.blocks.grow(request, start + count) is None:
            return False
        request.num_computed += count
        self.blocks.publish(request, request.num_computed)
        copies = self.blocks.take_copies() or StateCopies()
        for copy in copies.restores:  # before anything is written: the snapshot may be evicted in this step
            prefix = salt, tuple(ids[:start])
            assert [self.content[block_id] for block_id in copy.block_ids] == [prefix] * len(copy.block_ids)
        for _, first, block_ids, table in self.blocks.table_updates(request):
            for index, block_id in enumerate(block_ids, first):
                end = (index + 1) * BLOCK_SIZE
                if start < end <= request.num_computed:
                    self.content[block_id] = f"{salt}{table}", tuple(ids[:end])
        for save in copies.saves:
            self.content |= dict.fromkeys(save.block_ids, (salt, tuple(ids[:start])))
        for capture in copies.captures:
            assert start < capture.position < request.num_computed
            self.content |= dict.fromkeys(capture.block_ids, (salt, tuple(ids[: capture.position])))
        return True

    @rule(prompt=PROMPTS, salt=SALTS, chunk=st.sampled_from([1, 3, 8, 100]))
    def admit(self, prompt: list[int], salt: str, chunk: int) -> None:
        request = make_request(prompt, cache_salt=salt)
        hit = self.blocks.match(request)
        assert hit.num_blocks == naive_hit(self.cache, self.layout, request)
        assert hit.num_blocks * BLOCK_SIZE < len(prompt), "a cached prompt still computes its last token"
        self.check_content(hit, prompt, salt)
        if not self.blocks.fits(hit, len(prompt), chunk):
            return
        self.blocks.attach(request, hit)
        request.num_computed = request.num_cached = request.kv_capacity
        while request.num_computed < len(prompt):
            count = min(chunk, len(prompt) - request.num_computed)
            assert self.compute(request, count), "what fits can be had"
            assert self.blocks.num_held(request) <= self.layout.blocks_for(len(prompt), chunk)
        self.live.append(request)

    def check_content(self, hit: PrefixHit, prompt: list[int], salt: str) -> None:
        for group, bundles in zip(self.layout.groups, hit.tables, strict=False):
            for index, bundle in enumerate(bundles):
                if bundle >= 0:
                    prefix = tuple(prompt[: (index + 1) * BLOCK_SIZE])
                    for table, block_id in zip(group.tables, self.blocks.pool.blocks(bundle), strict=True):
                        assert self.content[block_id] == (f"{salt}{table}", prefix), "a hit holds this prefix"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def decode(self, data: st.DataObject, ids: list[int]) -> None:
        request = data.draw(st.sampled_from(self.live))
        request.token_ids += ids
        before = request.kv_capacity, list(request.tables[-1])
        if not self.compute(request, len(ids)):
            assert request.kv_capacity == before[0], "a refusal adds nothing"
            assert len(request.tables[-1]) == len(before[1])
            del request.token_ids[-len(ids) :]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        held, others = self.held(request), [self.held(other) for other in self.live]
        assert self.blocks.num_held(request) == len(held)
        assert self.blocks.free(request) == len(held.difference(*others))

    def held(self, request: Request) -> set[int]:
        return {
            block_id for _, _, block_ids, _ in self.blocks.table_updates(request) for block_id in block_ids
        }

    @rule()
    def drop_cache(self) -> None:
        self.blocks.drop_cache()
        assert self.blocks.pool.num_cached == 0

    @invariant()
    def balances(self) -> None:
        if not hasattr(self, "live"):
            return
        self.blocks.check(self.live)
        resident = sum(request.num_computed for request in self.live)
        usage = self.blocks.usage(resident)
        assert usage.num_empty + usage.num_cached + usage.num_used == self.blocks.pool.num_blocks
        assert 0 <= usage.num_tokens <= usage.num_used * BLOCK_SIZE

    @invariant()
    def shared_only_if_equal(self) -> None:
        holders: dict[int, set[tuple[int, str, tuple[int, ...]]]] = {}
        for request in getattr(self, "live", ()):
            for _, first, block_ids, table in self.blocks.table_updates(request):
                for index, block_id in enumerate(block_ids, first):
                    prefix = tuple(request.token_ids[: (index + 1) * BLOCK_SIZE])
                    holders.setdefault(block_id, set()).add((table, request.spec.cache_key, prefix))
        assert all(len(prefixes) == 1 for prefixes in holders.values()), (
            "owners of a block have the same prefix"
        )

    @invariant()
    def windows_are_tight(self) -> None:
        for request in getattr(self, "live", ()):
            for table, group in zip(request.tables, self.layout.groups, strict=True):
                num_live = sum(bundle >= 0 for bundle in table)
                assert num_live == len(table) - table.count(-1)
                if group.window is not None:  # it shrinks when the request grows, so a chunk may linger
                    assert table[group.first_needed(request.num_computed, BLOCK_SIZE) :].count(-1) == 0


BlockMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase


@given(
    windows=st.lists(st.sampled_from([None, 1, 5, 16, 33]), min_size=1, max_size=3),
    size=st.sampled_from([1, 4, 16]),
    num_tokens=st.integers(1, 120),
    chunk=st.integers(1, 40),
)
def test_most_blocks_held_are_those_of_the_worst_chunks(
    windows: list[int | None], size: int, num_tokens: int, chunk: int
) -> None:
    """Compared with a count of the blocks that each step reads or writes, from every possible start."""
    layout = KVLayout(size, tuple(windows))
    worst = 0
    for start in range(num_tokens):
        end = min(start + chunk, num_tokens)
        firsts = [0 if window is None else max(0, start - window + 1) for window in windows]
        worst = max(worst, sum((end - 1) // size - first // size + 1 for first in firsts))
    most = layout.blocks_for(num_tokens, chunk)
    assert worst <= most <= worst + len(windows)
    assert layout.max_tokens(most, chunk) >= num_tokens
    longest = layout.max_tokens(most, chunk)
    assert longest >= 1 << 40 or layout.blocks_for(longest + 1, chunk) > most


def manager(num_blocks: int = 8, layout: KVLayout = LAYOUTS["full"]) -> BlockManager:
    return BlockManager(num_blocks, layout, ChainHashCache(layout))


def num_hits(blocks: BlockManager, prompt: list[int], **fields: Any) -> int:
    return blocks.match(make_request(prompt, **fields)).num_blocks


def allocate(blocks: BlockManager, num_tokens: int) -> Request:
    """Give blocks to a request without cached blocks."""
    request = make_request([99] * num_tokens)
    blocks.attach(request, blocks.match(request))
    assert blocks.grow(request, num_tokens) is not None
    return request


def run_through(blocks: BlockManager, prompt: list[int], cache_salt: str = "") -> Request:
    """Admit, compute and free one request."""
    request = make_request(prompt, cache_salt=cache_salt)
    blocks.attach(request, blocks.match(request))
    request.num_computed = request.num_cached = request.kv_capacity
    blocks.grow(request, len(prompt))
    request.num_computed = len(prompt)
    blocks.publish(request, len(prompt))
    blocks.take_copies()
    return request


def decode(blocks: BlockManager, request: Request, ids: list[int]) -> None:
    """Compute tokens one by one, each in its own step, and grow at block boundaries, as the scheduler does."""
    for token_id in ids:
        request.token_ids.append(token_id)
        if request.num_computed == request.kv_capacity:
            assert blocks.grow(request, request.num_computed + 1) is not None
        request.num_computed += 1
        blocks.publish(request, request.num_computed)
        blocks.take_copies()


def test_decode_reuses_the_block_that_leaves_its_window() -> None:
    blocks = manager(32, KVLayout(BLOCK_SIZE, (None, 6)))
    request = run_through(blocks, list(range(16)))
    decode(blocks, request, list(range(100, 108)))  # the window leaves the prompt behind
    decode(blocks, request, [108])
    cached, window = blocks.pool.num_cached, request.tables[1][-3:]
    decode(blocks, request, list(range(109, 120)))
    assert blocks.pool.num_cached == cached, "nothing but the prompt stays cached"
    assert sorted(bundle for bundle in request.tables[1] if bundle >= 0) == sorted(window)
    answer = [*range(16), *range(100, 120)]
    assert num_hits(blocks, [*answer, 0]) == 4, "the end of the prompt"
    blocks.free(request)
    assert num_hits(blocks, [*answer, 0]) == 9, "the last window of the answer"


def test_snapshot_of_a_decoding_request_can_be_hit_once_it_ends() -> None:
    blocks = manager(32, LAYOUTS["full and state"])
    request = run_through(blocks, list(range(8)))
    decode(blocks, request, list(range(100, 113)))
    answer = [*range(8), *range(100, 113)]
    assert num_hits(blocks, [*answer, 0]) == 1, "the last boundary inside the prompt"
    blocks.free(request)
    assert num_hits(blocks, [*answer, 0]) == 5
    assert blocks.snapshots is not None
    count = blocks.snapshots.count
    twin = run_through(blocks, list(range(8)))
    decode(blocks, twin, list(range(100, 113)))
    blocks.free(twin)
    assert blocks.snapshots.count == count, "a snapshot that exists already is dropped"
    assert num_hits(blocks, [*answer, 0]) == 5


def test_tails_are_evicted_before_heads() -> None:
    blocks = manager(4)
    blocks.free(run_through(blocks, list(range(16))))
    assert blocks.pool.num_cached == 4
    allocate(blocks, 8)  # takes two of the four cached blocks
    assert num_hits(blocks, [*range(16), 0]) == 2, "the two at the head are still there"


def test_least_recently_used_prefix_goes_first() -> None:
    blocks = manager(4)
    first, second = list(range(8)), list(range(100, 108))
    blocks.free(run_through(blocks, first))
    blocks.free(run_through(blocks, second))
    blocks.free(run_through(blocks, first))  # used again: now second is the older
    allocate(blocks, 8)
    assert num_hits(blocks, [*first, 0]) == 2
    assert num_hits(blocks, [*second, 0]) == 0


def test_blocks_in_use_are_never_evicted() -> None:
    blocks = manager(4)
    held = run_through(blocks, list(range(8)))
    other = make_request([5] * 9)
    blocks.attach(other, blocks.match(other))
    assert blocks.grow(other, 9) is None
    assert blocks.grow(other, 8) is not None
    assert set(other.tables[0]).isdisjoint(held.tables[0])


def test_salts_keep_prefixes_apart() -> None:
    blocks = manager()
    blocks.free(run_through(blocks, list(range(8)), cache_salt="tenant-a"))
    assert num_hits(blocks, [*range(8), 0], cache_salt="tenant-b") == 0
    assert num_hits(blocks, [*range(8), 0], cache_salt="tenant-a") == 2


def test_prompt_logprobs_need_the_prompt_computed() -> None:
    blocks = manager()
    blocks.free(run_through(blocks, list(range(8))))
    params = SamplingParams(prompt_logprobs=0, max_tokens=4)
    assert num_hits(blocks, [*range(8), 0], params=params) == 0


def test_no_prefix_cache_finds_nothing_and_keeps_nothing() -> None:
    blocks = BlockManager(4, KVLayout(BLOCK_SIZE), PrefixCache())
    blocks.free(run_through(blocks, list(range(8))))
    assert num_hits(blocks, [*range(8), 0]) == 0
    assert blocks.pool.num_cached == 0
    assert blocks.pool.num_empty == 4


def test_block_and_context_limits() -> None:
    plain, windowed = KVLayout(16), KVLayout(16, (None, 64, 64))
    assert blocks_for_memory(1000, 100, 16) == 10
    assert most_blocks(plain, 4, 33, 1024) == 12
    assert blocks_for_memory(1 << 40, 100, 16, most=12) == 12, "no more than can be used"
    with pytest.raises(KVBudgetError, match="99 bytes"):
        blocks_for_memory(99, 100, 16)
    assert fit_context(10, plain, 1024, None, 1000, None) == 160
    assert fit_context(10, plain, 1024, 50, 1000, None) == 50
    assert fit_context(30, windowed, 1024, None, 1000, None) == 160
    assert fit_context(30, windowed, 16, None, 1000, None) == 16 * (30 - 2 * 6), "windows keep 79 tokens"
    with pytest.raises(KVBudgetError, match="max_model_len is 161"):
        fit_context(10, plain, 1024, None, 1000, 161)
    with pytest.raises(KVBudgetError, match="at least 2"):
        fit_context(1, KVLayout(1), 1024, None, 1000, None)
