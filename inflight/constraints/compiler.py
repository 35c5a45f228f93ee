"""Grammars in this process, compiled once for all who ask the same. They were tried before: see `validator.py`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from inflight.constraints.attempts import first_success
from inflight.constraints.fair_threads import FairThreads
from inflight.constraints.kept import KeptOutcomes
from inflight.constraints.matcher import Matcher
from inflight.constraints.trial_worker import first_error
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError
from inflight.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_KEPT = 128  # grammars, and refusals
NUM_THREADS = 2
MAX_IDLE = 64  # matchers that a grammar keeps for later requests
# llguidance's "fuel" for one grammar and for one mask, of which it burns some ten thousands in a millisecond.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 3_000,
    "max_lexer_states": 20_000,  # one or two kilobytes each
    "max_grammar_size": 100_000,
}


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
        """Nobody uses it any more. It remembers what it found out about the grammar, which the next user need not.
        Grammars that count tokens cannot go back to the beginning."""
        if matcher.error is None and matcher.state.reset():
            with self._lock:
                if len(self._idle) < MAX_IDLE:
                    self._idle.append(matcher)


class GrammarCompiler:
    """For one vocabulary. Any thread may use it; compiling leaves Python's lock to others."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._kept: KeptOutcomes[Grammar] = KeptOutcomes(MAX_KEPT)
        self._threads = FairThreads("inflight-grammars", NUM_THREADS)

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """What is not trusted must be validated first. Raises ParameterError."""
        return self._kept.get(asked, self._compile)

    def begin(self, asked: StructuredOutputs, owner: str = "") -> Future[Grammar]:
        """Compile beside what the caller does, one grammar of an owner at a time. What was compiled before is there at
        once. Cancelling the future gives up the place in the queue."""
        known = self._kept.known(asked)
        return self._threads.submit(owner, partial(self.compile, asked)) if known is None else known

    def is_compiled(self, asked: StructuredOutputs) -> bool:
        """Whether `compile` would answer at once."""
        return self._kept.known(asked) is not None

    def warm_up(self) -> None:
        """Make what the first constraint would wait for, if constraints can be had at all. Nothing else runs in this
        process meanwhile: llguidance keeps Python's lock."""
        with contextlib.suppress(ImportError, ParameterError):
            self.compile(StructuredOutputs(choice=["a"]))

    def _compile(self, asked: StructuredOutputs) -> Grammar:
        return first_success(asked, self._special_texts, self._attempt)

    def _attempt(self, grammar: str) -> Grammar | str:
        """As in `trial_worker.py`, with the same outcome."""
        from llguidance import LLMatcher

        state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        first = state.deep_copy()
        error = first_error(first, self._tokenizer.eos_token)
        if error:
            return error
        compiled = Grammar(state)
        compiled.give_back(Matcher(first))  # the first masks of whoever takes it come at once
        return compiled

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        return self._vocabulary.special_texts()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer()

    @cached_property
    def _limits(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(**LIMITS, verbose_errors=False)
