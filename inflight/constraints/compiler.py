"""From what a user asks for to a grammar that can be matched: within limits, and once for all who ask the same."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from inflight.constraints.answer_rules import AnswerRules
from inflight.constraints.grammars import answer_lark, json_rule, lark_grammar
from inflight.constraints.matcher import MaskFiller, Matcher
from inflight.constraints.trial import needs_trial, passes_trial
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM, StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_CACHED = 128  # grammars, and refusals
MAX_CACHED_CHARACTERS = 4 << 20  # of all of them together
MAX_IDLE = 64  # matchers that a grammar keeps for later requests
# llguidance's "fuel" for one grammar and for one mask, of which it burns some ten thousands in a millisecond.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,  # one or two kilobytes each
    "max_grammar_size": 100_000,
}
_COMPLEX = re.compile("fuel|too (many|large|complex|deep)|limit", re.IGNORECASE)


class Grammar:
    """A compiled constraint. Any thread may take a matcher from it."""

    def __init__(self, state: LLMatcher) -> None:
        self._state = state
        self._idle: list[Matcher] = []
        self._lock = threading.Lock()

    def matcher(self) -> Matcher:
        """At the beginning of a text."""
        with self._lock:
            return self._idle.pop() if self._idle else Matcher(self._state.deep_copy())

    def give_back(self, matcher: Matcher) -> None:
        """Nobody uses it any more. It remembers what it found out about the grammar, which the next user need not."""
        if matcher.error is None and matcher.state.reset():
            with self._lock:
                if len(self._idle) < MAX_IDLE:
                    self._idle.append(matcher)


class GrammarCompiler:
    """For one vocabulary. Any thread may use it; compiling leaves Python's lock to others."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[str, str], Grammar | ParameterError] = OrderedDict()
        self._num_characters = 0  # of the keys

    def compile(self, asked: StructuredOutputs, trusted: bool = False) -> Grammar:
        """Raises ParameterError if it is no grammar, asks for what is not supported, or is too complex.

        `trusted`: it was compiled before, by whoever checked the request.
        """
        key = asked.kind, asked.text
        with self._lock:
            found = self._cached.get(key)
            if found is not None:
                self._cached.move_to_end(key)
        if found is None:
            try:
                found = self._compile(asked, trusted)
            except ParameterError as error:
                found = error
            except RecursionError:
                found = ParameterError(
                    f"{PARAM}.{asked.kind} is nested too deeply", param=PARAM, code="constraint_too_complex"
                )
            except ImportError as error:
                raise ParameterError(
                    f"{PARAM} is given: that needs {error.name}, so install inflight-llm[constraints]",
                    param=PARAM,
                    code="constraints_unavailable",
                ) from error
            self._keep(key, found)
        if isinstance(found, ParameterError):
            raise ParameterError(*found.args, param=found.param, code=found.code)
        return found

    def warm_up(self) -> None:
        """Make what the first constraint would wait for, if constraints can be had at all. Nothing else runs in this
        process meanwhile: llguidance keeps Python's lock."""
        with contextlib.suppress(ImportError, ParameterError):
            self.compile(StructuredOutputs(choice=["a"]))

    def is_compiled(self, asked: StructuredOutputs) -> bool:
        """Whether `compile` would answer at once."""
        with self._lock:
            return (asked.kind, asked.text) in self._cached

    def _keep(self, key: tuple[str, str], found: Grammar | ParameterError) -> None:
        with self._lock:
            if key in self._cached:  # another thread was faster
                return
            self._cached[key] = found
            self._num_characters += len(key[1])
            while len(self._cached) > MAX_CACHED or self._num_characters > MAX_CACHED_CHARACTERS:
                oldest, _ = self._cached.popitem(last=False)
                self._num_characters -= len(oldest[1])

    def _compile(self, asked: StructuredOutputs, trusted: bool) -> Grammar:
        if asked.kind == "answer":
            return self._compile_answer(AnswerRules.read(asked.text), trusted)
        name, grammar = f"{PARAM}.{asked.kind}", lark_grammar(asked, self._special_tokens)
        if not trusted and needs_trial(asked.kind, grammar):
            self._try(name, PARAM, lark_grammar(asked, ()))  # who tries it has no special tokens
        return _checked(name, PARAM, self._started(grammar))

    def _compile_answer(self, answer: AnswerRules, trusted: bool) -> Grammar:
        """Schemas that cannot be used are refused, or loosened if nobody insists on them."""
        loosened = answer.unsupported()
        found = self._started_answer(answer, loosened, trusted)
        if isinstance(found, Grammar):
            return found
        unusable = self._unusable(answer, loosened, trusted)
        if unusable:
            found = self._started_answer(answer, loosened | unusable, trusted)
        return _checked(answer.name, answer.param, found)

    def _started_answer(self, answer: AnswerRules, loosened: frozenset[str], trusted: bool) -> Grammar | str:
        grammar = answer_lark(answer, loosened, self._special_tokens)
        if not trusted and needs_trial(answer.kind, grammar):
            self._try(answer.name, answer.param, answer_lark(answer, loosened, None))
        return self._started(grammar)

    def _unusable(self, answer: AnswerRules, loosened: frozenset[str], trusted: bool) -> frozenset[str]:
        """The schemas that cannot be compiled even alone. Raises ParameterError if one of these is strict."""
        schemas = answer.whole_schemas(loosened)
        alone = {name: f"start: {json_rule(schema)}" for name, schema in schemas.items()}
        risky = [grammar for grammar in alone.values() if needs_trial("json", grammar)]
        if risky and not trusted:
            self._try(answer.name, answer.param, *risky)
        found = set()
        for name, grammar in alone.items():
            outcome = self._started(grammar)
            if isinstance(outcome, Grammar):
                continue
            schema = answer.schemas[name]
            if schema.strict:
                raise _refusal(schema.param, schema.param, outcome)
            found.add(name)
        return frozenset(found)

    def _try(self, name: str, param: str, *grammars: str) -> None:
        """What could keep the compiler busy for ever is compiled by a child process first."""
        if not passes_trial(grammars, LIMITS):
            raise ParameterError(
                f"{name} is too complex: compiling it took too long, or too much memory",
                param=param,
                code="constraint_too_complex",
            )

    def _started(self, grammar: str) -> Grammar | str:
        """What is compiled, or why it cannot be. Whoever cannot begin is told so now."""
        from llguidance import LLMatcher

        state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if state.is_error():
            return state.get_error()
        matcher = Matcher(state.deep_copy())
        mask = np.zeros((1, -(-self._tokenizer.vocab_size // 32)), dtype=np.int32)
        MaskFiller().fill([matcher], mask)
        if matcher.error is not None:
            return matcher.state.get_error()
        return Grammar(state) if mask.any() else "no text can match it"

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer()

    @cached_property
    def _limits(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(**LIMITS, verbose_errors=False)

    @cached_property
    def _special_tokens(self) -> frozenset[str]:
        pieces = self._vocabulary.pieces
        ids = (i for i in self._vocabulary.special_ids if i < len(pieces))
        return frozenset(pieces[token_id].decode(errors="replace") for token_id in ids)


def _checked(name: str, param: str, found: Grammar | str) -> Grammar:
    if isinstance(found, str):
        raise _refusal(name, param, found)
    return found


def _refusal(name: str, param: str, message: str) -> ParameterError:
    """What llguidance says, without the grammar around it that the user never saw."""
    text = message.split("<non-verbose/>")[0]
    text = text.split("failed to compile JSON schema: ", 1)[-1]
    text = re.split(r"\n\s+\d+ \| ", text, maxsplit=1)[0]
    text = re.sub(r"^at \d+\(\d+\): ", "", " ".join(text.split()))[:400]
    unsupported = re.search(r"Unimplemented keys: \[(.*)\]", text)
    if unsupported:
        keywords = unsupported[1].replace('"', "'")
        return ParameterError(
            f"{name}: the keyword {keywords} is not supported", param=param, code="unsupported_keyword"
        )
    code = "constraint_too_complex" if _COMPLEX.search(text) else "invalid_constraint"
    return ParameterError(f"{name} cannot be used: {text}", param=param, code=code)
