"""Where a text is in its grammar, and which tokens may come next: one bit per token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MAX_MASK_THREADS = 12  # that fill the masks of one step
# Tokens that are replayed between two masks: each mask brings new fuel for the lexer, of which tokens use some too.
MAX_TOKENS_PER_MASK = 64


class Matcher:
    """The state of one request. For one thread at a time."""

    def __init__(self, state: LLMatcher) -> None:
        self.state = state
        self._derailed = False  # a token came that the grammar forbids

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens came next. What comes behind the end of the text is passed over."""
        for start in range(0, len(token_ids), MAX_TOKENS_PER_MASK):
            if self.state.is_stopped():
                return
            if start:
                self.state.compute_bitmask()
            some = token_ids[start : start + MAX_TOKENS_PER_MASK]
            num_taken = self.state.try_consume_tokens(list(some))
            self._derailed |= num_taken < len(some) and not self.state.is_stopped()

    @property
    def error(self) -> str | None:
        """Why no mask can be had any more."""
        if self.state.is_error():
            return self.state.get_error().split("\n", 1)[0][:200] or "it failed"
        return "a token came that it forbids" if self._derailed else None

    @property
    def is_lexer_full(self) -> bool:
        """Whether the error is that the lexer, which others share, has no room for a state that this text needs."""
        return self.state.is_error() and is_lexer_full(self.state.get_error())


def is_lexer_full(error: str) -> bool:
    return "too many states" in error


class MaskFiller:
    """Masks for the rows of a step, several at a time and without Python's lock."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, matchers: Sequence[Matcher], masks: NDArray[np.int32]) -> None:
        """masks [len(matchers), words]: the tokens that each may have next, the lowest bit of a word first. None at
        all for one with an error; where a text must end, the tokens that end it."""
        if len(matchers) == 1:
            matchers[0].state.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        elif matchers:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(num_threads=min(_num_cores(), MAX_MASK_THREADS))
            states = [(matcher.state, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(states, masks.ctypes.data, masks.strides[0], len(matchers))
        for index, matcher in enumerate(matchers):
            if matcher.error is not None:
                masks[index] = 0


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
