"""Trials have one budget each, and end when nobody wants them any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from inflight import StructuredOutputs
from inflight.constraints import AnswerRules, GrammarValidator, RuleSchema, trial, trial_worker
from inflight.constraints.attempts import BudgetSpentError
from inflight.constraints.trial import ATTEMPT_SECONDS, TRIAL_SECONDS, WALL_SECONDS, TrialBudget
from inflight.errors import GrammarWorkerError, ParameterError
from tests.constraints.test_validator import INTERSECTIONS
from tests.constraints.walking import vocabulary
from tests.support.processes import children


def test_attempts_share_one_budget_of_processor_time() -> None:
    budget = TrialBudget(clock=lambda: 0.0)
    allowed = []
    for used in (0.75, 0.75, 0.5):
        cpu_seconds, _ = budget.next_attempt()
        allowed.append(cpu_seconds)
        budget.spend(used)
    assert allowed == [ATTEMPT_SECONDS, ATTEMPT_SECONDS, TRIAL_SECONDS - 1.5]
    with pytest.raises(BudgetSpentError, match="more than 2 seconds"):
        budget.next_attempt()


def test_attempts_share_one_deadline() -> None:
    now = 100.0
    budget = TrialBudget(clock=lambda: now)
    assert budget.next_attempt() == (ATTEMPT_SECONDS, WALL_SECONDS)
    now += WALL_SECONDS - 1
    assert budget.next_attempt() == (ATTEMPT_SECONDS, 1.0)
    now += 1
    with pytest.raises(GrammarWorkerError, match="busy machine"):
        budget.next_attempt()


class StubProcess:
    """Takes 0.6 s of its budget for every grammar, and finds a mistake wherever one says WRONG."""

    num_attempts = 0
    is_usable = True

    def __init__(self, vocabulary: bytes) -> None: ...

    def wait_until_ready(self) -> None: ...

    def attempt(self, grammar: str, cpu_seconds: float, wall_seconds: float) -> tuple[str, float]:  # noqa: ARG002
        StubProcess.num_attempts += 1
        if cpu_seconds < 0.6:
            raise BudgetSpentError("as the system would end it")
        return "it is WRONG" if "WRONG" in grammar else "", 0.6

    def interrupt(self) -> None: ...

    def kill(self) -> None: ...


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarValidator]:
    monkeypatch.setattr(trial, "_TrialProcess", StubProcess)
    monkeypatch.setattr(StubProcess, "num_attempts", 0)
    with closing(GrammarValidator(vocabulary)) as validator:
        yield validator


def tools(num_tools: int, wrong: int, strict: bool) -> StructuredOutputs:
    """Return the constraint of so many tools, one of which has a wrong schema."""
    schemas = {
        f"rule{i}": RuleSchema(
            {"type": "string", "pattern": "WRONG" if i == wrong else f"a{i}"}, f"tools[{i}]", strict
        )
        for i in range(num_tools)
    }
    rules = AnswerRules((f"start: {' | '.join(schemas)}",), schemas=schemas)
    return StructuredOutputs(answer=rules.text())


@pytest.mark.parametrize("strict", [True, False])
def test_search_for_the_wrong_schema_ends_with_the_budget(stub: GrammarValidator, strict: bool) -> None:
    with pytest.raises(ParameterError) as caught:
        stub.validate(tools(41, 40, strict))
    assert StubProcess.num_attempts == 4  # all together, two alone, and one that finds nothing left
    assert "it is WRONG" in str(caught.value)
    assert "which of the 41 schemas is to blame could not be determined in time" in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_constraint")


def test_wrong_schema_is_named_where_the_budget_allows_it(stub: GrammarValidator) -> None:
    with pytest.raises(ParameterError, match=r"tools\[1\] cannot be used: it is WRONG") as caught:
        stub.validate(tools(41, 1, strict=True))
    assert caught.value.param == "tools[1]"


def test_many_slow_schemas_take_no_longer_than_the_budget_of_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With real processes: each schema takes a part of a second, and all of them many seconds."""
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.5)
    slow = {"type": "integer", "multipleOf": 100_003}
    schemas = {
        f"rule{i}": RuleSchema({"type": "object", "properties": {f"a{i}": slow}}, f"tools[{i}]")
        for i in range(40)
    }
    schemas["wrong"] = RuleSchema({"type": "string", "pattern": "("}, "tools[40]")
    rules = AnswerRules((f"start: {' | '.join(schemas)}",), schemas=schemas)
    with closing(GrammarValidator(vocabulary)) as validator:
        with pytest.raises(ParameterError, match="could not be determined in time"):
            validator.validate(StructuredOutputs(answer=rules.text()))
        validator.validate(StructuredOutputs(choice=["a", "afterwards"]))


