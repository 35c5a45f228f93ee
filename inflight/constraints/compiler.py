"""Compiles constraints to grammars in this process, once per constraint, after `validator.py` has tried them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import ref

from inflight.constraints.attempts import GrammarSource, first_success
from inflight.constraints.matcher import Lexer, Matcher, is_lexer_full
from inflight.constraints.native_matcher import NativeState, NativeTokenizer, native_functions
from inflight.constraints.trial_worker import first_error
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError
from inflight.processes.fair_threads import FairThreads
from inflight.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 128  # grammars and rejections
MAX_CACHED_LARGE = 8  # grammars whose lexers may have MAX_LARGE_STATES states
MAX_CACHED_CHARACTERS = 4 << 20  # of the constraints in one cache
NUM_THREADS = 2
# All matchers of one compiled grammar share its lexer, which remembers every state that any of them has reached: about
# a kilobyte each. So these limits bound the memory of the cached grammars, and the second what one request may use.
MAX_STATES = 2_048
MAX_LARGE_STATES = 20_000
# Matchers of one lexer take turns, so a grammar with more matchers per lexer than this is compiled again in the
# background, unless that takes long.
MATCHERS_PER_LEXER = 4
MAX_LEXERS = 16  # of one grammar
MAX_SPARE_LEXERS = 64  # of all cached grammars together, without the first of each
MAX_SECONDS_TO_REPEAT = 0.25
# llguidance's "fuel" for one grammar and for one mask: it burns some ten thousand units per millisecond.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 3_000,
    "max_lexer_states": MAX_LARGE_STATES,
    "max_grammar_size": 100_000,
}

_SPARE_LEXERS = "spare lexers"  # the owner of these jobs, so that at most one runs at a time

T = TypeVar("T")


class _States(NamedTuple):
    """The state at the beginning of a text: for matchers that compute masks, and as an object of Python."""

    for_masks: LLMatcher | NativeState
    in_python: LLMatcher


class Grammar:
    """A compiled constraint. Any thread may take a matcher from it."""

    def __init__(self, states: _States, is_large: bool, repeat: Callable[[Grammar], None] | None) -> None:
        self.is_large = is_large  # its lexer may have MAX_LARGE_STATES states
        self._state_for_drafts = states.in_python
        self._repeat = repeat  # starts to compile it again and calls `add`
        self._lock = threading.Lock()
        self._lexers = [Lexer(states.for_masks)]
        self._is_repeating = False

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of a text. It takes microseconds and shares a lexer's states."""
        with self._lock:
            matcher = min(self._lexers, key=lambda lexer: lexer.num_matchers).matcher()
            begins = self._repeat is not None and not self._is_repeating and self._is_crowded()
            self._is_repeating |= begins
        if begins and self._repeat is not None:
            self._repeat(self)
        return matcher

    def state_for_drafts(self) -> LLMatcher:
        """Return a matcher at the beginning of a text that can say which text must follow, but computes no masks."""
        return self._state_for_drafts.deep_copy()

    def _is_crowded(self) -> bool:
        num_matchers = sum(lexer.num_matchers for lexer in self._lexers)
        return MATCHERS_PER_LEXER * len(self._lexers) < min(num_matchers, MATCHERS_PER_LEXER * MAX_LEXERS)

    def add(self, state: LLMatcher | NativeState | None) -> bool:
        """Add a lexer for later matchers, or none if there is no room. Return whether to compile another one."""
        with self._lock:
            if state is not None:
                self._lexers.append(Lexer(state))
            self._is_repeating = state is not None and self._is_crowded()
            return self._is_repeating

    def remove_spare(self) -> bool:
        """Remove a lexer other than the first that no matcher uses. Return whether there was one."""
        with self._lock:
            unused = [lexer for lexer in self._lexers[1:] if not lexer.num_matchers]
            if unused:
                self._lexers.remove(unused[0])
            return bool(unused)


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Any thread may use it; compiling releases the GIL."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], native: bool = False) -> None:
        """`native`: compile for threads that need no GIL, where that is possible."""
        self._make_vocabulary = make_vocabulary
        self._wants_native = native
        self._cache: OutcomeCache[Grammar] = OutcomeCache(MAX_CACHED)
        self._large: OutcomeCache[Grammar] = OutcomeCache(MAX_CACHED_LARGE)
        self._threads = FairThreads("inflight-grammars", NUM_THREADS)
        self._spare_lexers: list[ref[Grammar]] = []  # the grammar of each, oldest first

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """Return the compiled grammar. Untrusted constraints must be validated first. Raises ParameterError."""
        return self._cache.get(constraint, partial(self._compile, False))

    def compile_larger(self, constraint: StructuredOutputs, full: Grammar) -> Grammar:
        """Compile a constraint again for a request whose matcher needs a state that does not fit into `full`'s lexer.

        Other requests may have caused most states of that lexer, and a request's output must not depend on them. So it
        continues with a larger lexer, which is cached for others too, or, if that is full, with one of its own.
        """
        if not full.is_large:
            return self._large.get(constraint, partial(self._compile, True))
        self._large.remove(constraint, full)
        return self._compile(True, constraint)

    def begin(self, constraint: StructuredOutputs, owner: str = "") -> Future[Grammar]:
        """Compile in the background, one grammar of an owner at a time. Cached grammars are returned at once.

        Cancelling the future removes it from the queue.
        """
        outcome = self._cache.outcome(constraint)
        return self._threads.submit(owner, partial(self.compile, constraint)) if outcome is None else outcome

    def is_compiled(self, constraint: StructuredOutputs) -> bool:
        """Whether `compile` would return at once."""
        return self._cache.outcome(constraint) is not None

    def compiled(self, constraint: StructuredOutputs) -> Grammar | None:
        """Return what `compile` would return at once, or None if it would not."""
        outcome = self._cache.outcome(constraint)
        return None if outcome is None or outcome.exception() is not None else outcome.result()

    def warm_up(self) -> None:
        """Prepare what the first constraint would wait for, if constraints are available at all.

        Nothing else runs in this process meanwhile: llguidance holds the GIL.
        """
        with contextlib.suppress(ImportError, ParameterError):
            self.compile(StructuredOutputs(choice=["a"]))

    def _compile(self, is_large: bool, constraint: StructuredOutputs) -> Grammar:
        return first_success(constraint, partial(self._attempt, is_large))

    def _attempt(self, is_large: bool, source: GrammarSource) -> Grammar | str:
        grammar = source.lark(self._special_texts)
        _ = self._tokenizer, self._native_tokenizer  # built now, as that would count as compiling
        start = time.perf_counter()
        states = self._states(is_large, grammar)
        if isinstance(states, str):
            return states
        is_repeatable = not is_large and time.perf_counter() - start < MAX_SECONDS_TO_REPEAT
        return Grammar(states, is_large, partial(self._begin_lexer, grammar) if is_repeatable else None)

    def _states(self, is_large: bool, grammar: str) -> _States | str:
        """Compile a grammar and take its first steps, as `trial_worker.py` does. Return why that fails, if it does."""
        limits = {**LIMITS, "max_lexer_states": MAX_LARGE_STATES if is_large else MAX_STATES}
        state = self._python_state(is_large, grammar, limits)
        if isinstance(state, str):
            return state
        native = self._native_tokenizer
        if native is None or "\0" in grammar:  # C strings end there
            return _States(state, state)
        native_state = native.state(grammar, limits)
        if native_state.is_error():
            return _States(state, state)
        first_error(native_state.deep_copy(), self._tokenizer.eos_token)  # caches the first masks
        return _States(native_state, state)

    def _python_state(self, is_large: bool, grammar: str, limits: dict[str, Any]) -> LLMatcher | str:
        from llguidance import LLMatcher, LLParserLimits

        try:
            checked = LLParserLimits(**limits, verbose_errors=False)
            state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=checked)
            error = first_error(state.deep_copy(), self._tokenizer.eos_token)  # caches the first masks
        except BaseException as panic:
            if isinstance(panic, Exception | KeyboardInterrupt | SystemExit):
                raise
            return f"llguidance panicked: {panic}"  # not an Exception: it would end the engine's loop
        return error if error and (is_large or not is_lexer_full(error)) else state

    def _begin_lexer(self, text: str, grammar: Grammar) -> None:
        self._threads.submit(_SPARE_LEXERS, partial(self._add_lexer, text, grammar))

    def _add_lexer(self, text: str, grammar: Grammar) -> None:
        states = self._states(False, text) if self._has_room() else None
        state = states.for_masks if isinstance(states, _States) else None
        if state is not None:
            self._spare_lexers.append(ref(grammar))
        if grammar.add(state):
            self._begin_lexer(text, grammar)

    def _has_room(self) -> bool:
        """Return whether another spare lexer fits, if need be in the place of the oldest that is not in use."""
        self._spare_lexers = [lexer for lexer in self._spare_lexers if lexer() is not None]
        if len(self._spare_lexers) < MAX_SPARE_LEXERS:
            return True
        for lexer in self._spare_lexers:
            grammar = lexer()
            if grammar is not None and grammar.remove_spare():
                self._spare_lexers.remove(lexer)
                return True
        return False

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        return self.vocabulary.special_texts()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self.vocabulary.tokenizer()

    @cached_property
    def _native_tokenizer(self) -> NativeTokenizer | None:
        functions = native_functions() if self._wants_native else None
        return None if functions is None else NativeTokenizer(functions, self.vocabulary)


