"""The guarantees of the scheduler, one per test."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import pytest

from inflight.errors import EngineError
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Batch, Sampled
from inflight.scheduling.policies.continuous import Continuous
from tests.scheduling.hostile import SmallBites
from tests.scheduling.policies import NAMES
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request

EAGER = partial(Continuous, headroom=0)  # admits until memory is full, and so preempts


def ragged(engine: FakeEngine, count: int, seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    expected = {}
    for _ in range(count):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
        request = engine.add(make_request(prompt, rng.randint(1, 14), tenant=rng.choice("abc")))
        expected[request.request_id] = expected_tokens(prompt, request.max_tokens)
    return expected


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("num_blocks", [7, 64])
def test_tokens_do_not_depend_on_how_they_are_scheduled(
    policy: str, depth: int, chunk: int, num_blocks: int
) -> None:
    engine = FakeEngine(policy, num_blocks=num_blocks, pipeline_depth=depth, max_num_batched_tokens=chunk)
    expected = ragged(engine, 15)
    engine.run()
    assert engine.outputs == expected


def test_requests_join_and_leave_at_every_step() -> None:
    engine = FakeEngine(max_num_seqs=2)
    short, long, late = (engine.add(make_request([i], n)) for i, n in enumerate((2, 9, 3)))
    engine.run()
    joined = next(record.step for record in engine.records if late.request_id in record.admitted_ids)
    left = next(record.step for record in engine.records if short.request_id in record.finished_ids)
    assert joined == left + 1, "the third joins in the step after the first left"
    assert engine.finished[long.request_id].record is not None


def test_decodes_are_not_stalled_by_a_long_prompt() -> None:
    engine = FakeEngine(max_num_batched_tokens=6, num_blocks=64)
    decoding = engine.add(make_request([1], 30))
    engine.step()
    long = engine.add(make_request([2] * 50, 2))
    engine.run()
    during = [
        record for record in engine.records if any(s.request_id == long.request_id for s in record.slots)
    ]
    prompt_steps = [record for record in during if not any(s.decodes for s in record.slots if s.row == 1)]
    assert len(prompt_steps) >= 10, "50 tokens at 5 a step"
    for record in prompt_steps:
        tokens = {slot.request_id: slot.num_tokens for slot in record.slots}
        assert tokens[decoding.request_id] == 1, "the decode has its token in every step"
        assert tokens[long.request_id] >= 1, "and the prompt makes progress"


def test_long_prompt_progresses_beside_as_many_decodes_as_the_budget_has_tokens() -> None:
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=4, num_blocks=64)
    for index in range(3):
        engine.add(make_request([index], 40))
    engine.step()
    long = engine.add(make_request([9] * 12, 1))
    for _ in range(13):
        engine.step()
    assert long.request_id in engine.finished, "one token of each step is enough"


def test_max_kv_tokens_queues_and_preempts() -> None:
    engine = FakeEngine(EAGER, block_size=16, max_kv_tokens=24, num_blocks=64)
    expected = {}
    for index in range(6):
        request = engine.add(make_request([index] * 5, 12))
        expected[request.request_id] = expected_tokens([index] * 5, 12)
    while engine.core.has_work:
        engine.step()
        assert engine.scheduler.pool.counts.num_resident <= 24
    assert engine.outputs == expected
    assert engine.core.stats().num_preemptions > 0


def test_oldest_finishes_first_under_memory_pressure() -> None:
    engine = FakeEngine(EAGER, num_blocks=6, block_size=4, caching=False)
    requests = [engine.add(make_request([index] * 4, 16)) for index in range(4)]
    engine.run()
    assert requests[0].record.num_preemptions == 0
    assert sum(request.record.num_preemptions for request in requests) > 0
    assert next(iter(engine.finished)) == requests[0].request_id


def test_resumed_request_finds_its_own_blocks() -> None:
    engine = FakeEngine(EAGER, num_blocks=8, block_size=4)
    for index in range(3):
        engine.add(make_request([index] * 8, 12))
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    assert engine.core.stats().num_prefix_hits > 0


def test_headroom_saves_preemptions() -> None:
    preemptions = {}
    for headroom in (0, 8):
        engine = FakeEngine(partial(Continuous, headroom=headroom), num_blocks=16, caching=False)
        for index in range(12):
            engine.add(make_request([index] * 8, 12))
        engine.run()
        preemptions[headroom] = engine.core.stats().num_preemptions
    assert preemptions[8] < preemptions[0] / 2


def test_requests_of_one_step_share_a_prefix() -> None:
    engine = FakeEngine(num_blocks=64)
    prompt = list(range(12))
    requests = [engine.add(make_request([*prompt, index], 2)) for index in range(4)]
    engine.step()
    assert [request.num_cached for request in requests] == [0, 12, 12, 12], "computed once, in that very step"
    assert engine.runner.num_computed == 13 + 3
    engine.run()
    for index, request in enumerate(requests):
        assert engine.outputs[request.request_id] == expected_tokens([*prompt, index], 2)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [7, 12])
def test_no_request_is_admitted_twice(depth: int, num_blocks: int) -> None:
    """A preempted request waits again while the queue still holds what is left of its first entry."""
    engine = FakeEngine(SmallBites, num_blocks=num_blocks, pipeline_depth=depth)
    expected = ragged(engine, 30)
    while engine.core.has_work:
        engine.step()
        assert len({*engine.scheduler.pool.running}) == len(engine.scheduler.pool.running)
        engine.scheduler.pool.check()
    assert engine.outputs == expected


def test_abort_frees_blocks_at_once() -> None:
    engine = FakeEngine()
    request = engine.add(make_request([1] * 10, 10))
    engine.step()
    num_freed, deltas = engine.core.abort(request.request_id)
    assert num_freed == 3
    assert deltas[0].finish_reason == "abort"
    assert engine.scheduler.pool.usage().num_used == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_surplus_token_of_a_late_stop_is_dropped(depth: int) -> None:
    answer = expected_tokens([1, 2, 3], 10)
    stop = answer[4]
    assert stop not in answer[:4]
    engine = FakeEngine(pipeline_depth=depth)
    request = engine.add(make_request([1, 2, 3], 10, stop_ids=frozenset({stop})))
    engine.run()
    assert engine.outputs[request.request_id] == answer[:5]
    assert engine.finished[request.request_id].stop_token_id == stop


def test_duplicate_ids_are_rejected() -> None:
    engine = FakeEngine()
    engine.add(make_request([1], request_id="same"))
    with pytest.raises(EngineError, match="already in use"):
        engine.core.add(make_request([1], request_id="same"))


def test_prompts_that_are_scored_are_computed_in_small_pieces() -> None:
    """The logits of all their tokens are computed too, and others wait for that."""
    engine = FakeEngine(max_num_batched_tokens=2048, num_blocks=1024)
    params = SamplingParams(prompt_logprobs=0, max_tokens=2, temperature=0)
    engine.add(make_request([1] * 700, 2, "scored", params=params))
    engine.add(make_request([2] * 700, 2, "plain"))
    engine.run()
    sizes = {"scored": [], "plain": []}  # type: dict[str, list[int]]
    for record in engine.records:
        for slot in record.slots:
            if slot.num_tokens > 1:
                sizes[slot.request_id].append(slot.num_tokens)
    assert sizes == {"scored": [256, 256, 188], "plain": [700]}


def test_static_batches_hold_requests_longer_than_the_memory_behind_windows() -> None:
    """Static batching allocates a request's memory on admission, but windowed layers never hold all of it at once."""
    engine = FakeEngine("static", num_blocks=4, block_size=4, max_num_batched_tokens=4, windows=(6,))
    request = engine.add(make_request(list(range(10)), 20))
    engine.run()
    assert len(engine.outputs[request.request_id]) == 20


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6, 6), (6, 9)])
@pytest.mark.parametrize("max_kv_tokens", [1 << 30, 21])
def test_policies_admit_every_request_that_fits_alone(
    windows: tuple[int | None, ...], max_kv_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the scheduler would have to overrule them, with a warning."""
    for policy, num_blocks, chunk in product(NAMES, range(4, 20), (1, 5, 64)):
        engine = FakeEngine(
            policy,
            num_blocks=num_blocks,
            max_num_seqs=1,
            max_num_batched_tokens=chunk,
            max_kv_tokens=max_kv_tokens,
            windows=windows,
        )
        longest = min(engine.scheduler.blocks.max_tokens(chunk), max_kv_tokens, 60)
        for num_prompt in {1, longest // 2, longest} - {0}:
            max_tokens = longest - num_prompt + 1
            request = engine.add(make_request([number % 50 for number in range(num_prompt)], max_tokens))
            engine.run()
            assert len(engine.outputs[request.request_id]) == max_tokens
    assert not caplog.records


def test_batch_counts_its_decodes_and_the_tokens_of_prompts() -> None:
    engine = FakeEngine(num_blocks=64, block_size=4, max_num_batched_tokens=6)
    batches: list[Batch] = []
    launch = engine.runner.launch

    def recording(batch: Batch) -> Sampled:
        batches.append(batch)
        return launch(batch)

    engine.runner.launch = recording  # type: ignore[method-assign]
    engine.add(make_request([1] * 5, 9))
    engine.step()
    engine.add(make_request([2] * 6, 1))  # one more token than the next step has for it
    engine.step()
    engine.step()
    engine.add(make_request([1] * 5, 1))  # all but one of its tokens are cached
    engine.step()
    counted = [(len(batch), batch.num_decodes, batch.num_prompt_tokens) for batch in batches]
    # The last token of a prompt is like a decode, unless its request is admitted with it.
    assert counted == [(1, 0, 5), (2, 1, 5), (2, 2, 0), (2, 1, 1)]
