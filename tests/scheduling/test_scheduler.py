"""The guarantees of the scheduler, one per test."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from functools import partial

import pytest

from inflight.engine.fake import expected_tokens
from inflight.errors import ConfigError, EngineError
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling import Policy, make_policy
from inflight.scheduling.policies.continuous import Continuous
from inflight.scheduling.policies.fair import Fair
from inflight.scheduling.policies.priority import Priority
from tests.scheduling.hostile import SmallBites
from tests.support.requests import FakeEngine, make_request

EAGER = partial(Continuous, headroom=0)  # admits until memory is full, and so preempts
ALL = ("sequential", "static", "continuous", "priority", "fair")


def first_steps(engine: FakeEngine) -> dict[str, int]:
    """The step in which each request was first admitted."""
    steps: dict[str, int] = {}
    for record in engine.records:
        for name in record.admitted_ids:
            steps.setdefault(name, record.step)
    return steps


def ragged(engine: FakeEngine, count: int, seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    expected = {}
    for _ in range(count):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
        request = engine.add(make_request(prompt, rng.randint(1, 14), tenant=rng.choice("abc")))
        expected[request.request_id] = expected_tokens(prompt, request.max_tokens)
    return expected


@pytest.mark.parametrize("policy", ALL)
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
    steps = first_steps(engine)
    left = next(record.step for record in engine.records if short.request_id in record.finished_ids)
    assert steps[late.request_id] == left + 1, "the third joins in the step after the first left"
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


def test_first_come_first_served_without_ageing() -> None:
    engine = FakeEngine(lambda: Continuous(ageing=0, headroom=0), num_blocks=8, max_num_seqs=3)
    requests = [engine.add(make_request([index] * (1 + index * 7 % 20), 5)) for index in range(12)]
    engine.run()
    steps = first_steps(engine)
    order = [steps[request.request_id] for request in requests]
    assert order == sorted(order)


def overtakes(policy: Callable[[], Policy]) -> int:
    """How many small requests are admitted before a large one that came first but does not fit yet."""
    engine = FakeEngine(policy, num_blocks=8, block_size=4, max_num_seqs=4, caching=False)
    engine.add(make_request([0] * 8, 12))
    engine.step()
    large = engine.add(make_request([1] * 28, 4))
    for index in range(40):
        engine.add(make_request([index] * 2, 2))
    engine.run()
    steps = first_steps(engine)
    return sum(step < steps[large.request_id] for step in steps.values()) - 1


def test_ageing_bounds_how_often_a_request_is_passed() -> None:
    assert overtakes(lambda: Continuous(ageing=0, headroom=0)) == 0
    assert overtakes(lambda: Continuous(ageing=4, headroom=0)) == 4


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


def test_candidates_may_be_any_iterator() -> None:
    """Written with the queue looked at after each yield, as a list's iterator, or with the answer that comes back."""

    class Looking(Policy):
        def candidates(self) -> Iterator[Request]:  # type: ignore[override]
            while (request := self.queue.first()) is not None:
                yield request
                if request in self.queue:
                    return

    class Listed(Policy):
        def candidates(self) -> Iterator[Request]:  # type: ignore[override]
            return iter(self.queue.head(5))

    class Answered(Policy):
        def __init__(self) -> None:
            super().__init__()
            self.admissions: list[tuple[int, bool]] = []

        def candidates(self) -> Generator[Request, bool, None]:
            for request in self.queue.head(5):
                admitted = yield request
                self.admissions.append((request.arrival, admitted))

    for policy in (Policy, Looking, Listed, Answered):
        engine = FakeEngine(policy, num_blocks=8, max_num_seqs=4)
        for length in (8, 12, 20, 9):
            engine.add(make_request([1] * length, 3))
        engine.step()
        if policy is Answered:
            admissions = engine.policy_given.admissions  # type: ignore[attr-defined]
            assert admissions == [(0, True), (1, False), (2, False), (3, False)]
        engine.run()
        assert len(engine.finished) == 4


def test_static_batches_form_and_retire_together() -> None:
    engine = FakeEngine("static", max_num_seqs=3, num_blocks=64)
    requests = [engine.add(make_request([index], 2 + 3 * index)) for index in range(5)]
    engine.run()
    steps = first_steps(engine)
    finished = {name: record.step for record in engine.records for name in record.finished_ids}
    first, second = requests[:3], requests[3:]
    assert len({finished[request.request_id] for request in first}) == 1
    assert {steps[request.request_id] for request in second} == {finished[first[0].request_id] + 1}
    assert any(record.idle_rows for record in engine.records), "slots stand idle until the batch retires"


