"""Cells of a timeline: what every slot did in every step, one by one. They are what runs abbreviate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.request_pool import RequestPool
from inflight.timeline.chunks import (
    Chunk,
    RecordedTimes,
    SlotKind,
    SlotRun,
    TimelinePage,
    TimelineQuery,
    decode_chunk,
    encode_chunk,
)
from inflight.timeline.open_runs import StepOutcome
from inflight.timeline.recorder import Recorder


class Cell(NamedTuple):
    step: int
    slot: int
    request: int
    kind: int
    num_tokens: int
    first_token: int
    outputs: int
    refused: int = 0


def cells_of(runs: Iterable[SlotRun | Sequence[int]]) -> list[Cell]:
    """Return the cells of runs, in order."""
    cells = []
    for run in (SlotRun(*values) for values in runs):
        for index in range(run.num_steps):
            step = run.first_step + index
            counts = (run.outputs if index == run.num_steps - 1 else 0, 0)
            if run.kind == SlotKind.DECODE:
                counts = run.counts_at(step)
            fields = (run.slot, run.request, run.kind, run.tokens_per_step, run.token_at(step))
            cells.append(Cell(step, *fields, *counts))
    return sorted(cells)


def chunks_of(recorder: Recorder, since: float = 0.0) -> list[Chunk]:
    """Return all recorded chunks, page by page."""
    page = recorder.page(TimelineQuery(since))
    chunks = [data for _, data in page.chunks]
    while page.positions:
        page = recorder.page(TimelineQuery(since, page.positions))
        chunks += [data for _, data in page.chunks]
    return [decode_chunk(data) for data in chunks]


class Replay:
    """An engine that has recorded the first chunks (a page has three) and records others in `go_on`."""

    def __init__(self, past: Sequence[Chunk], later: Sequence[Chunk] = ()) -> None:
        self._past, self._later = past, later
        self._observer: Callable[[str, bytes], None] | None = None

    def watch_timeline(self, observer: Callable[[str, bytes], None]) -> Callable[[], None]:
        self._observer = observer
        return lambda: None

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        first = 0 if query.positions is None else query.positions["0"]
        chunks = [("0", encode_chunk(chunk)) for chunk in self._past[first : first + 3]]
        return TimelinePage(chunks, {"0": first + 3} if first + 3 < len(self._past) else {})

    def go_on(self) -> None:
        assert self._observer is not None
        for chunk in self._later:
            self._observer("0", encode_chunk(chunk))


class NaiveRecorder(Recorder):
    """A recorder that also writes down every cell, looking at every entry of every step."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.cells: list[Cell] = []
        self._naively_held: dict[int, tuple[int, int]] = {}  # request number: slot and tokens

    def step(
        self, step: ScheduledStep, outcome: StepOutcome, pool: RequestPool, times: RecordedTimes
    ) -> None:
        super().step(step, outcome, pool, times)
        deltas, error = outcome.deltas, outcome.error
        sizes = [0] if error else [len(delta.token_ids) for delta in deltas]
        assert (outcome.num_outputs, outcome.several) == (sum(sizes), any(size > 1 for size in sizes))
        batch = step.batch
        tokens: Counter[str] = Counter()
        for delta in () if error else deltas:
            tokens[delta.request_id] += len(delta.token_ids)
        number, present = self._base + batch.step, set()
        for entry, request in enumerate(step.requests):
            returned = tokens[request.request_id] if batch.samples[entry] else 0
            start, refused = batch.starts[entry], 0
            count = batch.counts[entry] - len(batch.drafts.get(entry, ()))
            if batch.samples[entry] and not returned and not error:
                kind = SlotKind.HELD
            elif count == 1 and start >= request.num_prompt_tokens:
                kind = SlotKind.DECODE
                refused = outcome.refused.get(entry, 0)
            else:
                kind = SlotKind.PREFILL
            present.add(request.record.number)
            self.cells.append(
                Cell(number, batch.rows[entry], request.record.number, kind, count, start, returned, refused)
            )
        for request_number, (row, token) in self._naively_held.items():
            if request_number not in present:
                self.cells.append(Cell(number, row, request_number, SlotKind.HELD, 0, token, 0))
        self._naively_held = {
            request.record.number: (request.row, len(request.token_ids)) for request in pool.lingering
        }
