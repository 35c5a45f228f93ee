"""How many tokens a step may have.

A step lasts as long as the prompts in it are, and everybody who decodes waits for its end. So while few prompts
wait, a step gets no more of them than keep it to a target time; as more wait, steps widen, up to the largest there
is, since then it is throughput that gets the last prompt its first token soonest.
"""

from __future__ import annotations

FIRST_TOKENS = 256  # of a step, before any was seen
MIN_CHUNK = 128  # tokens that prompts get of a step, however slow it is
PROMPTS_AT_ONCE = 4  # that wait before steps widen
CAUTION = 0.5  # how far one measurement moves the estimate


class Pace:
    """Steps as large as they may be."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def budget(self, num_decodes: int, num_prompts: int) -> int:  # noqa: ARG002
        """Tokens for a step of so many decodes, with so many requests further behind or waiting."""
        return self.max_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step that computed prompts took so long."""


class TimedPace(Pace):
    """Steps with decodes in them last about `target` seconds. What fits is learnt from the steps themselves."""

    def __init__(self, max_tokens: int, target: float) -> None:
        super().__init__(max_tokens)
        self.target = target
        self._fitting = float(FIRST_TOKENS)  # tokens that take the target time

    def budget(self, num_decodes: int, num_prompts: int) -> int:
        if not num_decodes:  # nobody waits for its next token
            return self.max_tokens
        widened = self._fitting * max(1.0, num_prompts / PROMPTS_AT_ONCE)
        return min(self.max_tokens, max(int(widened), num_decodes + MIN_CHUNK))

    def observe(self, num_tokens: int, seconds: float) -> None:
        # Small steps take as long as their weights take to read: they say little about what would fit.
        if num_tokens < self._fitting / 2 or seconds <= 0:
            return
        fitting = num_tokens * self.target / seconds
        self._fitting += CAUTION * (fitting - self._fitting)
        self._fitting = min(max(self._fitting, MIN_CHUNK), self.max_tokens)
