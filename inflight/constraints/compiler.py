"""Compiles grammars in this process, once per constraint, after `validator.py` has tried them."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from inflight.constraints.attempts import first_success
from inflight.constraints.fair_threads import FairThreads
from inflight.constraints.matcher import Matcher, is_lexer_full
from inflight.constraints.trial_worker import first_error
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError
from inflight.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARACTERS = 4 << 20  # of the constraints kept in one place

T = TypeVar("T")


class KeptOutcomes(Generic[T]):
    """Refusals are outcomes too. For any thread."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[tuple[str, str], Future[T]] = OrderedDict()
        self._num_characters = 0

    def known(self, asked: StructuredOutputs) -> Future[T] | None:
        """The outcome, if it is there already."""
        key = asked.kind, asked.text
        with self._lock:
            found = self._outcomes.get(key)
            if found is not None:
                self._outcomes.move_to_end(key)
        return found if found is not None and found.done() else None

    def get(self, asked: StructuredOutputs, find: Callable[[StructuredOutputs], T]) -> T:
        """The outcome, which the first one to ask finds. Raises ParameterError, and what else finding it does."""
        key = asked.kind, asked.text
        with self._lock:
            found = self._outcomes.get(key)
            if found is not None:
                self._outcomes.move_to_end(key)
            else:
                future: Future[T] = Future()
                self._keep(key, future)
        if found is not None:
            return result_of(found)
        try:
            future.set_result(find(asked))
        except BaseException as error:
            if not isinstance(error, ParameterError):
                self._forget(key, future)  # another time it may go well
            future.set_exception(error)
        return result_of(future)

    def put(self, asked: StructuredOutputs, outcome: Future[T]) -> None:
        """Keep an outcome that is there, in place of any other."""
        key = asked.kind, asked.text
        with self._lock:
            if self._outcomes.pop(key, None) is not None:
                self._num_characters -= len(key[1])
            self._keep(key, outcome)

    def forget(self, asked: StructuredOutputs, outcome: T) -> None:
        """Find it anew for the next one to ask, unless another has taken its place already."""
        key = asked.kind, asked.text
        with self._lock:
            future = self._outcomes.get(key)
        if future is not None and future.done() and future.exception() is None and future.result() is outcome:
            self._forget(key, future)

    def _keep(self, key: tuple[str, str], future: Future[T]) -> None:
        self._outcomes[key] = future
        self._num_characters += len(key[1])
        while len(self._outcomes) > self._max_kept or self._num_characters > MAX_CHARACTERS:
            oldest, _ = self._outcomes.popitem(last=False)
            self._num_characters -= len(oldest[1])

    def _forget(self, key: tuple[str, str], future: Future[T]) -> None:
        with self._lock:
            if self._outcomes.get(key) is future:
                del self._outcomes[key]
                self._num_characters -= len(key[1])


def result_of(future: Future[T]) -> T:
    """Everyone gets an exception of their own: tracebacks would pile up on a shared one."""
    error = future.exception()
    if isinstance(error, ParameterError):
        raise ParameterError(*error.args, param=error.param, code=error.code)
    return future.result()


MAX_KEPT = 128  # grammars, and refusals
MAX_KEPT_LARGE = 8  # grammars with room for the lexer states of MAX_LARGE_STATES
NUM_THREADS = 2
# All matchers of one compiled grammar share its lexer, which remembers every state that any of them has reached: about
# a kilobyte each. So these bound the memory of the grammars that are kept, and the second what one request may need.
MAX_STATES = 2_048
MAX_LARGE_STATES = 20_000
# llguidance's "fuel" for one grammar and for one mask, of which it burns some ten thousands in a millisecond.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 3_000,
    "max_lexer_states": MAX_LARGE_STATES,
    "max_grammar_size": 100_000,
}


class Grammar:
    """A compiled constraint. Any thread may take a matcher from it."""

    def __init__(self, state: LLMatcher, is_large: bool) -> None:
        self._state = state
        self.is_large = is_large  # its lexer has room for as many states as any may have

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text. It costs a few microseconds and shares what others have worked out."""
        return Matcher(self._state.deep_copy())


class GrammarCompiler:
    """For one vocabulary. Any thread may use it; compiling leaves Python's lock to others."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._kept: KeptOutcomes[Grammar] = KeptOutcomes(MAX_KEPT)
        self._large: KeptOutcomes[Grammar] = KeptOutcomes(MAX_KEPT_LARGE)
        self._threads = FairThreads("inflight-grammars", NUM_THREADS)

    def compile(self, asked: StructuredOutputs) -> Grammar:
        """Return the compiled grammar. Untrusted constraints must be validated first. Raises ParameterError."""
        return self._kept.get(asked, partial(self._compile, False))

    def compile_larger(self, asked: StructuredOutputs, full: Grammar) -> Grammar:
        """Compile a constraint anew for a request whose matcher needs a state that the lexer of `full` has no room for.

        Most states of that lexer may be due to others, and what a request gets must not depend on them. So it goes on
        with a lexer that has more room, which is kept for others too, and where that is full with one of its own.
        """
        if not full.is_large:
            return self._large.get(asked, partial(self._compile, True))
        self._large.forget(asked, full)
        return self._compile(True, asked)

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

    def _compile(self, is_large: bool, asked: StructuredOutputs) -> Grammar:
        return first_success(asked, self._special_texts, partial(self._attempt, is_large))

    def _attempt(self, is_large: bool, grammar: str) -> Grammar | str:
        """As in `trial_worker.py`, with the same outcome."""
        from llguidance import LLMatcher, LLParserLimits

        max_states = MAX_LARGE_STATES if is_large else MAX_STATES
        limits = LLParserLimits(**{**LIMITS, "max_lexer_states": max_states}, verbose_errors=False)
        try:
            state = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
            error = first_error(
                state.deep_copy(), self._tokenizer.eos_token
            )  # the first masks are known then
        except BaseException as panic:
            if isinstance(panic, Exception | KeyboardInterrupt | SystemExit):
                raise
            return f"llguidance panicked: {panic}"  # which is no Exception, and would end the engine's loop
        if error and (is_large or not is_lexer_full(error)):
            return error
        return Grammar(state, is_large)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._make_vocabulary()

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        return self._vocabulary.special_texts()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return self._vocabulary.tokenizer()
