"""Decides which grammars are attempted for a constraint, and which errors users get for the failed ones.

The validator has the grammars written and compiled by its sandboxed process, and the engine does both itself. Both use
`first_success`, so they attempt the same grammars and reach the same outcome.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeVar

from inflight.constraints.answer_rules import AnswerRules
from inflight.constraints.grammars import answer_lark, lark_grammar
from inflight.constraints.schema_document import UnsupportedKeywordError
from inflight.constraints.schema_rewriting import as_written
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM, StructuredOutputs

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar that is yet to be written."""

    kind: str  # and the text of a constraint
    text: str
    loosened: tuple[str, ...] = ()  # schemas of an answer that cannot be used
    one_of: bool = False  # whether to make the alternatives of oneOf exclusive

    def lark(self, special_texts: Collection[str]) -> str:
        """Write the grammar. This takes time: rewriting schemas, for example. Raises ParameterError."""
        name, param = f"{PARAM}.{self.kind}", PARAM
        try:
            if self.kind != "answer":
                return lark_grammar(self.kind, self.text, special_texts, self.one_of)
            answer = AnswerRules.read(self.text)
            name, param = answer.name, answer.param
            loosened = answer.unsupported().union(self.loosened)
            return answer_lark(answer, loosened, special_texts, self.one_of)
        except RecursionError:
            reason = "it is nested too deeply"
        except UnsupportedKeywordError as error:
            reason = f"the keyword {error.keyword!r}, at {error.pointer}, is not supported{error.reason}"
        raise _too_complex(name, param, reason)


# Returns the compiled grammar, or why it cannot be used. Raises ParameterError and AttemptDiedError.
Attempt = Callable[[GrammarSource], T | str]


class AttemptDiedError(Exception):
    """A grammar exceeded a limit of the process that attempted it. The message says which."""


class BudgetSpentError(AttemptDiedError):
    """All attempts of one request together have taken too long."""


def first_success(constraint: StructuredOutputs, attempt: Attempt[T]) -> T:
    """Attempt the grammars of a constraint until one compiles.

    Raises ParameterError if the constraint is invalid, not supported or too complex.
    """
    name, param = f"{PARAM}.{constraint.kind}", PARAM
    source = GrammarSource(constraint.kind, constraint.text)
    try:
        if constraint.kind == "answer":
            answer = AnswerRules.read(constraint.text)
            name, param = answer.name, answer.param
            return _attempt_answer(answer, source, attempt)
        return _checked(name, param, _attempt_one_of(source, attempt))
    except RecursionError:
        reason = "it is nested too deeply"
    except AttemptDiedError as error:
        reason = str(error)
    raise _too_complex(name, param, reason)


def _attempt_answer(answer: AnswerRules, source: GrammarSource, attempt: Attempt[T]) -> T:
    """Reject strict schemas that cannot be used, and loosen the others."""
    outcome = _attempt_one_of(source, attempt)
    if isinstance(outcome, str):
        try:
            unusable = _unusable(answer, attempt)
        except BudgetSpentError as error:
            raise _rejection_as_a_whole(answer, outcome) from error
        if unusable:
            outcome = _attempt_one_of(replace(source, loosened=unusable), attempt)
    return _checked(answer.name, answer.param, outcome)


def _unusable(answer: AnswerRules, attempt: Attempt[T]) -> tuple[str, ...]:
    """Return the schemas that do not even compile alone.

    Raises ParameterError if one of these is strict, or if a user's grammar does not compile alone.
    """
    for name, (param, lark) in answer.grammars.items():
        alone = AnswerRules((f"start: @{name}",), grammars={name: (param, lark)})
        _checked(param, param, attempt(GrammarSource("answer", alone.text())))
    names = []
    for name, schema in answer.schemas.items():
        alone = AnswerRules((f"start: {name}",), schemas={name: schema})
        outcome = _attempt_one_of(GrammarSource("answer", alone.text()), attempt)
        if isinstance(outcome, str):
            if schema.strict:
                raise _rejection(schema.param, schema.param, outcome)
            names.append(name)
    return tuple(names)


def _attempt_one_of(source: GrammarSource, attempt: Attempt[T]) -> T | str:
    """Attempt a grammar, and again with exclusive alternatives if llguidance finds that those of oneOf overlap."""
    outcome = attempt(source)
    if isinstance(outcome, str) and _OVERLAP in outcome:
        with contextlib.suppress(ParameterError):
            exclusive = attempt(replace(source, one_of=True))
            return outcome if isinstance(exclusive, str) else exclusive
    return outcome


def _too_complex(name: str, param: str, reason: str) -> ParameterError:
    return ParameterError(f"{name} is too complex: {reason}", param=param, code="constraint_too_complex")


def _checked(name: str, param: str, outcome: T | str) -> T:
    if isinstance(outcome, str):
        raise _rejection(name, param, outcome)
    return outcome


def _rejection_as_a_whole(answer: AnswerRules, message: str) -> ParameterError:
    """Return the error for schemas that cannot be used together, if there was no time to try each alone."""
    rejection = _rejection(answer.name, answer.param, message)
    return ParameterError(
        f"{rejection}; which of the {len(answer.schemas)} schemas is to blame could not be determined in time",
        param=rejection.param,
        code=rejection.code,
    )


# ---- llguidance's messages ----

MAX_MESSAGE = 400  # characters
# Characters that are read at each end of a message. It quotes all that a user wrote, and the patterns below take
# quadratic time.
MAX_READ = 2000
_OVERLAP = "oneOf constraints are not supported"

# Patterns and their replacements. All that match are applied, in this order.
_REPLACEMENTS = [
    (r"invalid regex \".*?\" \(in regex\): (?=regex parse error|lookarounds)", ""),
    (r"\s\^+ error: ", ": "),
    (
        r"lookarounds not supported yet; \w+ in regex",
        "word boundaries and other look-around are not supported:",
    ),
    (r"; following special tokens are available: .*", ""),
    (r"NoExtensionBias", "a rule refers to itself before it matches any text, so nothing can match it"),
    (
        r"oneOf constraints are not supported\. Enable 'coerce_one_of' .*",
        "alternatives of oneOf overlap, and it cannot be decided token by token whether exactly one matches: use anyOf",
    ),
]
_TOO_COMPLEX = [
    (r".*fuel exhausted.*", "it takes too many steps to compile"),
    (r".*Current row has \d+ items; max is \d+.*", "too many alternatives are possible at one point"),
    (r"Unable to determine if regex is empty.*", "its patterns and lengths are too hard to satisfy at once"),
    (r".*(?:step|lexer|parser|items?|states?).*(?:limit|too many).*", "it has too many states"),
    (r"(?!Token range).*too (?:many|large|complex|deep).*", r"\g<0>"),
]


def _rejection(name: str, param: str, message: str) -> ParameterError:
    """Return the error for a message of llguidance, without the grammar around it that the user never saw."""
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
    for pattern, replacement in _TOO_COMPLEX:
        match = re.fullmatch(pattern, text, re.IGNORECASE)
        if match:
            reason = _shortened(match.expand(replacement), MAX_MESSAGE)
            return _too_complex(name, param, reason)
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    return ParameterError(
        f"{name} cannot be used: {_shortened(text, MAX_MESSAGE)}", param=param, code="invalid_constraint"
    )


def _shortened(text: str, length: int) -> str:
    """Cut out the middle of a long text: the reason is often at its end."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"