class OutcomeCache(Generic[T]):
    """The most recently used outcomes by constraint, rejections included. Thread-safe."""

    def __init__(self, max_outcomes: int) -> None:
        self._max_outcomes = max_outcomes
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[tuple[str, str], Future[T]] = OrderedDict()
        self._num_characters = 0

    def outcome(self, constraint: StructuredOutputs) -> Future[T] | None:
        """Return the outcome if it is cached and done."""
        with self._lock:
            future = self._lookup(_key(constraint))
        return future if future is not None and future.done() else None

    def get(self, constraint: StructuredOutputs, compute: Callable[[StructuredOutputs], T]) -> T:
        """Return the outcome, which the first caller computes. Raises ParameterError and what `compute` raises."""
        key = _key(constraint)
        with self._lock:
            cached = self._lookup(key)
            if cached is None:
                future: Future[T] = Future()
                self._insert(key, future)
        if cached is not None:
            return result_of(cached)
        try:
            future.set_result(compute(constraint))
        except BaseException as error:
            if not isinstance(error, ParameterError):
                self._remove(key, future)  # the next attempt may succeed
            future.set_exception(error)
        return result_of(future)

    def put(self, constraint: StructuredOutputs, outcome: Future[T]) -> None:
        """Cache an outcome that is done, replacing any other."""
        key = _key(constraint)
        with self._lock:
            if self._outcomes.pop(key, None) is not None:
                self._num_characters -= len(key[1])
            self._insert(key, outcome)

    def remove(self, constraint: StructuredOutputs, outcome: T) -> None:
        """Remove an outcome, unless another has replaced it already."""
        key = _key(constraint)
        with self._lock:
            future = self._outcomes.get(key)
        if future is not None and future.done() and future.exception() is None and future.result() is outcome:
            self._remove(key, future)

    def _lookup(self, key: tuple[str, str]) -> Future[T] | None:
        future = self._outcomes.get(key)
        if future is not None:
            self._outcomes.move_to_end(key)
        return future

    def _insert(self, key: tuple[str, str], future: Future[T]) -> None:
        self._outcomes[key] = future
        self._num_characters += len(key[1])
        while len(self._outcomes) > self._max_outcomes or self._num_characters > MAX_CACHED_CHARACTERS:
            oldest, _ = self._outcomes.popitem(last=False)
            self._num_characters -= len(oldest[1])

    def _remove(self, key: tuple[str, str], future: Future[T]) -> None:
        with self._lock:
            if self._outcomes.get(key) is future:
                del self._outcomes[key]
                self._num_characters -= len(key[1])


def _key(constraint: StructuredOutputs) -> tuple[str, str]:
    return constraint.kind, constraint.text


def result_of(future: Future[T]) -> T:
    """Return the result, or raise a copy of its ParameterError: tracebacks would pile up on a shared one."""
    error = future.exception()
    if isinstance(error, ParameterError):
        raise ParameterError(*error.args, param=error.param, code=error.code)
    return future.result()
