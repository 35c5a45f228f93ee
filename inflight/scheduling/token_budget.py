"""The number of tokens that a step may compute.

Long prompts make a step slow, and every decoding request waits for its end. While few prompts wait, a step therefore
takes only as many prompt tokens as keep it within a target time. As more wait, steps grow up to the limit, because then
throughput decides how soon the last prompt gets its first token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

FIRST_TOKENS = 256  # initial estimate of the tokens that take the target time
MIN_CHUNK = 128  # tokens that prompts always get, however slow steps are
PROMPTS_AT_ONCE = 4  # prompts that may wait before steps grow
SMOOTHING = 0.5  # weight of one measurement in the estimate
MAX_GROWTH = 2.0  # limit of the estimate relative to the step that was measured


class TokenBudget:
    """Makes steps as large as allowed."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def limit(self, num_decodes: int, num_prompts: int) -> int:  # noqa: ARG002
        """Return the most tokens for a step with `num_decodes` decodes and `num_prompts` running or waiting prompts."""
        return self.max_tokens

    def observe(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        """Learn from the duration of a step."""


class TimedTokenBudget(TokenBudget):
    """Keeps steps with decodes to about `target` seconds. How many tokens fit is learned from measured steps.

    If the device rounds steps up to certain `sizes` (ascending), a step gets as many tokens as fill one of them, since
    a step between two sizes takes as long as the larger one.
    """

    def __init__(self, max_tokens: int, target: float, sizes: Sequence[int] = ()) -> None:
        super().__init__(max_tokens)
        self.target = target
        self._sizes = sizes
        self._fitting = float(FIRST_TOKENS)  # tokens that take the target time
        # Tokens and seconds of the last step without prompts: the fixed cost that dominates every step.
        self._decodes = 0, 0.0

    def limit(self, num_decodes: int, num_prompts: int) -> int:
        if not num_decodes:  # no request is waiting for its next token
            return self.max_tokens
        widened = self._fitting * max(1.0, num_prompts / PROMPTS_AT_ONCE)
        return min(self.max_tokens, self._filled(num_decodes + MIN_CHUNK, int(widened)))

    def _filled(self, least: int, most: int) -> int:
        """Return the largest size between `least` and `most`, or else `least` rounded up to a size."""
        if not self._sizes:
            return max(least, most)
        index = bisect_right(self._sizes, most) - 1
        return self._rounded(max(least, self._sizes[index] if index >= 0 else 0))

    def _rounded(self, num_tokens: int) -> int:
        index = bisect_left(self._sizes, num_tokens)
        return self._sizes[index] if index < len(self._sizes) else num_tokens

    def observe(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        if not has_prompts:
            self._decodes = num_tokens, seconds
        # The time of a small step is that of reading the weights: it says little about how many tokens fit.
        elif num_tokens >= self._fitting / 2 and seconds > 0:
            self._fitting += SMOOTHING * (self._estimate(self._rounded(num_tokens), seconds) - self._fitting)
            self._fitting = min(max(self._fitting, MIN_CHUNK), self.max_tokens)

    def _estimate(self, num_tokens: int, seconds: float) -> float:
        """Return how many tokens take the target time, at this step's cost per token beyond a step without prompts."""
        base_tokens, base_seconds = self._decodes
        if num_tokens <= base_tokens or seconds <= base_seconds:
            base_tokens, base_seconds = 0, 0.0
        each = (seconds - base_seconds) / (num_tokens - base_tokens)
        return min(num_tokens + (self.target - seconds) / each, MAX_GROWTH * num_tokens)
