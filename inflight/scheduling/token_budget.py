"""How many tokens a step may have.

A step lasts as long as the prompts in it are, and everybody who decodes waits for its end. So while few prompts
wait, a step gets no more of them than keep it to a target time; as more wait, steps widen, up to the largest there
is, since then it is throughput that gets the last prompt its first token soonest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

FIRST_TOKENS = 256  # of a step, before any was seen
MIN_CHUNK = 128  # tokens that prompts get of a step, however slow it is
PROMPTS_AT_ONCE = 4  # that wait before steps widen
CAUTION = 0.5  # how far one measurement moves the estimate
MOST_GROWTH = 2.0  # times the tokens of a step, however fast it was


class TokenBudget:
    """Steps as large as they may be."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def limit(self, num_decodes: int, num_prompts: int) -> int:  # noqa: ARG002
        """Tokens for a step of so many decodes, with so many requests further behind or waiting."""
        return self.max_tokens

    def observe(self, num_tokens: int, seconds: float, has_prompts: bool) -> None:
        """A step took so long."""


class TimedTokenBudget(TokenBudget):
    """Steps with decodes in them last about `target` seconds. What fits is learnt from the steps themselves.

    Where the device rounds steps up to certain `sizes` (ascending), they get as many tokens as fill one: those between
    would take as long as the next larger size.
    """

    def __init__(self, max_tokens: int, target: float, sizes: Sequence[int] = ()) -> None:
        super().__init__(max_tokens)
        self.target = target
        self._sizes = sizes
        self._fitting = float(FIRST_TOKENS)  # tokens that take the target time
        # Tokens and seconds of the last step without prompts: what any step takes, most of all.
        self._decodes = 0, 0.0

    def limit(self, num_decodes: int, num_prompts: int) -> int:
        if not num_decodes:  # nobody waits for its next token
            return self.max_tokens
        widened = self._fitting * max(1.0, num_prompts / PROMPTS_AT_ONCE)
        return min(self.max_tokens, self._filled(num_decodes + MIN_CHUNK, int(widened)))

    def _filled(self, least: int, most: int) -> int:
        """The largest size from `least` to `most`; if there is none, what `least` is rounded up to."""
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
        # Small steps take as long as their weights take to read: they say little about what would fit.
        elif num_tokens >= self._fitting / 2 and seconds > 0:
            self._fitting += CAUTION * (self._estimate(self._rounded(num_tokens), seconds) - self._fitting)
            self._fitting = min(max(self._fitting, MIN_CHUNK), self.max_tokens)

    def _estimate(self, num_tokens: int, seconds: float) -> float:
        """Tokens for the target time, if each beyond those of a step without prompts takes as long as these did."""
        base_tokens, base_seconds = self._decodes
        if num_tokens <= base_tokens or seconds <= base_seconds:
            base_tokens, base_seconds = 0, 0.0
        each = (seconds - base_seconds) / (num_tokens - base_tokens)
        return min(num_tokens + (self.target - seconds) / each, MOST_GROWTH * num_tokens)
