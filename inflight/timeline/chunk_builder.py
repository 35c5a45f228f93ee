"""Collects the steps, runs and events of a chunk until it is closed."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from inflight.timeline.chunks import (
    COLUMNS,
    Chunk,
    RecordedRequest,
    SlotKind,
    TimelineEvent,
    encode_chunk,
    remember,
)

MAX_EVENTS = 4096  # in one chunk


class OpenRun:
    """A run that may continue in the next step."""

    __slots__ = ("first_step", "first_token", "info", "kind", "slot", "tokens_per_step")

    def __init__(
        self,
        slot: int,
        info: RecordedRequest,
        kind: int,
        first_step: int,
        tokens_per_step: int,
        first_token: int,
    ) -> None:
        self.slot = slot
        self.info = info
        self.kind = kind
        self.first_step = first_step
        self.tokens_per_step = tokens_per_step
        self.first_token = first_token

    def expected(self, step: int) -> int:
        """Return the index of the first token that the run computes in `step` if it continues."""
        return self.first_token + (step - self.first_step) * self.tokens_per_step


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
        self.at = array("d")
        self.rows = array("I")  # one number for each of COLUMNS, step after step
        self.runs = array("q")
        self.failed: dict[int, str] = {}
        self.events: list[TimelineEvent] = []
        self.requests: dict[int, RecordedRequest] = {}

    @property
    def is_empty(self) -> bool:
        return not self.at and not self.events

    def describe(self, info: RecordedRequest) -> None:
        if self._known is None or info.number not in self._known:
            self.requests[info.number] = info

    def add_event(self, event: TimelineEvent, info: RecordedRequest) -> None:
        self.events.append(event)
        self.describe(info)

    def add_run(self, run: OpenRun, end_step: int, outputs: int, to: array[int] | None = None) -> None:
        """Add the part of a run that lies in this chunk."""
        first_step = max(run.first_step, self.first_step)
        if first_step >= end_step:
            return
        skipped = first_step - run.first_step
        if skipped and run.kind == SlotKind.DECODE:
            outputs = max(0, outputs - skipped)
        first_token = run.first_token + skipped * run.tokens_per_step
        numbers = run.slot, run.info.number, run.kind, first_step, end_step - first_step
        (self.runs if to is None else to).extend((*numbers, run.tokens_per_step, first_token, outputs))
        self.describe(run.info)

    def encode(self, open_runs: Iterable[OpenRun], more: Iterable[RecordedRequest] = ()) -> bytes:
        """Return what is here so far, with the runs that are still open and more descriptions."""
        runs, end_step = self.runs[:], self.first_step + len(self.at)
        for run in open_runs:
            outputs = end_step - run.first_step if run.kind == SlotKind.DECODE else 0
            self.add_run(run, end_step, outputs, runs)
        requests = self.requests | {info.number: info for info in more}
        chunk = Chunk(
            *self._sizes,
            first_step=self.first_step,
            at=self.at.tobytes(),
            columns=b"".join(self.rows[index :: len(COLUMNS)].tobytes() for index in range(len(COLUMNS))),
            run_data=runs.tobytes(),
            failed=self.failed,
            requests=list(requests.values()),
            events=self.events,
            first_event=self._num_events,
            skipped=self.skipped,
        )
        return encode_chunk(chunk)

    def close(self, open_runs: Iterable[OpenRun]) -> bytes:
        """Return the chunk, and begin the next one."""
        data = self.encode(open_runs)
        if self._known is not None:
            remember(self._known, self.requests.values(), self.events)
        self._begin_next()
        self.skipped = 0
        return data

    def drop(self) -> None:
        """Forget the steps of the chunk, which no one takes. The next chunk says how many there were."""
        self.skipped += len(self.at)
        requests = self.requests
        self._begin_next()
        self.requests = requests if len(requests) < MAX_EVENTS else {}

    def _begin_next(self) -> None:
        self._num_events += len(self.events)
        self.reset(self.first_step + len(self.at))

    def start_at(self, step: int, num_events: int) -> None:
        """Begin with this step and event."""
        self._num_events = num_events
        self.reset(step)
