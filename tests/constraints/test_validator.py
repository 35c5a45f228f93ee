"""That whatever a stranger asks for ends no one else's request, nor the process."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inflight import StructuredOutputs
from inflight.constraints import GrammarCompiler, GrammarValidator, Vocabulary, trial_worker
from inflight.constraints.trial import NUM_WORKERS
from inflight.errors import GrammarWorkerError, ParameterError
from inflight.frontend.input_processor import vocabulary_of
from tests.constraints.schemas import schema
from tests.constraints.walking import compiler, validator, vocabulary
from tests.support.processes import children

# Two dozen patterns at once: hours, if nobody ends it.
INTERSECTIONS = {"allOf": [{"type": "string", "pattern": f"a{{{i},{i + 20}}}.*b"} for i in range(28)]}
SPECIAL = vocabulary().pieces[vocabulary().eos_token_ids[0]].decode()
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
    # What took minutes to read here, with Python's lock held all the time:
    "words that refusals have": {"regex": "state " * 20_000 + "("},
    "names without an end": {"json": {"type": "string", "pattern": "\\p{" * 40_000}},
    "texts without an end": {"grammar": "start: %json {} " + '"\\' * 60_000},
    "blank lines": {"grammar": "\n" * 130_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_time(name: str) -> None:
    with pytest.raises(ParameterError):
        validator().validate(StructuredOutputs(**HOSTILE[name]))
    validator().validate(StructuredOutputs(choice=["a", name]))


def test_what_is_tried_comes_to_the_same_as_what_is_compiled() -> None:
    wrong: list[dict[str, Any]] = [
        {"json": {"type": "str"}},
        {"json": False},
        {"regex": "["},
        {"grammar": "start: missing"},
    ]
    for given in wrong:
        messages = set()
        for find in (compiler().compile, validator().validate):
            with pytest.raises(ParameterError) as caught:
                find(StructuredOutputs(**given))
            messages.add((str(caught.value), caught.value.code))
        assert len(messages) == 1
    for seed in range(20):
        validator().validate(StructuredOutputs(json=schema(random.Random(seed))))


def workers() -> set[int]:
    """Processes that try grammars; whatever else runs in this process has others."""
    return children(running=trial_worker.__file__)


def test_a_worker_that_someone_else_killed_is_replaced_and_no_grammar_blamed() -> None:
    asked = StructuredOutputs(choice=["a", "worker"])
    given = GrammarValidator(vocabulary)
    before = workers()
    given.warm_up()
    (worker,) = workers() - before
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(GrammarWorkerError, match="ended with -9"):
        given.validate(asked)
    given.validate(asked)
    assert given.is_validated(asked)
    given.close()
    assert workers() <= before


def test_many_who_ask_the_same_at_once_wait_for_one_trial() -> None:
    validated = GrammarValidator(vocabulary)
    asked = [StructuredOutputs(choice=["a", f"{number % 3}"]) for number in range(24)]
    before = workers()
    with ThreadPoolExecutor(len(asked)) as threads:
        list(threads.map(validated.validate, asked))
    assert len(workers() - before) <= NUM_WORKERS
    assert all(map(validated.is_validated, asked))
    validated.close()


def test_what_is_fine_is_compiled_where_the_engine_is_in_this_process() -> None:
    own = GrammarCompiler(vocabulary)
    both = GrammarValidator(vocabulary, own)
    asked = StructuredOutputs(choice=["both"])
    both.validate(asked)
    assert own.is_compiled(asked)
    both.close()


def test_models_that_cannot_be_constrained_say_so() -> None:
    without = GrammarValidator(lambda: vocabulary_of(None, 10, (1,)))
    without.warm_up()
    with pytest.raises(ParameterError, match="it has no tokenizer") as caught:
        without.validate(StructuredOutputs(choice=["a"]))
    assert caught.value.code == "constraints_unavailable"


def test_a_vocabulary_travels_whole() -> None:
    words = Vocabulary([b"a\n", b"", b"\n\n", b"\xff", b"[1]"], frozenset({1, 4}), (4,))
    assert Vocabulary.unpacked(words.packed()) == words