# ---- whoever waits ----


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> StructuredOutputs:
    """A constraint that is compiled for ever, unless it is cancelled."""
    for name in ("ATTEMPT_SECONDS", "TRIAL_SECONDS", "WALL_SECONDS"):
        monkeypatch.setattr(trial, name, 3600.0)
    return StructuredOutputs(json=INTERSECTIONS)


def workers() -> set[int]:
    return children(running=trial_worker.__file__)


async def begun(validator: GrammarValidator, num_trials: int = 1) -> None:
    """Wait until so many trials have a process that works."""
    async with asyncio.timeout(60):
        while True:
            trials = [shared.trial for shared in validator._shared.values()]
            if sum(one._process is not None for one in trials) == num_trials:
                return
            await asyncio.sleep(0.002)


async def test_cancelled_request_ends_its_trial(endless: StructuredOutputs) -> None:
    with closing(GrammarValidator(vocabulary)) as validator:
        before = workers()
        await validator.validate_async(StructuredOutputs(choice=["a", "warm"]))
        (worker,) = workers() - before
        task = asyncio.create_task(validator.validate_async(endless, "owner"))
        await begun(validator)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The owner's only place is free again, so the process was ended.
        await validator.validate_async(StructuredOutputs(choice=["a", "next"]), "owner")
        assert worker not in workers()
        assert not validator.is_validated(endless)


async def test_trial_goes_on_while_another_request_waits_for_it(endless: StructuredOutputs) -> None:
    with closing(GrammarValidator(vocabulary)) as validator:
        first, second = (asyncio.create_task(validator.validate_async(endless, "owner")) for _ in range(2))
        await begun(validator)
        (shared,) = validator._shared.values()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not shared.trial.is_cancelled
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert shared.trial.is_cancelled


async def test_owner_with_slow_grammars_delays_no_other(endless: StructuredOutputs) -> None:
    with closing(GrammarValidator(vocabulary)) as validator:
        constraints: list[Any] = [endless]
        constraints += [StructuredOutputs(json={**INTERSECTIONS, "title": f"{i}"}) for i in range(20)]
        tasks = [asyncio.create_task(validator.validate_async(one, "a")) for one in constraints]
        await begun(validator)
        for name in "bcd":
            await validator.validate_async(StructuredOutputs(choice=["a", name]), name)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_known_outcome_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = StructuredOutputs(choice=["a"]), StructuredOutputs(regex="[")
    with closing(GrammarValidator(vocabulary)) as validator:
        validator.validate(right)
        with pytest.raises(ParameterError):
            validator.validate(wrong)

        def fail(*_: Any) -> None:
            raise AssertionError("a trial was begun")

        monkeypatch.setattr(validator._trials, "begin", fail)
        validator.validate(right, "another")
        with pytest.raises(ParameterError):
            asyncio.run(validator.validate_async(wrong, "another"))


def test_interrupted_wait_of_a_thread_ends_its_trial(
    endless: StructuredOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a script, for example: nothing goes on compiling behind it."""
    with closing(GrammarValidator(vocabulary)) as validator:

        class InterruptedError(BaseException): ...

        shared = validator._join(endless, "")

        def interrupted() -> None:
            raise InterruptedError

        monkeypatch.setattr(shared.trial.future, "exception", interrupted)
        with pytest.raises(InterruptedError):
            validator.validate(endless)
        assert not shared.trial.is_cancelled  # someone else still waits
        validator._leave(shared)
        ended = threading.Event()
        validator._trials.begin("", lambda _: ended.set())
        assert ended.wait(60)
