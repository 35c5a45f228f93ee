"""Cells of a timeline: what every slot did in every step, one by one. They are what runs abbreviate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from inflight.events import Delta
from inflight.request import Request
from inflight.scheduling import RequestPool, ScheduledStep
from inflight.timeline import (
    Chunk,
    RecordedTimes,
    Recorder,
    SlotKind,
    TimelinePage,
    TimelineQuery,
    decode_chunk,
)
from inflight.timeline.chunks import SlotRun, encode_chunk


class Cell(NamedTuple):
    step: int
    slot: int
    request: int
    kind: int
    num_tokens: int
    first_token: int
    outputs: int


def cells_of(runs: Iterable[SlotRun | Sequence[int]]) -> list[Cell]:
    """Return the cells of runs, in order."""
    cells = []
    for run in (SlotRun(*values) for values in runs):
        for index in range(run.num_steps):
            if run.kind == SlotKind.DECODE:
                several = run.outputs > run.num_steps
                outputs = run.outputs if several else int(index < run.outputs)
            else:
                outputs = run.outputs if index == run.num_steps - 1 else 0
            token = run.first_token + index * run.tokens_per_step
            step = run.first_step + index
            cells.append(Cell(step, run.slot, run.request, run.kind, run.tokens_per_step, token, outputs))
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
    """An engine that has recorded the first chunks, of which a page has three, and records others in `go_on`."""

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
        self,
        step: ScheduledStep,
        deltas: Sequence[Delta],
        ended: Sequence[Request],
        num_outputs: int,
        pool: RequestPool,
        times: RecordedTimes,
        error: str | None = None,
    ) -> None:
        super().step(step, deltas, ended, num_outputs, pool, times, error)
        batch = step.batch
        tokens: Counter[str] = Counter()
        for delta in () if error else deltas:
            tokens[delta.request_id] += len(delta.token_ids)
        number, present = self._base + batch.step, set()
        for entry, request in enumerate(step.requests):
            outputs = tokens[request.request_id] if batch.samples[entry] else 0
            count, start = batch.counts[entry], batch.starts[entry]
            if batch.samples[entry] and not outputs and not error:
                kind = SlotKind.HELD
            else:
                is_decode = count == 1 and start >= request.num_prompt_tokens
                kind = SlotKind.DECODE if is_decode else SlotKind.PREFILL
            present.add(request.record.number)
            self.cells.append(
                Cell(number, batch.rows[entry], request.record.number, kind, count, start, outputs)
            )
        for request_number, (row, token) in self._naively_held.items():
            if request_number not in present:
                self.cells.append(Cell(number, row, request_number, SlotKind.HELD, 0, token, 0))
        self._naively_held = {
            request.record.number: (request.row, len(request.token_ids)) for request in pool.lingering
        }
