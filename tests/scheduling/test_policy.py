"""The waiting queue, compared with a sorted list, and what each named policy does differently."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from inflight.errors import ConfigError
from inflight.request import Request
from inflight.scheduling.policies.continuous import Continuous
from inflight.scheduling.policies.fair import Fair
from inflight.scheduling.policies.priority import Priority
from inflight.scheduling.policy import Policy, WaitingQueue, make_policy
from tests.support.requests import FakeEngine, make_request

ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(-2, 2)), max_size=30)


@given(ACTIONS)
def test_queue_yields_each_request_once_in_order(actions: list[tuple[bool, int, int]]) -> None:
    queue = WaitingQueue()
    requests = [make_request([1]) for _ in range(6)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
    waiting: set[Request] = set()
    for pushes, index, order in actions:
        request = requests[index]
        if pushes:
            request.order = order
            queue.push(request)
            waiting.add(request)
        else:
            queue.remove(request)
            waiting.discard(request)
        expected = sorted(waiting, key=lambda one: (one.order, one.arrival))
        assert queue.head(10) == expected
        assert queue.first() == (expected[0] if expected else None)
        assert len(queue) == len(expected)


def first_steps(engine: FakeEngine) -> dict[str, int]:
    """Return the step in which each request was first admitted."""
    steps: dict[str, int] = {}
    for record in engine.records:
        for name in record.admitted_ids:
            steps.setdefault(name, record.step)
    return steps


def test_candidates_may_be_any_iterable() -> None:
    """A list, its iterator, or a generator that learns from the queue what became of a candidate."""

    class Listed(Policy):
        def candidates(self) -> Iterable[Request]:
            return self.queue.head(5)

    class Iterated(Policy):
        def candidates(self) -> Iterable[Request]:
            return iter(self.queue.head(5))

    class Generated(Policy):
        def __init__(self) -> None:
            super().__init__()
            self.admissions: list[tuple[int, bool]] = []

        def candidates(self) -> Iterator[Request]:
            for request in self.queue.head(5):
                yield request
                self.admissions.append((request.arrival, request not in self.queue))

    for policy in (Policy, Listed, Iterated, Generated):
        engine = FakeEngine(policy, num_blocks=8, max_num_seqs=4)
        for length in (8, 12, 20, 9):
            engine.add(make_request([1] * length, 3))
        engine.step()
        if policy is Generated:
            admissions = engine.policy_given.admissions  # type: ignore[attr-defined]
            assert admissions == [(0, True), (1, False), (2, False), (3, False)]
        engine.run()
        assert len(engine.finished) == 4


def test_first_come_first_served_without_ageing() -> None:
    engine = FakeEngine(lambda: Continuous(ageing=0, headroom=0), num_blocks=8, max_num_seqs=3)
    requests = [engine.add(make_request([index] * (1 + index * 7 % 20), 5)) for index in range(12)]
    engine.run()
    steps = first_steps(engine)
    order = [steps[request.request_id] for request in requests]
    assert order == sorted(order)


def overtakes(policy: Callable[[], Policy]) -> int:
    """Return how many small requests are admitted before a large one that came first but does not fit yet."""
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
    """Return the output tokens that each tenant got while all had work waiting."""
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


def test_unknown_policies_are_rejected() -> None:
    with pytest.raises(ConfigError, match="choose one of sequential, static"):
        make_policy("lifo")
    with pytest.raises(ConfigError, match="must return an inflight Policy"):
        make_policy(dict)
    with pytest.raises(ConfigError, match="cannot be imported"):
        make_policy("inflight.scheduling.policy:Nothing")
    assert isinstance(make_policy("inflight.scheduling.policies.fair:Fair"), Fair)
