"""The picture in words, for whoever cannot see it or point at it."""

from __future__ import annotations

from itertools import groupby

from inflight.compare.layout import Span, SpanKind, Timeline
from inflight.compare.shown import Shown


def requests_in_words(comparison: Shown) -> list[str]:
    """What each request is."""
    return ["; ".join(comparison.told_of(number).splitlines()) for number in range(comparison.num_requests)]


def slots_in_words(comparison: Shown, timeline: Timeline) -> list[str]:
    """Who held each slot, one after the other."""
    held: dict[int, list[str]] = {}
    for (slot, request), spans in groupby(timeline.spans, key=lambda span: (span.slot, span.request)):
        held.setdefault(slot, []).append(f"{comparison.label(request)} in {_when(list(spans))}")
    lines = [f"slot {slot + 1}: {'; '.join(found)}" for slot, found in sorted(held.items())]
    num_unused = timeline.num_slots - len(held)
    return [*lines, f"never used: {num_unused} of {timeline.num_slots} slots"] if num_unused else lines


def _when(spans: list[Span]) -> str:
    first, last = spans[0].first, spans[-1].last - 1
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    if spans[-1].kind is not SpanKind.HELD:
        return steps
    return f"{steps}, finished before step {spans[-1].first}"
