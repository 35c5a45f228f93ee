"""Collects the steps, runs and events of a chunk until it is closed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from inflight.events import ExpertUsage
from inflight.timeline.chunks import (
    Chunk,
    PackedRuns,
    RecordedRequest,
    TimelineEvent,
    encode_chunk,
    remember,
)
from inflight.timeline.open_runs import OpenRun

MAX_KEPT = 4096  # descriptions of requests, of steps that were dropped
LARGEST = 2**32 - 1  # in a column


class RecordedTimes(NamedTuple):
    """The times of a step."""

    scheduled_at: float  # when scheduling began
    launched_at: float
    device_began_at: float  # after the launch and the end of the previous step
    finished_at: float  # when its results were available
    updated_at: float  # when they had been processed


# The times of a step, and the columns from "tokens" on.
StepRow = tuple[RecordedTimes, int, int, int, int, int, int, int]


class ChunkLimits(NamedTuple):
    """A chunk is closed when it has this many of something, so that converting it takes little time."""

    steps: int
    events: int
    runs: int


class ChunkBuilder:
    """Collects steps, runs and events. With `known`, requests in it are not described again."""

    def __init__(self, sizes: tuple[int, int, int, int], known: set[int] | None = None) -> None:
        self._sizes = sizes
        self._known = known
        self._num_events = 0
        self.skipped = 0
        self.reset(0)

    def reset(self, first_step: int) -> None:
        """Begin a new chunk."""
        self.first_step = first_step
        self.steps: list[StepRow] = []
        self.runs = PackedRuns()
        self.failed: dict[int, str] = {}
        self.events: list[TimelineEvent] = []
        self.requests: dict[int, RecordedRequest] = {}  # of runs and events, by number
        self.experts: dict[int, ExpertUsage] = {}

    @property
    def is_empty(self) -> bool:
        return not self.steps and not self.events

    def is_full(self, limits: ChunkLimits) -> bool:
        return (
            len(self.steps) >= limits.steps
            or len(self.events) >= limits.events
            or len(self.runs) >= limits.runs
        )

    def add_events(self, events: Iterable[TimelineEvent], infos: Iterable[RecordedRequest]) -> None:
        self.events += events
        for info in infos:
            self.requests[info.number] = info

    def add_run(self, run: OpenRun, end_step: int, outputs: int | None) -> None:
        part = run.until(end_step, outputs).after(self.first_step)
        if part is not None:
            self.runs.append(part)
            self.requests[run.info.number] = run.info

    def encode(self, open_runs: Iterable[OpenRun], more: Iterable[RecordedRequest] = ()) -> bytes:
        """Return what is here so far, with the runs that are still open and more descriptions."""
        runs, requests = self.runs.copy(), self.requests.copy()
        end_step = self.first_step + len(self.steps)
        for run in open_runs:
            part = run.until(end_step).after(self.first_step)
            if part is not None:
                runs.append(part)
                requests[run.info.number] = run.info
        requests |= {info.number: info for info in more}
        if self._known is not None:
            requests = {number: info for number, info in requests.items() if number not in self._known}
        chunk = Chunk(
            *self._sizes,
            first_step=self.first_step,
            at=array("d", [row[0].scheduled_at for row in self.steps]).tobytes(),
            columns=_columns(self.steps),
            run_data=runs.data,
            run_counts=runs.counts,
            failed=self.failed,
            requests=list(requests.values()),
            events=self.events,
            first_event=self._num_events,
            skipped=self.skipped,
            experts=self.experts,
        )
        return encode_chunk(chunk)

    def close(self, open_runs: Iterable[OpenRun]) -> bytes:
        """Return the chunk, and begin the next one."""
        open_runs = list(open_runs)
        data = self.encode(open_runs)
        if self._known is not None:
            sent = [*self.requests, *(run.info.number for run in open_runs)]
            remember(self._known, sent, self.events)
        self._begin_next()
        self.skipped = 0
        return data

    def drop(self) -> None:
        """Forget the steps of the chunk, which no one takes. The next chunk says how many there were."""
        self.skipped += len(self.steps)
        requests = self.requests
        self._begin_next()
        self.requests = requests if len(requests) < MAX_KEPT else {}

    def _begin_next(self) -> None:
        self._num_events += len(self.events)
        self.reset(self.first_step + len(self.steps))

    def start_at(self, step: int, num_events: int) -> None:
        """Begin with this step and event."""
        self._num_events = num_events
        self.reset(step)


def _columns(steps: Sequence[StepRow]) -> bytes:
    """Return the numbers of steps column by column, in the order of COLUMNS."""
    if not steps:
        return b""
    times, *counts = zip(*steps, strict=True)
    durations = (
        [int((end - begin) * 1e6) for begin, end in zip(begins, ends, strict=True)]
        for begins, ends in pairwise(zip(*times, strict=True))
    )
    return b"".join(_column(values) for values in (*durations, *counts))


def _column(values: Sequence[int]) -> bytes:
    try:
        return array("I", values).tobytes()
    except OverflowError:
        return array("I", [min(max(0, value), LARGEST) for value in values]).tobytes()
