"""A step that raises affects only the request that made it raise."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from inflight.request import Request
from inflight.scheduling.policies.fair import Fair
from inflight.scheduling.policy import Policy
from inflight.scheduling.quarantine import MAX_FAILURES, Quarantine
from tests.scheduling.policies import NAMES
from tests.scheduling.trouble import POISON, Trouble
from tests.support.seen import SeenBatch


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "collect"])
@pytest.mark.parametrize("chunk", [3, 64])
def test_failed_step_does_not_change_the_output_of_neighbours(
    policy: str, depth: int, method: str, chunk: int
) -> None:
    trouble = Trouble(method=method, policy=policy, pipeline_depth=depth, max_num_batched_tokens=chunk)
    trouble.add([1] * 5, 9)
    trouble.add([2], 1)
    trouble.add([POISON, 1, 2], 4, "bad")
    trouble.add([3] * 11, 6, tenant="b", priority=-1)
    trouble.add([4, 4], 12)
    trouble.check(failed={"bad"})
    trouble.add([5, 4], 12)
    trouble.check(failed={"bad"})
    assert trouble.engine.scheduler.policy is trouble.policy, "the engine's own policy rules again"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "collect"])
def test_suspects_run_alone_and_oldest_first(depth: int, method: str) -> None:
    trouble = Trouble(method=method, pipeline_depth=depth, num_blocks=200)
    for number, name in enumerate("abc"):
        trouble.add([number] * 5, 4, name)
    trouble.engine.step()
    trouble.add([POISON], 4, "bad")
    trouble.add([7], 4, "later")
    trouble.check(failed={"bad"})
    together = ["a", "b", "c", "bad", "later"]
    steps = [
        step for step, _ in itertools.groupby(trouble.steps)
    ]  # with two in flight, the same is tried twice
    assert steps[:8] == [["a", "b", "c"], together, *([name] for name in together), ["a", "b", "c", "later"]]


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_outside_the_failed_step_are_not_suspects(depth: int) -> None:
    trouble = Trouble(pipeline_depth=depth, max_num_seqs=2)
    trouble.add([1] * 4, 6, "a")
    trouble.add([POISON], 4, "bad")
    trouble.add([2] * 4, 6, "b")
    trouble.engine.step()  # fails
    trouble.add([3] * 4, 6, "c")
    trouble.check(failed={"bad"})
    trial = trouble.steps.index(["bad"])
    assert all(step in (["a", "bad"], ["a"], ["bad"]) for step in trouble.steps[: trial + 1])
    assert trouble.steps[trial + 1] == ["a", "b"], "first come, first served, as before"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "collect"])
def test_long_prompt_stays_suspect_until_its_first_token(depth: int, method: str) -> None:
    """The fault hides in its last chunk: the first ones do not clear it."""

    def fault(batch: SeenBatch) -> bool:
        return any(
            request.request_id == "bad" and end == 40
            for request, end in zip(batch.requests, batch.ends, strict=True)
        )

    trouble = Trouble(fault, method, pipeline_depth=depth, max_num_batched_tokens=8)
    trouble.add([1] * 3, 30, "good")
    trouble.add([2] * 40, 4, "bad")
    trouble.check(failed={"bad"})
    trial = [step for step in trouble.steps if step == ["bad"]]
    assert len(trial) >= 5, "40 tokens, 8 a step"


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("depth", [1, 2])
def test_fault_after_some_tokens_ends_only_its_request(policy: str, depth: int) -> None:
    def fault(batch: SeenBatch) -> bool:
        return bad.num_output_tokens == 5 and any(one.request_id == "bad" for one in batch.requests)

    trouble = Trouble(fault, policy=policy, pipeline_depth=depth)
    trouble.add([1] * 5, 30)
    bad = trouble.add([2] * 5, 30, "bad")
    trouble.add([3] * 5, 30)
    trouble.check(failed={"bad"})
    assert len(trouble.engine.outputs["bad"]) == 5


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "collect"])
def test_request_survives_any_number_of_faulty_neighbours(depth: int, method: str) -> None:
    """A failure whose cause is known does not count against other requests."""
    trouble = Trouble(method=method, pipeline_depth=depth)
    trouble.add([1] * 5, 80, "good")
    bad = {f"bad{number}" for number in range(2 * MAX_FAILURES)}
    for name in sorted(bad):
        for _ in range(4):
            trouble.engine.step()
        trouble.add([POISON, 2], 4, name)
    trouble.check(failed=bad)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["launch", "collect"])
def test_fault_of_a_combination_ends_after_max_failures(depth: int, method: str) -> None:
    def fault(batch: SeenBatch) -> bool:
        return {"a", "b"} <= {request.request_id for request in batch.requests}

    trouble = Trouble(fault, method, pipeline_depth=depth)
    trouble.add([1] * 5, 50, "a")
    trouble.add([2] * 5, 50, "b")
    trouble.add([3] * 5, 2, "short")
    trouble.check(failed={"a", "b"})
    together = [step for step, _ in itertools.groupby(trouble.steps) if {"a", "b"} <= set(step)]
    assert len(together) == MAX_FAILURES
    trouble.add([4] * 5, 10)
    trouble.add([5] * 5, 10)
    trouble.check(failed={"a", "b"})


def test_transient_fault_ends_no_request() -> None:
    calls = iter([False, False, True])
    trouble = Trouble(lambda _: next(calls, False))
    for number in range(4):
        trouble.add([number] * 6, 8)
    trouble.check(failed=set())


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["a", "b", "bad", "waiting"])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_suspect_can_be_aborted(policy: str, depth: int, name: str, num_steps: int) -> None:
    trouble = Trouble(policy=policy, pipeline_depth=depth, max_num_seqs=3)
    trouble.add([1] * 5, 12, "a")
    trouble.add([2] * 5, 12, "b")
    trouble.add([POISON] * 5, 12, "bad")
    trouble.add([3] * 5, 12, "waiting")
    while not trouble.num_failures:
        trouble.engine.step()
    for _ in range(num_steps):
        trouble.engine.step()
    ended = name in trouble.engine.finished
    trouble.engine.take(trouble.engine.core.abort(name)[1])
    trouble.expected[name] = trouble.engine.outputs[name]
    trouble.check(failed={"bad"} if name != "bad" or ended else set())
    if not ended:
        assert trouble.engine.finished[name].finish_reason == "abort"


def test_finished_request_leaves_a_static_batch_that_failed() -> None:
    trouble = Trouble(lambda batch: batch.step == 4, policy="static")
    short = trouble.add([1], 2)
    trouble.add([2], 9)
    trouble.add([3], 9)
    while not trouble.num_failures:
        assert short.request_id not in trouble.engine.finished
        trouble.engine.step()
    assert trouble.engine.finished[short.request_id].finish_reason == "length"
    trouble.check(failed=set())


def test_policy_cannot_keep_a_suspect_waiting() -> None:
    class Choosy(Policy):
        """Admits only the newest request to an idle engine, and needs memory for a thousand tokens to admit others."""

        def admits(self, request: Request, running: Sequence[Request]) -> bool:
            return bool(running) or request.arrival == max(other.arrival for other in self.queue.head(9))

        def candidates(self) -> Any:
            return iter(sorted(self.queue.head(9), key=lambda request: -request.arrival))

        def memory_to_admit(self, request: Request, running: Sequence[Request]) -> int:
            return request.num_tokens if running or request.arrival else 1000

        def tokens(self, request: Request, num_remaining: int, budget: int) -> int:
            return min(num_remaining, budget) if request.arrival or request.num_output_tokens else 1

    trouble = Trouble(policy=Choosy)
    trouble.add([1] * 5, 6, "a")
    trouble.add([POISON] * 5, 6, "bad")
    trouble.add([2] * 5, 6, "b")
    trouble.engine.step()
    assert trouble.engine.scheduler.policy is not trouble.policy
    while "bad" not in trouble.engine.finished:
        trouble.engine.step()
    assert {"a"} == {name for step in trouble.steps[1 : trouble.steps.index(["bad"])] for name in step}


def test_policy_keeps_its_accounts_during_quarantine() -> None:
    """A tenant pays once for a prompt, however often it is computed, and for each token that a step was to give."""
    trouble = Trouble(policy=partial(Fair, prompt_cost=1.0, output_cost=100.0))
    trouble.add([1] * 5, 6, tenant="x")
    trouble.add([POISON] * 3, 6, "bad", tenant="x")
    trouble.check(failed={"bad"})
    fair = trouble.engine.policy_given
    assert isinstance(fair, Fair)
    assert fair.counters == {"x": 5 + 3 + 100 * (6 + 3)}, "two tokens failed together, one alone"


def test_quarantine_overrides_or_inherits_every_method_deliberately() -> None:
    """A question that is new in Policy must be passed on here, or be listed as the base's to answer."""
    questions = {name for name, value in vars(Policy).items() if callable(value) and name != "__init__"}
    base = {
        "admits",
        "tokens_ahead",
        "candidates_ahead",
        "prompts",
        "tokens",
        "memory_to_admit",
        "allocates_at_once",
        "victim",
    }
    assert questions - vars(Quarantine).keys() == base
    weights: dict[str, float] = {"x": 2.0}
    fair = Fair()
    Quarantine(fair, lambda: None).set_weights(weights)
    assert fair.weights == weights
