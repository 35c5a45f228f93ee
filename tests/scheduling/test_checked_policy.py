"""Invalid results of policies are logged once and replaced by those of the base policy."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from inflight.request import Request
from inflight.scheduling.policy import CheckedPolicy, Policy
from tests.scheduling.hostile import HOSTILE, Refusing
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request

RUNNING = [make_request([1] * 4, request_id=f"running{index}") for index in range(3)]
WAITING = [make_request([2] * 4, request_id=f"waiting{index}") for index in range(3)]
for number, one in enumerate((*RUNNING, *WAITING)):
    one.arrival = number


def checked(question: str, answer: Any) -> CheckedPolicy:
    """A policy that gives this as one of its answers; an exception is raised."""

    def respond(*_: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    policy = CheckedPolicy(type("Odd", (Policy,), {question: respond})())
    for request in WAITING:
        policy.push(request, 0)
    return policy


NONSENSE: dict[str, tuple[Any, ...]] = {
    "tokens_ahead": (-1, 6, 1 << 80, 2.0, "3", None, [], RuntimeError("no")),
    "prompts": (None, 7, [[]], [WAITING[0]], [*RUNNING, *RUNNING], np.zeros(2), RuntimeError("no")),
    "tokens": (-1, 9, 1 << 80, 2.0, "3", None, [], RuntimeError("no")),
    "memory_to_admit": (-1, None, 4.5, "x", RuntimeError("no")),
    "admits": (None, "yes", 1, RuntimeError("no")),
    "allocates_at_once": (None, 0, RuntimeError("no")),
    "leaves": (None, "no", RuntimeError("no")),
    "victim": (None, 1, WAITING[0], RUNNING[0], RuntimeError("no")),
    "yields": (None, 7, [[]], [RUNNING[0]], [WAITING[0]], np.zeros(2), RuntimeError("no")),
}


def ask(policy: Policy, question: str) -> Any:
    args: dict[str, tuple[Any, ...]] = {
        "tokens_ahead": (RUNNING, 5),
        "prompts": (RUNNING,),
        "tokens": (RUNNING[0], 8, 5),
        "victim": (RUNNING[1:],),
        "yields": (RUNNING,),
        "allocates_at_once": (),
    }
    return getattr(policy, question)(*args.get(question, (WAITING[0], RUNNING)))


CASES = [(question, answer) for question, answers in NONSENSE.items() for answer in answers]


@pytest.mark.parametrize(("question", "answer"), CASES)
def test_invalid_results_are_replaced_and_logged_once(
    question: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = checked(question, answer)
    base = Policy()
    expected = RUNNING[2] if question == "victim" else ask(base, question)
    for _ in range(3):
        assert (
            list(ask(policy, question)) == [] if question == "yields" else ask(policy, question) == expected
        )
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"policy Odd, {question}" in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("tokens_ahead", 0),
        ("tokens_ahead", 5),
        ("prompts", [RUNNING[2], RUNNING[0]]),
        ("prompts", []),
        ("tokens", 0),
        ("tokens", 5),
        ("tokens", np.int64(3)),
        ("memory_to_admit", 0),
        ("memory_to_admit", 1 << 50),
        ("admits", False),
        ("allocates_at_once", True),
        ("leaves", False),
        ("victim", RUNNING[1]),
        ("yields", [RUNNING[2], RUNNING[1]]),
    ],
)
def test_valid_results_are_used(question: str, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    result = ask(checked(question, answer), question)
    assert sorted(result, key=id) == sorted(answer, key=id) if question == "yields" else result == answer
    assert not caplog.records


def test_finished_request_leaves_when_nothing_runs() -> None:
    assert checked("leaves", False).leaves(RUNNING[0], []) is True


def offered(candidates: Callable[[], Any], refused: Sequence[Request] = ()) -> list[Request]:
    policy = checked("candidates", None)
    policy.policy.candidates = lambda: candidates()  # type: ignore[method-assign]
    result = []
    for request in policy.candidates():
        result.append(request)
        if request not in refused:
            policy.remove(request)
    return result


def test_invalid_candidates_are_replaced() -> None:
    first, second, third = WAITING

    def breaks_down() -> Iterator[Request]:
        yield third
        raise RuntimeError("no")

    assert offered(lambda: [third, first]) == [third, first], "any iterable will do"
    assert offered(lambda: iter(())) == [], "naming no request is valid"
    assert offered(lambda: 7) == WAITING
    assert offered(breaks_down) == [third, first, second]
    assert offered(lambda: [second, RUNNING[0], third]) == [second, first, third], "it is not waiting"
    assert offered(lambda: [second, second]) == [second, first, third], "it is not waiting any more"
    assert offered(lambda: [second, second], refused=[second]) == [second, first, third], "it had its turn"
    assert offered(lambda: [[]]) == WAITING


def test_invalid_requests_ahead_are_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = WAITING
    for answer in ([second, RUNNING[0], first], [second, [], first]):
        policy = checked("candidates_ahead", answer)
        result = []
        for request in policy.candidates_ahead(RUNNING):
            result.append(request)
            policy.remove(request)
        assert result == [second], "later ones wait until `candidates` is called"
    assert list(checked("candidates_ahead", RuntimeError("no")).candidates_ahead(RUNNING)) == []
    assert len(caplog.records) == 3
    assert list(checked("candidates_ahead", None).candidates_ahead(RUNNING)) == []


def test_request_that_the_policy_failed_to_queue_still_waits() -> None:
    class Picky(Policy):
        def push(self, request: Request, step: int) -> None:
            if request.arrival == 1:
                raise RuntimeError("not you")
            super().push(request, step)

    engine = FakeEngine(Picky, max_num_seqs=1)
    requests = [engine.add(make_request([index], 2)) for index in range(3)]
    engine.core.abort(engine.add(make_request([7], 2)).request_id)
    engine.run()
    for index, request in enumerate(requests):
        assert engine.outputs[request.request_id] == expected_tokens([index], 2)


def test_policy_that_runs_nothing_is_overruled(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(Refusing, max_num_batched_tokens=8)
    for index in range(3):
        engine.add(make_request([index] * 20, 3))
    engine.run()
    assert len(engine.finished) == 3
    assert "lets no request run" in caplog.text


def test_policy_that_only_preempts_is_overruled() -> None:
    class Dwindling(Policy):
        """Preempts the running requests one by one, and lets none of them go on."""

        def tokens(self, request: Request, num_remaining: int, budget: int) -> int:  # noqa: ARG002
            return 0 if request.num_computed else 2

        def yields(self, running: Sequence[Request]) -> Sequence[Request]:
            return running[1:][-1:]

    engine = FakeEngine(Dwindling, caching=False)
    requests = [engine.add(make_request([index] * 8, 4)) for index in range(3)]
    engine.step()
    assert engine.scheduler.pool.running == requests
    requests.append(engine.add(make_request([3] * 8, 4)))
    engine.run()
    for index, request in enumerate(requests):
        assert engine.outputs[request.request_id] == expected_tokens([index] * 8, 4)


def test_policy_that_changes_its_mind_within_a_step_gets_no_more_memory_than_there_is() -> None:
    class Fickle(Policy):
        def __init__(self) -> None:
            super().__init__(headroom=0)
            self._answers = itertools.cycle([False, True])

        def allocates_at_once(self) -> bool:
            return next(self._answers)

    # A window needs less memory as the prompt is computed than all of it at once.
    engine = FakeEngine(Fickle, num_blocks=24, block_size=1, windows=(None, 2), max_num_batched_tokens=3)
    prompts = [[1], [2] * 12]
    requests = [engine.add(make_request(prompt, 4)) for prompt in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert engine.outputs[request.request_id] == expected_tokens(prompt, 4, layout=engine.layout)


@pytest.mark.parametrize("policy", HOSTILE)
def test_all_requests_finish_under_any_policy(policy: Callable[[], Policy]) -> None:
    engine = FakeEngine(policy, num_blocks=8, max_num_batched_tokens=12)
    for index in range(8):
        engine.add(make_request([index] * (1 + 3 * index), 5, request_id=f"r{index}"))
    engine.run()
    for index in range(8):
        assert engine.outputs[f"r{index}"] == expected_tokens([index] * (1 + 3 * index), 5)
    assert all(sum(slot.num_tokens for slot in record.slots) <= 12 for record in engine.records)


def test_every_method_of_a_policy_is_checked() -> None:
    """One that is new in Policy must be guarded here, too."""
    questions = {name for name, value in vars(Policy).items() if callable(value)}
    assert questions <= vars(CheckedPolicy).keys()
