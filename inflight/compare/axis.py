"""What a picture's width means: time, for the whole run, or steps, for a closer look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.compare.layout import Span, Timeline

CUT = 1.5  # a strategy that takes so many times as long as all others is not shown to its end


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """From the start to `limit` seconds after it."""

    limit: float
    unit: str = "s"

    def interval(self, timeline: Timeline, span: Span) -> tuple[float, float]:
        """Where a span lies."""
        return _part(span, timeline.begins[span.first], timeline.ends[span.last - 1])

    def end(self, timeline: Timeline) -> float:
        return timeline.duration

    @classmethod
    def over(cls, timelines: Sequence[Timeline]) -> TimeAxis:
        """To the end of the slowest, unless that would make slivers of all others: then to the second slowest's."""
        durations = sorted((timeline.duration for timeline in timelines), reverse=True)
        cut = len(durations) > 1 and durations[0] > CUT * durations[1]
        return cls(durations[1] if cut else durations[0])


@dataclass(frozen=True, slots=True)
class StepAxis:
    """The first `limit` steps, all of one width."""

    limit: float
    unit: str = "steps"

    def interval(self, timeline: Timeline, span: Span) -> tuple[float, float]:  # noqa: ARG002
        return _part(span, span.first, span.last)

    def end(self, timeline: Timeline) -> float:
        return timeline.num_steps


Axis = TimeAxis | StepAxis


def _part(span: Span, low: float, high: float) -> tuple[float, float]:
    return low + span.begin * (high - low), low + span.end * (high - low)


def ticks(limit: float, most: int = 12) -> list[float]:
    """At most about `most` round numbers from 0 to the limit."""
    rough = limit / most
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(int(limit / step + 1e-9) + 1)]
