"""Where a text is in its grammar, and which tokens may come next: one bit per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

MASK_THREADS = 4  # that fill the masks of one step


class Matcher:
    """The state of one request. For one thread at a time."""

    def __init__(self, state: LLMatcher) -> None:
        self.state = state
        self._derailed = False  # a token came that the grammar forbids

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens came next. What comes behind the end of the text is passed over."""
        if token_ids and not self.state.is_stopped():
            num_taken = self.state.try_consume_tokens(list(token_ids))
            self._derailed |= num_taken < len(token_ids) and not self.state.is_stopped()

    @property
    def error(self) -> str | None:
        """Why no mask can be had any more."""
        if self.state.is_error():
            return self.state.get_error().split("\n", 1)[0][:200] or "it failed"
        return "a token came that it forbids" if self._derailed else None


class MaskFiller:
    """Masks for the rows of a step, several at a time and without Python's lock."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, matchers: Sequence[Matcher], num_words: int) -> NDArray[np.int32]:
        """[len(matchers), num_words]: the tokens that each may have next, the lowest bit of a word first. None at all
        for one with an error; where a text must end, the tokens that end it."""
        masks = np.zeros((len(matchers), num_words), dtype=np.int32)
        if len(matchers) == 1:
            matchers[0].state.unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        elif matchers:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(num_threads=MASK_THREADS)
            states = [(matcher.state, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(states, masks.ctypes.data, 4 * num_words, len(matchers))
        for index, matcher in enumerate(matchers):
            if matcher.error is not None:
                masks[index] = 0
        return masks
