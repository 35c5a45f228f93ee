"""From a constraint to a grammar that works, by attempts to compile one, and llguidance's errors in the user's terms.

Every process attempts the same grammars, so that what one process has tried another can compile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TypeVar

from inflight.constraints.answer_rules import AnswerRules
from inflight.constraints.grammars import answer_lark, as_written, json_rule, lark_grammar
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM, StructuredOutputs

MAX_LENGTH = 400  # characters
# Of what it says, at both ends. It quotes all that a user wrote, and patterns take a time that grows with the square.
MAX_READ = 2000

# What it says, and what is said instead. All that match are applied, in this order.
_WORDS = [
    (r"invalid regex \".*?\" \(in regex\): (?=regex parse error|lookarounds)", ""),
    (r"\s\^+ error: ", ": "),
    (
        r"lookarounds not supported yet; \w+ in regex",
        "word boundaries and other look-around are not supported:",
    ),
    (r"; following special tokens are available: .*", ""),
    (r"NoExtensionBias", "it leads back to itself before anything is written, so no text can match it"),
    (
        r"oneOf constraints are not supported\. Enable 'coerce_one_of' .*",
        "alternatives of oneOf overlap, and whether exactly one of them holds cannot be told token by token: use anyOf",
    ),
]
_TOO_COMPLEX = [
    (r".*fuel exhausted.*", "it takes too many steps to compile"),
    (r".*Current row has \d+ items; max is \d+.*", "too many different things may come at one place"),
    (r"Unable to determine if regex is empty.*", "its patterns and lengths can hardly be kept all at once"),
    (r".*(?:step|lexer|parser|items?|states?).*(?:limit|too many).*", "it has too many states"),
    (r"(?!Token range).*too (?:many|large|complex|deep).*", r"\g<0>"),
]


def refusal(name: str, param: str, message: str) -> ParameterError:
    """Without the grammar around it that the user never saw."""
    text = message.split("<non-verbose/>")[0]
    text = text.split("failed to compile JSON schema: ", 1)[-1]
    text = _shortened(re.split(r"\n[ \t]++\d++ \| ", text, maxsplit=1)[0], 2 * MAX_READ)
    text = as_written(re.sub(r"^at \d+\(\d+\): ", "", " ".join(text.split())))
    unsupported = re.search(r"Unimplemented keys: \[(.*)\]", text)
    if unsupported:
        keywords = unsupported[1].replace('"', "'")
        return ParameterError(
            f"{name}: the keyword {keywords} is not supported", param=param, code="unsupported_keyword"
        )
    for pattern, words in _TOO_COMPLEX:
        found = re.fullmatch(pattern, text, re.IGNORECASE)
        if found:
            reason = _shortened(found.expand(words), MAX_LENGTH)
            return ParameterError(
                f"{name} is too complex: {reason}", param=param, code="constraint_too_complex"
            )
    for pattern, words in _WORDS:
        text = re.sub(pattern, words, text)
    return ParameterError(
        f"{name} cannot be used: {_shortened(text, MAX_LENGTH)}", param=param, code="invalid_constraint"
    )


def _shortened(text: str, length: int) -> str:
    """Its beginning, and its end: why often stands there."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


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
