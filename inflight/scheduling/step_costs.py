"""The costs of steps: how long they take by their number of tokens, from those observed."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import accumulate

NUM_FIRST_STEPS = 4  # steps
NUM_TRIES = 2  # steps after which a size is known
STEP_WEIGHT = 0.1  # of a step among all
OWN_WEIGHT = 0.03  # of a step among those of its size, besides, and for each step since the last of them
MAX_OWN_WEIGHT = 0.5
MAX_CHANGE = 0.3  # by which a step differs from what was expected, as far as it counts


class StepCosts:
    """How long steps take, by their number of tokens, from those observed."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by size class
        self._counts: dict[int, int] = {}  # of the steps observed
        self._tried: list[int] = []  # the sizes of which any step was observed, in order
        self._known: list[int] = []  # those of which NUM_TRIES were
        self._num_steps = 0
        self._last: dict[int, int] = {}  # when each size was observed
        self._bounds: list[float] = []  # of each known size: what it, or any larger one, takes at least

    def observe(self, num_tokens: int, seconds: float, weight: float = STEP_WEIGHT) -> float:
        """Take in how long a step took. Return by what factor this changed the costs of all steps."""
        size = _size_class(num_tokens)
        self._bounds.clear()
        before = self._seconds.get(size, seconds)
        count = self._counts[size] = self._counts.get(size, 0) + 1
        self._num_steps += 1
        num_since, self._last[size] = self._num_steps - self._last.get(size, 0), self._num_steps
        if count == 1:
            insort(self._tried, size)
        if count == NUM_TRIES:
            insort(self._known, size)
        if count <= NUM_FIRST_STEPS:  # first steps are often slow
            self._seconds[size] = min(seconds, before)
            return 1.0
        own_weight = min(OWN_WEIGHT * num_since, MAX_OWN_WEIGHT)
        # One of many steps says little: on a busy machine, some are slow.
        most = MAX_CHANGE if max(weight, own_weight) < MAX_OWN_WEIGHT else 1.0
        change = 1 + min(max(seconds / before - 1, -most / (1 + most)), most)
        # Contexts and the machine's load change all of them. But a size that is seldom observed may just be wrong.
        factor = 1 + weight * (1 - own_weight) * (change - 1)
        self.scale(factor)
        self._seconds[size] *= 1 + own_weight * (change - 1)
        return factor

    def scale(self, factor: float) -> None:
        self._bounds.clear()
        for size in self._tried:
            self._seconds[size] *= factor

    def knows(self, num_tokens: int, num_steps: int = 1) -> bool:
        """Return whether a step of about this size was observed, so many times."""
        return self._counts.get(_size_class(num_tokens), 0) >= num_steps

    @property
    def num_observed(self) -> int:
        return sum(self._counts.values())

    @property
    def reach(self) -> int:
        """The largest step to try: little more than the largest known."""
        return self._known[-1] + max(1, self._known[-1] >> 3) if self._known else 0

    def estimate(self, num_tokens: int) -> float:
        """Return about how long a step takes: a straight line between known sizes, and on behind them.

        A size that is hardly known seems no slower than that, so it is tried until it is known. No size seems slower
        than a larger one.
        """
        sizes, seconds = self._known or self._tried, self._seconds
        if len(sizes) < 2:
            return seconds[sizes[0]] if sizes else 1.0
        index = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        below, above = sizes[index - 1], sizes[index]
        slope = (seconds[above] - seconds[below]) / (above - below)
        if num_tokens < below or num_tokens > above:
            slope = max(slope, 0.0)
        line = seconds[below] + (num_tokens - below) * slope
        if num_tokens > above:
            return line
        if not self._bounds:
            self._bounds = [*accumulate((seconds[size] for size in reversed(sizes)), min)][::-1]
        return min(line, self._bounds[index])


def _size_class(num_tokens: int) -> int:
    """Return the number of tokens to within an eighth, so that few sizes cover all steps."""
    grain = 1 << max(0, num_tokens.bit_length() - 4)
    return num_tokens // grain * grain
