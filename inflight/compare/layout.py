"""Who held which slot in which step: the one drawing model behind every picture.

    slot 0   |P A A A A|P E E E|          P  prompt computed (prefill)
    slot 1   |P B B . . . . .  |          A  a token produced (decode)
             step 0 ...                   .  held by a request that has finished

Cells of one kind and request that touch are merged into one span.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inflight.events import SlotRecord

if TYPE_CHECKING:
    from inflight.compare.measure import StrategyRun


class SpanKind(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    HELD = "held"  # the request has all its tokens, and the slot is not given on
    PADDING = "padding"  # places behind a text that are computed for nothing


@dataclass(slots=True)
class Span:
    """Steps [first, last) of one request in one slot."""

    slot: int
    request: int  # its index in the workload
    kind: SpanKind
    first: int
    last: int
    num_tokens: int  # kept ones, produced here
    begin: float = 0.0  # the part of these steps that it takes
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One strategy's slots over its steps. Step i lasts from begins[i] to ends[i], seconds after the start."""

    strategy: str
    num_slots: int
    begins: list[float]
    ends: list[float]
    spans: list[Span]  # by slot, then by step

    @property
    def num_steps(self) -> int:
        return len(self.ends)

    @property
    def duration(self) -> float:
        return self.ends[-1]

    @property
    def num_slots_used(self) -> int:
        return 1 + max(span.slot for span in self.spans)

    def num_done(self, moment: float) -> int:
        """Requests that had all their tokens at a moment."""
        num_steps = bisect_right(self.ends, moment)
        last_steps: dict[int, int] = {}
        for span in self.spans:
            if span.num_tokens:
                last_steps[span.request] = max(last_steps.get(span.request, 0), span.last)
        return sum(last <= num_steps for last in last_steps.values())

    def to_json(self) -> dict[str, Any]:
        """When each step ended, the steps that began later than the one before ended, and the spans as
        [slot, request, kind, first step, end, tokens]."""
        earlier = [0.0, *self.ends]
        return {
            "step_ends": [round(moment, 5) for moment in self.ends],
            "pauses": [
                [step, round(begin, 5)] for step, begin in enumerate(self.begins) if begin > earlier[step]
            ],
            "spans": [
                [span.slot, span.request, span.kind.value, span.first, span.last, span.num_tokens]
                for span in self.spans
            ],
        }


def lay_out(run: StrategyRun) -> Timeline:
    index = {request.request_id: number for number, request in enumerate(run.requests)}
    totals = {r.request_id: r.num_prompt_tokens + len(r.token_ids) for r in run.requests}
    owners: dict[int, int] = {}  # by slot: the request that was there last
    open_spans: dict[int, Span] = {}
    spans: list[Span] = []
    held: frozenset[int] = frozenset()  # slots of finished requests, as the step before left them
    for number, step in enumerate(run.steps):
        for slot in step.slots:
            owners[slot.row] = index[slot.request_id]
            kind, kept = _cell(slot, totals[slot.request_id])
            _extend(spans, open_spans, Span(slot.row, owners[slot.row], kind, number, number + 1, kept))
        for row in sorted(held - {slot.row for slot in step.slots}):
            _extend(spans, open_spans, Span(row, owners[row], SpanKind.HELD, number, number + 1, 0))
        held = frozenset(step.idle_rows)
    spans.sort(key=lambda span: (span.slot, span.first))
    return Timeline(run.strategy, run.num_slots, run.begins, run.ends, spans)


def _cell(slot: SlotRecord, total: int) -> tuple[SpanKind, int]:
    """What a slot did in a step, and how many tokens that gave which the answer keeps."""
    produced = slot.start + slot.num_tokens  # the place of the token sampled, if one was
    if slot.samples and produced >= total:  # in flight when the end was found: dropped
        return SpanKind.HELD, 0
    decodes = slot.decodes and slot.num_tokens == 1
    return (SpanKind.DECODE if decodes else SpanKind.PREFILL), int(slot.samples)


def _extend(spans: list[Span], open_spans: dict[int, Span], cell: Span) -> None:
    """Add a cell to the span it continues, or begin one with it."""
    last = open_spans.get(cell.slot)
    same = last is not None and (last.request, last.kind, last.last) == (cell.request, cell.kind, cell.first)
    if last is not None and same:
        last.last = cell.last
        last.num_tokens += cell.num_tokens
    else:
        open_spans[cell.slot] = cell
        spans.append(cell)
