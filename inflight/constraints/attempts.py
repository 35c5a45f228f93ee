"""From what a user asks for to a grammar that works, by way of attempts to compile one.

The same grammars are attempted wherever it is done, so that what one process has tried another can compile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from inflight.constraints.answer_rules import AnswerRules
from inflight.constraints.grammars import answer_lark, json_rule, lark_grammar
from inflight.constraints.refusals import refusal
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM, StructuredOutputs

T = TypeVar("T")
# What becomes of a grammar, or why it cannot be used. Raises AttemptDiedError.
Attempt = Callable[[str], T | str]


class AttemptDiedError(Exception):
    """A grammar was too much for whoever attempted it. The message says in what way."""


class BudgetSpentError(AttemptDiedError):
    """All attempts of one request together have taken too long."""


def first_success(asked: StructuredOutputs, special_texts: Collection[str], attempt: Attempt[T]) -> T:
    """Raises ParameterError if it is no grammar, asks for what is not supported, or is too complex."""
    name, param = f"{PARAM}.{asked.kind}", PARAM
    try:
        if asked.kind == "answer":
            answer = AnswerRules.read(asked.text)
            name, param = answer.name, answer.param
            return _of_answer(answer, special_texts, attempt)
        return _checked(name, param, attempt(lark_grammar(asked, special_texts)))
    except RecursionError:
        reason = "it is nested too deeply"
    except AttemptDiedError as error:
        reason = str(error)
    raise ParameterError(f"{name} is too complex: {reason}", param=param, code="constraint_too_complex")


def _of_answer(answer: AnswerRules, special_texts: Collection[str], attempt: Attempt[T]) -> T:
    """Schemas that cannot be used are refused, or loosened if nobody insists on them."""
    loosened = answer.unsupported()
    found = attempt(answer_lark(answer, loosened, special_texts))
    if isinstance(found, str):
        try:
            unusable = _unusable(answer, loosened, attempt)
        except BudgetSpentError as error:
            raise _refused_as_a_whole(answer, found) from error
        if unusable:
            found = attempt(answer_lark(answer, loosened | unusable, special_texts))
    return _checked(answer.name, answer.param, found)


def _unusable(answer: AnswerRules, loosened: frozenset[str], attempt: Attempt[T]) -> frozenset[str]:
    """The schemas that cannot be compiled even alone. Raises ParameterError if one of these is strict."""
    found = set()
    for name, whole in answer.whole_schemas(loosened).items():
        outcome, schema = attempt(f"start: {json_rule(whole)}"), answer.schemas[name]
        if isinstance(outcome, str):
            if schema.strict:
                raise refusal(schema.param, schema.param, outcome)
            found.add(name)
    return frozenset(found)


def _refused_as_a_whole(answer: AnswerRules, message: str) -> ParameterError:
    """Return the refusal of schemas that cannot be used together, where there was no time to try each alone."""
    refused = refusal(answer.name, answer.param, message)
    return ParameterError(
        f"{refused}; which of the {len(answer.schemas)} schemas is to blame could not be determined in time",
        param=refused.param,
        code=refused.code,
    )


def _checked(name: str, param: str, found: T | str) -> T:
    if isinstance(found, str):
        raise refusal(name, param, found)
    return found
