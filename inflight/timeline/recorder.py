"""Records what the batch does in every step, at a cost that hardly depends on its size.

Steps become runs and columns, and these become chunks in two places:

    EngineCore ─► Recorder, OpenRuns ─┬─ ChunkBuilder, closed at the limits of CHUNK ─► ring of chunks ─► `page`
                                      └─ ChunkBuilder, closed by `take`, while watched ─► viewers
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from inflight.events import ExpertUsage
from inflight.request import Request
from inflight.scheduling.batch import ScheduledStep
from inflight.scheduling.request_pool import Limits, RequestPool
from inflight.timeline.chunks import (
    ChunkBuilder,
    ChunkLimits,
    RecordedRequest,
    RecordedTimes,
    TimelineEvent,
    TimelinePage,
    TimelineQuery,
)
from inflight.timeline.open_runs import OpenRun, OpenRuns, StepOutcome

MAX_BYTES = 64 << 20  # of the ring
CHUNK_OVERHEAD = 256  # bytes that Python needs for each chunk in the ring
CHUNK = ChunkLimits(steps=256, events=1024, runs=2048)  # of the ring
UNTAKEN = ChunkLimits(steps=4096, events=4096, runs=1 << 14)  # kept for viewers that take nothing
MAX_DESCRIBED = 1024  # requests that did nothing in a page's last chunk, but are described in it
TAKE_EVERY = 1 / 30  # seconds between two chunks for viewers
PAGE_BYTES = 1 << 20
# Step and request numbers of a restarted engine start at the next multiple, so that they are never used twice.
NUMBERS_PER_GENERATION = 10**10


class NoRecorder:
    """Records nothing."""

    takes_experts = False  # whether `add_experts` is of use

    @property
    def is_watched(self) -> bool:
        """Whether someone will `take` what is recorded."""
        return False

    def arrive(self, request: Request, now: float) -> None:
        pass

    def end(self, request: Request, reason: str, ended: Sequence[Request], now: float) -> None:
        pass

    def step(
        self, step: ScheduledStep, outcome: StepOutcome, pool: RequestPool, times: RecordedTimes
    ) -> None:
        pass

    def add_experts(self, step: int, usage: ExpertUsage | None) -> None:
        pass

    def watch(self, enabled: bool) -> None:
        pass

    def take(self) -> bytes | None:
        return None

    def take_due(self, now: float) -> bytes | None:  # noqa: ARG002
        return None

    def seconds_until_due(self, now: float) -> float:  # noqa: ARG002
        return math.inf

    def page(self, query: TimelineQuery, replica: str = "0") -> TimelinePage:  # noqa: ARG002
        return TimelinePage([], {})


class Recorder(NoRecorder):
    """The timeline of one engine. Its owner calls it between steps."""

    takes_experts = True

    def __init__(
        self,
        limits: Limits,
        num_blocks: int,
        block_size: int,
        generation: int = 0,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._sizes = limits.max_num_seqs, limits.max_num_batched_tokens, num_blocks, block_size
        self._base = generation * NUMBERS_PER_GENERATION
        self._max_bytes = max_bytes
        self._ring: deque[tuple[int, float, bytes]] = deque()  # number, end and content of each chunk
        self._num_bytes = self._num_chunks = 0
        self._builder = ChunkBuilder(self._sizes)
        self._builder.reset(self._base)
        self._watched: ChunkBuilder | None = None
        self._builders = [self._builder]
        self._taken_at = -math.inf
        self._num_events = 0
        self._next_step = self._base
        self._ended_at = 0.0  # of the last step or event
        self._infos: dict[Request, RecordedRequest] = {}  # of the requests in the engine
        self._runs = OpenRuns(self._describe, self._close_run)

    # ---- requests ----

    def arrive(self, request: Request, now: float) -> None:
        number = request.record.number = self._base + request.arrival
        info = self._infos[request] = _info(request)
        self._ended_at = max(self._ended_at, now)
        self._add_events((TimelineEvent("arrive", now, number),), (info,))
        self._close_full_chunks()

    def end(self, request: Request, reason: str, ended: Sequence[Request], now: float) -> None:
        """Record that a request was ended from outside. `ended` may contain others that ended with it."""
        self._ended_at = max(self._ended_at, now)
        for other in ended:
            self._runs.end(other, self._next_step)
            info = self._infos.pop(other, None)
            if info is None:
                continue
            if other is not request or reason == "stop":  # the answer was complete
                finish_reason = other.record.finish_reason or reason
                event = TimelineEvent("finish", now, info.number, self._next_step - 1, reason=finish_reason)
            else:
                event = TimelineEvent("abort", now, info.number, reason=reason)
            self._add_events((event,), (info,))
        self._close_full_chunks()

    def _add_events(self, events: Sequence[TimelineEvent], infos: Sequence[RecordedRequest]) -> None:
        self._num_events += len(events)
        for builder in self._builders:
            builder.add_events(events, infos)

    def _describe(self, request: Request) -> RecordedRequest:
        return self._infos.get(request) or _info(request)  # it may have left the engine

    # ---- steps ----

    def step(
        self, step: ScheduledStep, outcome: StepOutcome, pool: RequestPool, times: RecordedTimes
    ) -> None:
        """Record a step that was collected or failed."""
        batch, kv, number = step.batch, step.kv, self._base + step.batch.step
        if number != self._next_step:
            self._skip_to(number)
        self._next_step += 1
        self._runs.record(step, number, outcome, pool.lingering)
        if batch.admissions or step.preempted or outcome.ended:
            self._record_events(step, outcome.ended, number, times, pool)
        row = (
            times,
            batch.num_tokens,
            outcome.num_outputs,
            len(pool.running),
            pool.num_waiting,
            kv.num_used,
            kv.num_cached,
            kv.num_tokens,
        )
        for builder in self._builders:
            builder.steps.append(row)
            if outcome.error is not None:
                builder.failed[number] = outcome.error
        self._ended_at = max(self._ended_at, times.updated_at)
        self._close_full_chunks()

    def add_experts(self, step: int, usage: ExpertUsage | None) -> None:
        """Record what the experts received until the end of a step, if that was read."""
        if usage is not None:
            self._builder.experts[self._base + step] = usage

    def _record_events(
        self,
        step: ScheduledStep,
        ended: Sequence[Request],
        number: int,
        times: RecordedTimes,
        pool: RequestPool,
    ) -> None:
        events, infos = list[TimelineEvent](), list[RecordedRequest]()
        for request_id, reason in step.preempted:
            request = pool.requests.get(request_id)
            if request is not None and request in self._infos:  # otherwise it has ended meanwhile
                infos.append(info := self._infos[request])
                moment = times.finished_at if reason == "failure" else times.scheduled_at
                events.append(TimelineEvent("preempt", moment, info.number, number, reason=reason))
        batch = step.batch
        for entry in range(len(batch) - len(batch.admissions), len(batch)):
            infos.append(info := self._describe(step.requests[entry]))
            slot, cached = batch.rows[entry], batch.starts[entry]
            events.append(TimelineEvent("admit", times.scheduled_at, info.number, number, slot, cached))
        for request in ended:
            self._runs.end(request, number + 1)
            if request in self._infos:
                infos.append(info := self._infos.pop(request))
                reason = request.record.finish_reason or ""
                events.append(TimelineEvent("finish", times.finished_at, info.number, number, -1, 0, reason))
        self._add_events(events, infos)

    def _close_run(self, run: OpenRun, end_step: int, outputs: int | None) -> None:
        for builder in self._builders:
            builder.add_run(run, end_step, outputs)

    def _skip_to(self, number: int) -> None:
        """Begin new chunks with a step that does not follow the last one."""
        self._runs.close_all(self._next_step)
        for builder in self._builders:
            if not builder.is_empty:
                self._overflow(builder)
            builder.first_step = number
        self._next_step = number

    # ---- chunks ----

    def _close_full_chunks(self) -> None:
        for builder in self._builders:
            if builder.is_full(CHUNK if builder is self._builder else UNTAKEN):
                self._overflow(builder)
                self._runs.forget_before(min(builder.first_step for builder in self._builders))

    def _overflow(self, builder: ChunkBuilder) -> None:
        """Put a full chunk into the ring, or drop what viewers have not taken."""
        if builder is not self._builder:
            builder.drop()
            return
        data = builder.close(self._runs)
        self._ring.append((self._num_chunks, self._ended_at, data))
        self._num_chunks += 1
        self._num_bytes += len(data) + CHUNK_OVERHEAD
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._ring.popleft()[2]) + CHUNK_OVERHEAD

    # ---- readers ----

    @property
    def num_bytes(self) -> int:
        """The size of the ring."""
        return self._num_bytes

    @property
    def is_watched(self) -> bool:
        return self._watched is not None

    def watch(self, enabled: bool) -> None:
        """Collect chunks for `take`, beginning with the next step, or stop that."""
        if not enabled:
            self._watched, self._builders = None, [self._builder]
        elif self._watched is None:
            self._watched = ChunkBuilder(self._sizes, known=set())
            self._watched.start_at(self._next_step, self._num_events)
            self._builders = [self._builder, self._watched]

    def take(self) -> bytes | None:
        """Return what happened since the last call, or None if nothing did or no one watches."""
        if self._watched is None or self._watched.is_empty:
            return None
        return self._watched.close(self._runs)

    def take_due(self, now: float) -> bytes | None:
        """Take what happened, unless something was taken just before."""
        if self._watched is None or now < self._taken_at + TAKE_EVERY:
            return None
        data = self.take()
        if data is not None:
            self._taken_at = now
        return data

    def seconds_until_due(self, now: float) -> float:
        """Return when `take_due` will have something, as far as this is known now."""
        if self._watched is None or self._watched.is_empty:
            return math.inf
        return max(0.0, self._taken_at + TAKE_EVERY - now)

    def page(self, query: TimelineQuery, replica: str = "0") -> TimelinePage:
        """Return the next recorded chunks.

        The last ones describe all requests in the engine: the one that is not full yet, and others without steps.
        """
        position = -1 if query.positions is None else query.positions.get(replica, -1)
        chunks: list[tuple[str, bytes]] = []
        num_bytes = 0
        for number, ended_at, data in self._ring:
            if number >= position and ended_at >= query.since:
                if num_bytes >= PAGE_BYTES:
                    return TimelinePage(chunks, {replica: number})
                chunks.append((replica, data))
                num_bytes += len(data)
        infos = list(self._infos.values())
        snapshots = [self._builder.encode(self._runs, infos[:MAX_DESCRIBED])]
        for first in range(MAX_DESCRIBED, len(infos), MAX_DESCRIBED):
            builder = ChunkBuilder(self._sizes)
            builder.start_at(self._next_step, self._num_events)
            snapshots.append(builder.encode((), infos[first : first + MAX_DESCRIBED]))
        return TimelinePage([*chunks, *((replica, data) for data in snapshots)], {})


def _info(request: Request) -> RecordedRequest:
    """Return the description of a request that has arrived."""
    record = request.record
    return RecordedRequest(
        record.number,
        request.request_id,
        request.num_prompt_tokens,
        request.priority,
        record.arrived_at,
        request.spec.origin,
    )
