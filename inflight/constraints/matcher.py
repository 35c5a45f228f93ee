"""The state of a text in its grammar, and masks of the tokens that may come next: one bit per token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from inflight.constraints.native_matcher import NativeState
from inflight.errors import clipped

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_MASK_THREADS = 4  # more of them slow down the thread that prepares the next step
# Tokens replayed between two masks: tokens use up some of the lexer's fuel, and computing a mask renews it.
MAX_TOKENS_PER_MASK = 64


class Lexer:
    """A compiled grammar whose matchers share the states of its lexer, and take turns: llguidance locks it."""

    def __init__(self, state: LLMatcher | NativeState) -> None:
        self._state = state
        self._matchers: WeakSet[Matcher] = WeakSet()

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of a text."""
        matcher = Matcher(self._state.deep_copy(), self)
        self._matchers.add(matcher)
        return matcher

    @property
    def num_matchers(self) -> int:
        """The number of its matchers that are still in use."""
        return len(self._matchers)


class Matcher:
    """The state of one request. Not thread-safe."""

    def __init__(self, state: LLMatcher | NativeState, lexer: Lexer) -> None:
        self.state = state
        self.lexer = lexer
        self._is_derailed = False  # a token was not allowed by the grammar

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consume the next tokens of the text. Tokens after its end are ignored."""
        for start in range(0, len(token_ids), MAX_TOKENS_PER_MASK):
            if self.state.is_stopped():
                return
            if start:
                self.state.compute_bitmask()
            chunk = token_ids[start : start + MAX_TOKENS_PER_MASK]
            num_consumed = self.state.try_consume_tokens(list(chunk))
            self._is_derailed |= num_consumed < len(chunk) and not self.state.is_stopped()

    def consume(self, token_ids: Sequence[int]) -> None:
        """Consume a few tokens, as `MaskBatch.advance` does one: a failure becomes the matcher's error."""
        for token_id in token_ids:
            if self.state.is_stopped():
                return
            self.state.consume_token(token_id)

    def copy(self) -> Matcher:
        """Return another matcher of the same text. It takes microseconds, and counts as none of its lexer's."""
        matcher = Matcher(self.state.deep_copy(), self.lexer)
        matcher._is_derailed = self._is_derailed
        return matcher

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, as `MaskBatch` does, but in this thread."""
        if isinstance(self.state, NativeState):
            self.state.fill(mask)
        else:
            self.state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self.error is not None:
            mask[:] = 0

    @property
    def error(self) -> str | None:
        """Why no mask can be computed any more, or None."""
        if self.state.is_error():
            return clipped(self.state.get_error().split("\n", 1)[0], 200) or "it failed"
        return "it does not allow a token that was sampled" if self._is_derailed else None

    @property
    def is_lexer_full(self) -> bool:
        """Whether the error is that the lexer, which other matchers share, has reached its limit of states."""
        return self.state.is_error() and is_lexer_full(self.state.get_error())


def is_lexer_full(error: str) -> bool:
    return "too many states" in error


class MaskFiller:
    """Threads that advance the matchers of a step's rows and fill their masks, with the GIL released."""

    def __init__(self) -> None:
        self._max_threads = min(num_cores(), MAX_MASK_THREADS)
        self._executors: dict[int, LLExecutor] = {}  # by number of threads

    def threads(self, count: int) -> LLExecutor:
        """Return `count` threads, or as many as are allowed."""
        from llguidance import LLExecutor

        count = min(count, self._max_threads)
        if count not in self._executors:
            self._executors[count] = LLExecutor(num_threads=count)
        return self._executors[count]


class MaskBatch:
    """Matchers of a step's rows. Most of the work is done in advance: it competes for the GIL with the next step's.

    Masks are filled by as many threads as there are lexers, up to a limit, and matchers of one lexer come one after the
    other, so that threads seldom wait for each other. A token takes too little time to share.
    """

    def __init__(self, filler: MaskFiller, matchers: Sequence[Matcher], places: Sequence[int]) -> None:
        """Prepare to write the mask of matchers[i] to place places[i] of an array of masks."""
        self._filler = filler
        self._matchers = matchers
        self._places = places
        self._states: list[Any] = [matcher.state for matcher in matchers]
        lexers = [id(matcher.lexer) for matcher in matchers]
        order = sorted(range(len(matchers)), key=lexers.__getitem__)
        targets = [(self._states[index], places[index]) for index in order]
        self._native = [target for target in targets if isinstance(target[0], NativeState)]
        self._targets = [target for target in targets if not isinstance(target[0], NativeState)]
        self._num_lexers = len(set(lexers))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Consume the next token of each matcher. A failure becomes the matcher's error."""
        tokens = list(zip(self._states, token_ids, strict=True))
        if self._native:
            for state, token_id in tokens:
                state.consume_token(token_id)
        elif tokens:
            self._filler.threads(1).consume_token_par(tokens)

    def fill(self, masks: NDArray[np.int32]) -> list[int]:
        """Set the bits of the tokens that may come next, lowest bit of a word first. Return places without any.

        A matcher with an error allows no token; a text that must end allows the end-of-text tokens.
        """
        if self._targets:
            stride = masks.shape[1] * masks.itemsize
            threads = self._filler.threads(self._num_lexers)
            threads.unsafe_compute_mask_ptr(self._targets, masks.ctypes.data, stride, len(masks))
        for state, place in self._native:
            state.fill(masks[place])
        matchers = zip(self._matchers, self._places, strict=True)
        failed = [place for matcher, place in matchers if matcher.error is not None]
        for place in failed:
            masks[place] = 0
        return failed


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
