"""Latency attribution on a clock that only steps advance. test_machine.py checks that the parts add up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inflight.engine.core import EngineCore
from inflight.events import TimeBreakdown
from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import PrefixCache
from inflight.request import Request
from inflight.scheduling.policies.baselines import Sequential, Static
from inflight.scheduling.policy import Policy, TokenBudget
from inflight.scheduling.request_pool import Limits
from inflight.scheduling.scheduler import Scheduler
from tests.support.requests import make_request
from tests.support.timed import TimedRunner, timed


class TimedScene:
    """Requests in an engine with these limits; `breakdowns` has the ended ones."""

    def __init__(
        self,
        policy: Policy | None = None,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
    ) -> None:
        self.runner = TimedRunner(num_blocks, 16, ())
        limits = Limits(max_num_seqs, max_num_batched_tokens, 1 << 30)
        blocks = BlockManager(num_blocks, KVLayout(16), PrefixCache())
        if policy is None:  # not `or`: a policy with an empty queue is falsy
            policy = Policy(headroom=0)
        scheduler = Scheduler(limits, policy, blocks, TokenBudget(max_num_batched_tokens))
        self.core = EngineCore(scheduler, self.runner, clock=lambda: self.runner.now)
        self.breakdowns: dict[str, TimeBreakdown] = {}

    def add(self, name: str, num_prompt: int, max_tokens: int) -> Request:
        request = make_request([3] * num_prompt, max_tokens, name)
        self.core.add(request)
        return request

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for delta in self.core.step():
                if delta.record is not None:
                    self.breakdowns[delta.request_id] = delta.record.breakdown

    def run(self) -> dict[str, TimeBreakdown]:
        while self.core.has_work:
            self.step()
        return self.breakdowns


def waited(breakdown: TimeBreakdown) -> dict[str, float]:
    return {cause: seconds for cause, seconds in breakdown.queue.items() if seconds}


def test_lone_request_waits_for_nothing() -> None:
    scene = TimedScene()
    scene.add("a", 40, 5)
    breakdown = scene.run()["a"]
    assert waited(breakdown) == {}
    assert breakdown.prefill == pytest.approx(timed(40))
    assert breakdown.decode == pytest.approx(4 * timed(1))
    assert (breakdown.prefill_of_others, breakdown.preempted, breakdown.held) == (0, 0, 0)


def test_time_added_by_prompts_of_others_is_attributed_to_them() -> None:
    scene = TimedScene()
    scene.add("a", 10, 8)
    scene.step(3)
    scene.add("b", 200, 1)
    breakdowns = scene.run()
    assert breakdowns["a"].prefill_of_others == pytest.approx(timed(201) - timed(1))
    assert breakdowns["a"].decode == pytest.approx(7 * timed(1))
    assert breakdowns["b"].prefill == pytest.approx(timed(201))


def test_first_step_with_a_prompt_is_divided_by_tokens() -> None:
    """Nothing is known yet of steps without prompts."""
    scene = TimedScene(max_num_batched_tokens=100)
    scene.add("a", 10, 2)
    scene.add("b", 180, 1)
    scene.step(2)
    assert scene.breakdowns["a"].prefill_of_others == pytest.approx(timed(91) * 90 / 91)


def test_waiting_for_a_row_is_attributed_to_slots() -> None:
    scene = TimedScene(max_num_seqs=1)
    scene.add("a", 10, 3)
    scene.add("b", 10, 1)
    assert waited(scene.run()["b"]) == {"slots": pytest.approx(timed(10) + 2 * timed(1))}


def test_waiting_for_tokens_of_a_step_is_attributed_to_budget() -> None:
    scene = TimedScene(max_num_batched_tokens=100)
    scene.add("a", 150, 1)
    scene.add("b", 10, 1)
    assert waited(scene.run()["b"]) == {"budget": pytest.approx(timed(100))}


def test_waiting_for_memory_or_a_policy_is_attributed_to_them() -> None:
    scene = TimedScene(num_blocks=4)
    scene.add("a", 30, 3)
    scene.add("b", 48, 1)
    assert waited(scene.run()["b"]) == {"memory": pytest.approx(timed(30) + 2 * timed(1))}
    scene = TimedScene(Sequential())
    scene.add("a", 30, 3)
    scene.add("b", 48, 1)
    assert waited(scene.run()["b"]) == {"policy": pytest.approx(timed(30) + 2 * timed(1))}


def test_arrival_during_a_step_waits_for_the_next_step() -> None:
    scene = TimedScene()
    scene.add("a", 10, 3)
    scene.step()
    start = scene.runner.now
    b = scene.add("b", 10, 1)
    scene.runner.now += 0.5  # the loop was busy elsewhere
    scene.step()
    assert b.record.arrived_at == start
    assert waited(scene.breakdowns["b"]) == {"step": pytest.approx(0.5)}


def test_recomputing_after_a_preemption_counts_as_prefill() -> None:
    class Turns(Policy):
        """Preempts the younger request as soon as another waits."""

        def yields(self, running: Sequence[Request]) -> Sequence[Request]:
            return running[1:]

    scene = TimedScene(Turns(headroom=0), max_num_seqs=2)
    scene.add("a", 10, 9)
    scene.add("b", 20, 9)
    scene.step(3)
    scene.add("c", 10, 1)
    scene.step()
    b = scene.core.scheduler.pool.requests["b"].record
    assert b.num_preemptions == 1
    breakdowns = scene.run()
    assert breakdowns["b"].preempted > 0
    assert breakdowns["b"].prefill > timed(30), "its prompt was computed twice"


def test_time_in_a_static_batch_after_the_last_token_counts_as_held() -> None:
    scene = TimedScene(Static())
    scene.add("a", 10, 2)
    scene.add("b", 10, 6)
    breakdowns = scene.run()
    assert breakdowns["a"].held == pytest.approx(4 * timed(1))
    assert breakdowns["b"].held == 0


def test_breakdown_of_an_unfinished_request_adds_up() -> None:
    scene = TimedScene(max_num_seqs=1)
    scene.add("a", 10, 9)
    b = scene.add("b", 10, 1)
    scene.step(2)
    pool = scene.core.scheduler.pool
    for _ in range(2):  # looking changes nothing
        breakdown = pool.attribution.breakdown(b, scene.runner.now)
        assert breakdown.total == pytest.approx(timed(10) + timed(1))
