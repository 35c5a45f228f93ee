"""No constraint that a user sends ends another request or the process, and trials keep to their budgets."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from inflight import StructuredOutputs
from inflight.constraints import trial_worker
from inflight.constraints import validator as validator_module
from inflight.constraints.answer_rules import AnswerRules, RuleSchema
from inflight.constraints.attempts import BudgetSpentError, GrammarSource
from inflight.constraints.compiler import GrammarCompiler
from inflight.constraints.validator import (
    ATTEMPT_SECONDS,
    NUM_WORKERS,
    TRIAL_SECONDS,
    GrammarValidator,
    TrialBudget,
)
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import GrammarWorkerError, ParameterError
from inflight.frontend.input_processor import vocabulary_of
from tests.constraints.schemas import schema
from tests.constraints.walking import compiler, validator, vocabulary
from tests.support.processes import children, exists
from tests.support.waiting import until

# Two dozen patterns at once take hours unless they are interrupted.
INTERSECTIONS = {"allOf": [{"type": "string", "pattern": f"a{{{i},{i + 20}}}.*b"} for i in range(28)]}
SPECIAL = vocabulary().pieces[vocabulary().eos_token_ids[0]].decode()


def nested(keyword: str, depth: int, leaf: Any = True) -> Any:
    other = {"then": {"minItems": 1}} if keyword == "if" else {"minContains": 2}
    for _ in range(depth):
        leaf = {keyword: leaf, **other}
    return leaf


def nested_cases(depth: int) -> Any:
    case: Any = {"properties": {f"p{depth}": True}, "required": [f"p{depth}"]}
    branches = [case, {"required": ["q"]}, nested_cases(depth - 1)] if depth else [case]
    return {"anyOf": branches, "unevaluatedProperties": False}


HOSTILE: dict[str, dict[str, Any]] = {
    "intersections": {"json": INTERSECTIONS},
    "behind a special token": {
        "structural_tag": {
            "structures": [{"begin": SPECIAL, "schema": INTERSECTIONS, "end": ""}],
            "triggers": [SPECIAL],
        }
    },
    "multiples": {"json": {"type": "integer", "multipleOf": 999_999_937}},
    "alternatives": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {}}} for c in "pq"]} for i in range(22)]}
    },
    "many rules": {"grammar": "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(4000))},
    "sequence": {"json": {"type": "object", "required": [f"r{i}" for i in range(6000)]}},
    "nesting": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "deep schema": {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "parentheses": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    "conditions": {"json": nested("if", 40)},
    "negations": {"json": {"not": {"anyOf": [{"not": nested("contains", 12)}] * 60}}},
    "cases": {"json": nested_cases(6)},
    "long constants": {"json": nested("contains", 4, {"const": "a" * 100_000})},
    # These once took minutes in Python, with the GIL held.
    "negated prefix": {"json": {"not": {"type": "string", "pattern": "^" + "a" * 130_000}}},
    "negated literal": {"json": {"not": {"type": "string", "pattern": f"^{'a' * 130_000}$"}}},
    "words that refusals have": {"regex": "state " * 20_000 + "("},
    "names without an end": {"json": {"type": "string", "pattern": "\\p{" * 40_000}},
    "texts without an end": {"grammar": "start: %json {} " + '"\\' * 60_000},
    "blank lines": {"grammar": "\n" * 130_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammar_is_rejected_in_time(name: str) -> None:
    with pytest.raises(ParameterError):
        validator().validate(StructuredOutputs(**HOSTILE[name]))
    validator().validate(StructuredOutputs(choice=["a", name]))


def test_trial_and_compiler_agree() -> None:
    invalid: list[dict[str, Any]] = [
        {"json": {"type": "str"}},
        {"json": False},
        {"regex": "["},
        {"grammar": "start: missing"},
    ]
    for fields in invalid:
        messages = set()
        for check in (compiler().compile, validator().validate):
            with pytest.raises(ParameterError) as caught:
                check(StructuredOutputs(**fields))
            messages.add((str(caught.value), caught.value.code))
        assert len(messages) == 1
    for seed in range(20):
        validator().validate(StructuredOutputs(json=schema(random.Random(seed))))


@pytest.mark.parametrize("fields", [{"json": {"not": {"const": "a"}}}, {"grammar": 'root ::= "a"'}])
def test_grammars_are_written_in_the_sandbox_alone(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a grammar was written in this process")

    monkeypatch.setattr(GrammarSource, "lark", fail)
    with closing(GrammarValidator(vocabulary)) as own:
        own.validate(StructuredOutputs(**fields))


def test_writing_a_grammar_counts_against_the_time_of_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validator_module, "ATTEMPT_SECONDS", 0.02)
    slow = "\n".join(
        ["root ::= r0", *(f'r{i} ::= "{"a" * 70}" r{i + 1}' for i in range(290)), 'r290 ::= "b"']
    )
    with (
        closing(GrammarValidator(vocabulary)) as own,
        pytest.raises(ParameterError, match=r"takes more than 0.02 second"),
    ):
        own.validate(StructuredOutputs(grammar=slow))


def is_validated(validator: GrammarValidator, constraint: StructuredOutputs) -> bool:
    return validator._cache.outcome(constraint) is not None


def workers() -> set[int]:
    """Return the processes that try grammars, also those of other validators."""
    return children(running=trial_worker.__file__)


def test_worker_killed_from_outside_is_replaced_and_the_grammar_is_not_blamed() -> None:
    constraint = StructuredOutputs(choice=["a", "worker"])
    own = GrammarValidator(vocabulary)
    own.warm_up()
    (worker,) = own._trials._pool.idle  # other validators may start theirs at the same time
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(GrammarWorkerError, match="ended with -9"):
        own.validate(constraint)
    own.validate(constraint)
    assert is_validated(own, constraint)
    (worker,) = own._trials._pool.idle
    own.close()
    assert not exists(worker._process.pid)


def test_concurrent_requests_with_one_constraint_share_a_trial() -> None:
    validated = GrammarValidator(vocabulary)
    constraints = [StructuredOutputs(choice=["a", f"{number % 3}"]) for number in range(24)]
    before = workers()
    with ThreadPoolExecutor(len(constraints)) as threads:
        list(threads.map(validated.validate, constraints))
    assert len(workers() - before) <= NUM_WORKERS
    assert all(is_validated(validated, constraint) for constraint in constraints)
    validated.close()


def test_valid_constraint_is_compiled_for_an_engine_in_this_process() -> None:
    own = GrammarCompiler(vocabulary)
    both = GrammarValidator(vocabulary, own)
    constraint = StructuredOutputs(choice=["both"])
    both.validate(constraint)
    assert own.is_compiled(constraint)
    both.close()


def test_model_without_tokenizer_rejects_constraints() -> None:
    without = GrammarValidator(lambda: vocabulary_of(None, 10, (1,)))
    without.warm_up()
    with pytest.raises(ParameterError, match="it has no tokenizer") as caught:
        without.validate(StructuredOutputs(choice=["a"]))
    assert caught.value.code == "constraints_unavailable"


def test_packed_vocabulary_unpacks_to_the_same() -> None:
    words = Vocabulary([b"a\n", b"", b"\n\n", b"\xff", b"[1]"], frozenset({1, 4}), (4,))
    assert Vocabulary.unpacked(words.packed()) == words


# ---- budgets ----


def test_attempts_share_one_budget_of_cpu_time() -> None:
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
    seconds = validator_module.WALL_SECONDS
    assert budget.next_attempt() == (ATTEMPT_SECONDS, seconds)
    now += seconds - 1
    assert budget.next_attempt() == (ATTEMPT_SECONDS, 1.0)
    now += 1
    with pytest.raises(GrammarWorkerError, match="busy machine"):
        budget.next_attempt()


class StubProcess:
    """Spends 0.6 s on every grammar and rejects the ones that contain WRONG."""

    num_attempts = 0
    is_usable = True

    def __init__(self, vocabulary: bytes) -> None: ...

    def wait_until_ready(self) -> None: ...

    def attempt(self, source: GrammarSource, cpu_seconds: float, wall_seconds: float) -> tuple[str, float]:  # noqa: ARG002
        StubProcess.num_attempts += 1
        if cpu_seconds < 0.6:
            raise BudgetSpentError("killed by the timer")
        return "it is WRONG" if "WRONG" in source.text else "", 0.6

    def interrupt(self) -> None: ...

    def kill(self) -> None: ...


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarValidator]:
    monkeypatch.setattr(validator_module, "_TrialProcess", StubProcess)
    monkeypatch.setattr(StubProcess, "num_attempts", 0)
    with closing(GrammarValidator(vocabulary)) as stubbed:
        yield stubbed


def tools(num_tools: int, wrong: int, strict: bool) -> StructuredOutputs:
    """Return the constraint of `num_tools` tools; number `wrong` has an invalid schema."""
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
    assert StubProcess.num_attempts == 4  # all together, two alone, and one without budget
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
    """In real processes: each schema takes a fraction of a second, all of them together many seconds."""
    monkeypatch.setattr(validator_module, "TRIAL_SECONDS", 0.5)
    slow = {"type": "integer", "multipleOf": 100_003}
    schemas = {
        f"rule{i}": RuleSchema({"type": "object", "properties": {f"a{i}": slow}}, f"tools[{i}]")
        for i in range(40)
    }
    schemas["wrong"] = RuleSchema({"type": "string", "pattern": "("}, "tools[40]")
    rules = AnswerRules((f"start: {' | '.join(schemas)}",), schemas=schemas)
    with closing(GrammarValidator(vocabulary)) as own:
        with pytest.raises(ParameterError, match="could not be determined in time"):
            own.validate(StructuredOutputs(answer=rules.text()))
        own.validate(StructuredOutputs(choice=["a", "afterwards"]))


# ---- waiting and cancelling ----


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> StructuredOutputs:
    """A constraint that compiles forever unless it is cancelled."""
    for name in ("ATTEMPT_SECONDS", "TRIAL_SECONDS", "WALL_SECONDS"):
        monkeypatch.setattr(validator_module, name, 3600.0)
    return StructuredOutputs(json=INTERSECTIONS)


async def begun(own: GrammarValidator, num_trials: int = 1) -> None:
    """Wait until `num_trials` trials are running in a process."""
    await until(lambda: sum(shared._process is not None for shared in own._running.values()) == num_trials)


async def test_cancelled_request_ends_its_trial(endless: StructuredOutputs) -> None:
    with closing(GrammarValidator(vocabulary)) as own:
        before = workers()
        await own.validate_async(StructuredOutputs(choice=["a", "warm"]))
        (worker,) = workers() - before
        task = asyncio.create_task(own.validate_async(endless, "owner"))
        await begun(own)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The owner may use one process at a time, so the first one has ended.
        await own.validate_async(StructuredOutputs(choice=["a", "next"]), "owner")
        assert worker not in workers()
        assert not is_validated(own, endless)


async def test_trial_continues_while_another_request_waits_for_it(endless: StructuredOutputs) -> None:
    with closing(GrammarValidator(vocabulary)) as own:
        first, second = (asyncio.create_task(own.validate_async(endless, "owner")) for _ in range(2))
        await begun(own)
        (shared,) = own._running.values()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not shared.is_cancelled
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert shared.is_cancelled


async def test_owner_with_slow_grammars_does_not_delay_others(endless: StructuredOutputs) -> None:
    with closing(GrammarValidator(vocabulary)) as own:
        constraints: list[Any] = [endless]
        constraints += [StructuredOutputs(json={**INTERSECTIONS, "title": f"{i}"}) for i in range(20)]
        tasks = [asyncio.create_task(own.validate_async(one, "a")) for one in constraints]
        await begun(own)
        for name in "bcd":
            await own.validate_async(StructuredOutputs(choice=["a", name]), name)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_known_outcome_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    valid, invalid = StructuredOutputs(choice=["a"]), StructuredOutputs(regex="[")
    with closing(GrammarValidator(vocabulary)) as own:
        own.validate(valid)
        with pytest.raises(ParameterError):
            own.validate(invalid)

        def fail(*_: Any) -> None:
            raise AssertionError("a trial began")

        monkeypatch.setattr(own._trials, "begin", fail)
        own.validate(valid, "another")
        with pytest.raises(ParameterError):
            asyncio.run(own.validate_async(invalid, "another"))


def test_interrupted_wait_of_a_thread_ends_its_trial(
    endless: StructuredOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C in a script, for example, nothing keeps compiling in the background."""
    with closing(GrammarValidator(vocabulary)) as own:

        class InterruptedError(BaseException): ...

        def interrupted() -> None:
            raise InterruptedError

        with own._outcome(endless, "") as future:
            (trial,) = own._running.values()
            monkeypatch.setattr(future, "exception", interrupted)
            with pytest.raises(InterruptedError):
                own.validate(endless)
            assert not trial.is_cancelled  # another request still waits
        began = threading.Event()

        def begin(_: object) -> bool:
            began.set()
            return True

        own._trials.begin("", begin)
        assert began.wait(60)