def test_static_batch_admits_no_late_arrivals() -> None:
    engine = FakeEngine("static", max_num_seqs=4, num_blocks=64)
    engine.add(make_request([1], 6))
    engine.step()
    late = engine.add(make_request([2], 1))
    engine.run()
    assert first_steps(engine)[late.request_id] == 6


def test_sequential_runs_one_at_a_time() -> None:
    engine = FakeEngine("sequential")
    for index in range(4):
        engine.add(make_request([index] * 3, 3))
    engine.run()
    assert all(len(record.slots) == 1 for record in engine.records)


def test_priority_goes_first_and_ageing_prevents_starvation() -> None:
    engine = FakeEngine(lambda: Priority(ageing=5), max_num_seqs=1)
    engine.add(make_request([0], 2))
    engine.step()
    low = engine.add(make_request([1], 1, priority=4))
    for index in range(60):  # a stream of urgent requests that never ends
        engine.add(make_request([index], 1, priority=0))
        engine.step()
        if low.request_id in engine.finished:
            break
    admitted = first_steps(engine)[low.request_id]
    assert 10 < admitted < 30, (
        "after the urgent ones that came within 4 levels x 5 steps, before the later ones"
    )


def share(engine: FakeEngine, steps: int) -> dict[str, int]:
    """Output tokens that each tenant got while all had work waiting."""
    for _ in range(steps):
        engine.step()
    tokens: dict[str, int] = {}
    for record in engine.records:
        for slot in record.slots:
            tenant = slot.request_id.split("-")[0]
            tokens[tenant] = tokens.get(tenant, 0) + slot.samples
    return tokens


def add_tenants(engine: FakeEngine, counts: dict[str, int], max_tokens: int = 4) -> None:
    for tenant, count in counts.items():
        for index in range(count):
            engine.add(make_request([index], max_tokens, request_id=f"{tenant}-{index}", tenant=tenant))


def test_fair_shares_between_tenants_however_much_they_send() -> None:
    engine = FakeEngine("fair", max_num_seqs=2, num_blocks=256)
    add_tenants(engine, {"greedy": 300, "modest": 60})
    tokens = share(engine, 100)
    assert tokens["modest"] == pytest.approx(tokens["greedy"], rel=0.1)
    crowd = FakeEngine("continuous", max_num_seqs=2, num_blocks=256)
    add_tenants(crowd, {"greedy": 300, "modest": 60})
    assert "modest" not in share(crowd, 100), "first come first served lets the first tenant fill the engine"


def test_fair_divides_by_weight() -> None:
    engine = FakeEngine(lambda: Fair(weights={"gold": 3.0}), max_num_seqs=2, num_blocks=256)
    add_tenants(engine, {"gold": 100, "plain": 100})
    tokens = share(engine, 120)
    assert tokens["gold"] == pytest.approx(3 * tokens["plain"], rel=0.15)


def test_fair_lifts_a_newly_active_tenant() -> None:
    engine = FakeEngine("fair", max_num_seqs=1, num_blocks=256)
    add_tenants(engine, {"early": 40})
    for _ in range(40):
        engine.step()
    engine.records.clear()
    add_tenants(engine, {"late": 40})
    tokens = share(engine, 40)
    assert tokens["early"] == pytest.approx(tokens["late"], abs=8), "idle time is not saved up"


def test_fair_forgets_tenants_that_left() -> None:
    policy = Fair()
    for index in range(25_000):
        request = make_request([1], tenant=str(index))
        request.arrival = index
        policy.push(request, 0)
        policy.remove(request)
        policy.on_admit(request)
    assert len(policy.counters) < 15_000


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


def test_unknown_policies_are_rejected() -> None:
    with pytest.raises(ConfigError, match="choose one of sequential, static"):
        make_policy("lifo")
    with pytest.raises(ConfigError, match="must return an inflight Policy"):
        make_policy(dict)
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_policy("inflight.scheduling.policy:Nothing")
    assert isinstance(make_policy("inflight.scheduling.policies.fair:Fair"), Fair)


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
