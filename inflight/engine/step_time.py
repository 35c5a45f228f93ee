"""How long a step will last, at least."""

from __future__ import annotations

from inflight.scheduling import Batch

SURE = 0.75  # of the time that steps of this size took lately: contexts and the machine's load differ


class StepTimes:
    """Learns from the steps themselves. Sizes that lie close together are one."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], tuple[float, float]] = {}  # the last two of each size

    def observe(self, batch: Batch, seconds: float) -> None:
        size = _size(batch)
        self._seconds[size] = seconds, self._seconds.get(size, (seconds,))[0]

    def estimate(self, batch: Batch) -> float:
        """0 for a size that was not seen yet."""
        return SURE * min(self._seconds.get(_size(batch), (0.0,)))


def _size(batch: Batch) -> tuple[bool, int]:
    """Whether prompts are in it, and its tokens to about a third."""
    tokens = batch.num_tokens
    octave = tokens.bit_length()
    return tokens > len(batch), 2 * octave + (tokens >> max(octave - 2, 0) & 1)
