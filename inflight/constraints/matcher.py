"""The state of a text in its grammar, and masks of the tokens that may come next: one bit per token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from inflight.errors import clipped

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_MASK_THREADS = 12  # for the masks of one step
MIN_THREADS_TO_ADVANCE = 4  # a token takes a few microseconds, so fewer threads gain nothing
# Tokens replayed between two masks: tokens use up some of the lexer's fuel, and computing a mask renews it.
MAX_TOKENS_PER_MASK = 64


class Lexer:
    """A compiled grammar whose matchers share the states of its lexer, and take turns: llguidance locks it."""

    def __init__(self, state: LLMatcher) -> None:
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

    def __init__(self, state: LLMatcher, lexer: Lexer) -> None:
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
    """Advances the matchers of a step's rows and fills their masks in parallel, with the GIL released.

    Matchers of the same lexer come one after the other, so that one thread gets them.
    """

    def __init__(self) -> None:
        self._num_threads = min(_num_cores(), MAX_MASK_THREADS)
        self._executor: LLExecutor | None = None

    def advance(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> None:
        """Consume the next token of each matcher."""
        if self._num_threads < MIN_THREADS_TO_ADVANCE or len(matchers) == 1:
            for matcher, token_id in zip(matchers, token_ids, strict=True):
                matcher.advance([token_id])
            return
        pairs = [(matchers[index].state, token_ids[index]) for index in _by_lexer(matchers)]
        running = [(state, token_id) for state, token_id in pairs if not state.is_stopped()]
        if running:
            self._threads().consume_token_par(running)  # a failure becomes the matcher's error

    def fill(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next in masks [len(matchers), words], lowest bit of a word first.

        A matcher with an error allows none; a text that must end allows the end-of-text tokens.
        """
        if len(matchers) == 1:
            matchers[0].state.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        elif matchers:
            states = [(matchers[index].state, index) for index in _by_lexer(matchers)]
            pointer, stride = masks.ctypes.data, masks.strides[0]
            self._threads().unsafe_compute_mask_ptr(states, pointer, stride, len(matchers))
        for index, matcher in enumerate(matchers):
            if matcher.error is not None:
                masks[index] = 0

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self._num_threads)
        return self._executor


def _by_lexer(matchers: Sequence[Matcher]) -> list[int]:
    """Return the indices of the matchers, sorted by lexer."""
    return sorted(range(len(matchers)), key=lambda index: id(matchers[index].lexer))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
