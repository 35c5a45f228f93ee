"""A state machine over the block manager: blocks always balance, and shared content is right."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.errors import KVBudgetError
from inflight.kv import BlockManager, ChainHashCache, NoPrefixCache
from inflight.kv.budget import blocks_for_memory, fit_context
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from tests.support.requests import make_request

BLOCK_SIZE = 4
NUM_BLOCKS = 12

# Few ids and few salts, so that prefixes meet often.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
SALTS = st.sampled_from(["", "a"])


class BlockMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, ChainHashCache(BLOCK_SIZE))
        self.live: list[Request] = []
        # What every block holds, as the model would have written it: (salt, the whole prefix up to its end).
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    def write(self, request: Request) -> None:
        for index, block_id in enumerate(request.block_ids):
            end = (index + 1) * BLOCK_SIZE
            if end <= request.num_computed:
                self.content[block_id] = (request.spec.cache_salt, tuple(request.token_ids[:end]))

    @rule(prompt=PROMPTS, salt=SALTS)
    def admit(self, prompt: list[int], salt: str) -> None:
        request = make_request(prompt, cache_salt=salt)
        hits = self.blocks.match(request)
        assert len(hits) * BLOCK_SIZE < len(prompt), "a cached prompt still computes its last token"
        for index, block_id in enumerate(hits):
            prefix = tuple(prompt[: (index + 1) * BLOCK_SIZE])
            assert self.content[block_id] == (salt, prefix), "a hit must hold this prefix, of this salt"
        fits = self.blocks.fits(hits, len(prompt))
        if not fits:
            return
        self.blocks.attach(request, hits)
        assert self.blocks.grow(request, len(prompt)) is not None, "what fits can be had"
        request.num_computed = len(prompt)
        self.write(request)
        self.blocks.publish(request, len(prompt))
        self.live.append(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def decode(self, data: st.DataObject, ids: list[int]) -> None:
        request = data.draw(st.sampled_from(self.live))
        before = list(request.block_ids)
        available = self.blocks.pool.num_available
        grown = self.blocks.grow(request, request.num_computed + len(ids))
        if grown is None:
            assert request.block_ids == before, "a refusal changes nothing"
            assert available == self.blocks.pool.num_available
            return
        request.token_ids += ids
        request.num_computed += len(ids)
        self.write(request)
        self.blocks.publish(request, request.num_computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        held = set(request.block_ids)
        alone = held.difference(*(other.block_ids for other in self.live))
        assert self.blocks.free(request) == len(alone)

    @rule()
    def drop_cache(self) -> None:
        self.blocks.drop_cache()
        assert self.blocks.pool.num_cached == 0

    @invariant()
    def balances(self) -> None:
        self.blocks.check(self.live)
        resident = sum(request.num_computed for request in self.live)
        usage = self.blocks.usage(resident)
        assert usage.num_empty + usage.num_cached + usage.num_used == NUM_BLOCKS
        assert 0 <= usage.num_tokens <= usage.num_used * BLOCK_SIZE

    @invariant()
    def unshared_unless_equal(self) -> None:
        holders: dict[int, list[tuple[Request, int]]] = {}
        for request in self.live:
            assert len(set(request.block_ids)) == len(request.block_ids)
            for index, block_id in enumerate(request.block_ids):
                holders.setdefault(block_id, []).append((request, index))
        for owners in holders.values():
            prefixes = {
                (owner.spec.cache_salt, tuple(owner.token_ids[: (index + 1) * BLOCK_SIZE]))
                for owner, index in owners
            }
            assert len(prefixes) == 1, "a block has two owners only when both have the same prefix"


BlockMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase


def manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(num_blocks, BLOCK_SIZE, ChainHashCache(BLOCK_SIZE))


def run_through(blocks: BlockManager, prompt: list[int], cache_salt: str = "") -> Request:
    """Admit, compute and free one request."""
    request = make_request(prompt, cache_salt=cache_salt)
    blocks.attach(request, blocks.match(request))
    blocks.grow(request, len(prompt))
    request.num_computed = len(prompt)
    blocks.publish(request, len(prompt))
    return request


def test_tails_are_evicted_before_heads() -> None:
    blocks = manager(4)
    blocks.free(run_through(blocks, list(range(16))))
    assert blocks.pool.num_cached == 4
    other = make_request([99] * 8)
    blocks.grow(other, 8)  # takes two of the four cached blocks
    assert len(blocks.match(make_request([*range(16), 0]))) == 2, "the two at the head are still there"


def test_least_recently_used_prefix_goes_first() -> None:
    blocks = manager(4)
    first, second = list(range(8)), list(range(100, 108))
    blocks.free(run_through(blocks, first))
    blocks.free(run_through(blocks, second))
    blocks.free(run_through(blocks, first))  # used again: now second is the older
    blocks.grow(make_request([7] * 8), 8)
    assert len(blocks.match(make_request([*first, 0]))) == 2
    assert blocks.match(make_request([*second, 0])) == []


def test_blocks_in_use_are_never_evicted() -> None:
    blocks = manager(4)
    held = run_through(blocks, list(range(8)))
    other = make_request([5] * 9)
    assert blocks.grow(other, 9) is None
    assert blocks.grow(other, 8) is not None
    assert set(other.block_ids).isdisjoint(held.block_ids)


def test_salts_keep_prefixes_apart() -> None:
    blocks = manager()
    blocks.free(run_through(blocks, list(range(8)), cache_salt="tenant-a"))
    assert blocks.match(make_request([*range(8), 0], cache_salt="tenant-b")) == []
    assert len(blocks.match(make_request([*range(8), 0], cache_salt="tenant-a"))) == 2


def test_prompt_logprobs_need_the_prompt_computed() -> None:
    blocks = manager()
    blocks.free(run_through(blocks, list(range(8))))
    params = SamplingParams(prompt_logprobs=0, max_tokens=4)
    assert blocks.match(make_request([*range(8), 0], params=params)) == []


def test_no_prefix_cache_finds_nothing_and_keeps_nothing() -> None:
    blocks = BlockManager(4, BLOCK_SIZE, NoPrefixCache())
    blocks.free(run_through(blocks, list(range(8))))
    assert blocks.match(make_request([*range(8), 0])) == []
    assert blocks.pool.num_cached == 0
    assert blocks.pool.num_empty == 4


def test_block_and_context_limits() -> None:
    assert blocks_for_memory(1000, 100, 16, 1, 1 << 20, exact=True) == 10
    assert blocks_for_memory(1 << 40, 100, 16, 4, 33, exact=False) == 12, "no more than can be used"
    with pytest.raises(KVBudgetError, match="99 bytes"):
        blocks_for_memory(99, 100, 16, 4, 64, exact=True)
    assert fit_context(10, 16, None, 1000, None) == 160
    assert fit_context(10, 16, 50, 1000, None) == 50
    with pytest.raises(KVBudgetError, match="max_model_len is 161"):
        fit_context(10, 16, None, 1000, 161)
    with pytest.raises(KVBudgetError, match="at least 2"):
        fit_context(1, 1, None, 1000, None)
