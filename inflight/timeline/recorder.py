"""Records what the batch does in every step, at a cost that hardly depends on its size.

A run (`chunks.py`) is opened when a slot begins to do something and closed when it does something else. While the same
requests decode, no run changes, and a step costs a few numbers appended to columns. Where some join or leave, set
operations find them, and only they are looked at; sums check that all others continued as expected.

    EngineCore ──► Recorder ──┬── ChunkBuilder ── closed after STEPS_PER_CHUNK ──► ring of encoded chunks ──► `page`
                              └── ChunkBuilder ── closed by `take`, while watched ──► viewers
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from inflight.events import Delta
from inflight.request import Request, Status
from inflight.scheduling import Limits, RequestPool, ScheduledStep
from inflight.timeline.chunk_builder import MAX_EVENTS, ChunkBuilder, OpenRun
from inflight.timeline.chunks import RecordedRequest, SlotKind, TimelineEvent, TimelinePage, TimelineQuery

MAX_BYTES = 64 << 20  # of the ring
CHUNK_OVERHEAD = 256  # bytes that Python needs for each chunk in the ring
STEPS_PER_CHUNK = 256
MAX_UNTAKEN_STEPS = 4096  # kept for a viewer that takes none
TAKE_EVERY = 1 / 30  # seconds between two chunks for viewers
PAGE_BYTES = 1 << 20
# Step and request numbers of a restarted engine start at the next multiple, so that they are never used twice.
NUMBERS_PER_GENERATION = 10**10
FEW = 8  # entries that are cheaper to look up one by one
LARGEST = 2**32 - 1  # in a column

DECODE, PREFILL, HELD = int(SlotKind.DECODE), int(SlotKind.PREFILL), int(SlotKind.HELD)


class RecordedTimes(NamedTuple):
    """The times of a step: see `StepRecord`."""

    scheduled: float
    started: float
    began: float
    finished: float
    updated: float


class NoRecorder:
    """Records nothing."""

    @property
    def is_watched(self) -> bool:
        """Whether someone will `take` what is recorded."""
        return False

    def arrive(self, request: Request, now: float) -> None:
        pass

    def end(self, request: Request, reason: str, deltas: Sequence[Delta], now: float) -> None:
        pass

    def step(
        self,
        step: ScheduledStep,
        deltas: Sequence[Delta],
        num_outputs: int,
        pool: RequestPool,
        times: RecordedTimes,
        error: str | None = None,
    ) -> None:
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
        self._infos: dict[str, RecordedRequest] = {}  # of the requests in the engine, by request id
        self._runs: dict[Request, OpenRun] = {}
        # The requests in open runs of decodes, and for each the sum of first_token - first_step.
        self._decoding: set[Request] = set()
        self._sum_offsets = 0
        self._steady: list[Request] | None = None  # the last step's requests, if all of them are decoding
        self._ended: set[Request] = set()  # requests whose tokens from steps in flight will be dropped
        self._held: dict[Request, int] = {}  # finished requests that keep their slot, after the last step

    # ---- requests ----

    def arrive(self, request: Request, now: float) -> None:
        number = request.record.number = self._base + request.arrival
        info = RecordedRequest(
            number,
            request.request_id,
            request.num_prompt_tokens,
            request.priority,
            now,
            request.spec.origin,
        )
        self._infos[request.request_id] = info
        self._add_event(TimelineEvent("arrive", now, number), info)

    def end(self, request: Request, reason: str, deltas: Sequence[Delta], now: float) -> None:
        """Record that a request was ended from outside; `deltas` may end others with it."""
        step = self._next_step - 1
        if request.num_in_flight:
            self._ended.add(request)
        for delta in deltas:
            info = self._infos.pop(delta.request_id, None)
            if info is None:
                continue
            if delta.request_id != request.request_id or reason == "stop":  # the answer was complete
                event = TimelineEvent("finish", now, info.number, step, reason=delta.finish_reason or reason)
            else:
                event = TimelineEvent("abort", now, info.number, reason=reason)
            self._add_event(event, info)

    def _add_event(self, event: TimelineEvent, info: RecordedRequest) -> None:
        self._ended_at = max(self._ended_at, event.at)
        self._num_events += 1
        for builder in self._builders:
            builder.add_event(event, info)
            if len(builder.events) >= MAX_EVENTS:
                self._overflow(builder)

    # ---- steps ----

    def step(
        self,
        step: ScheduledStep,
        deltas: Sequence[Delta],
        num_outputs: int,
        pool: RequestPool,
        times: RecordedTimes,
        error: str | None = None,
    ) -> None:
        """Record a step that was collected or failed. `num_outputs` is the number of tokens in `deltas`."""
        batch, requests = step.batch, step.requests
        number, count = self._base + batch.step, len(requests)
        if number != self._next_step:
            self._skip_to(number)
        self._next_step += 1
        is_quiet = (
            error is None
            and not batch.admissions
            and not step.preempted
            and not pool.lingering
            and len(pool.requests) == len(self._infos)
        )
        if is_quiet and (
            requests == self._steady
            and batch.num_tokens == num_outputs == count
            and sum(batch.starts) == self._sum_offsets + number * count
            and not self._ended
        ):
            pass  # every run continues
        else:
            self._record_runs(step, deltas, num_outputs, pool, number, error)
            if not is_quiet:
                self._record_events(step, deltas, number, times, pool)
        self._append(step, num_outputs, pool, times)
        if error is not None:
            for builder in self._builders:
                builder.failed[number] = error
        self._ended_at = max(self._ended_at, times.updated)
        for builder in self._builders:
            if len(builder.at) >= (STEPS_PER_CHUNK if builder is self._builder else MAX_UNTAKEN_STEPS):
                self._overflow(builder)

    def _append(self, step: ScheduledStep, num_outputs: int, pool: RequestPool, times: RecordedTimes) -> None:
        scheduled, started, began, finished, updated = times
        values = (
            int((started - scheduled) * 1e6),
            int((began - started) * 1e6),
            int((finished - began) * 1e6),
            int((updated - finished) * 1e6),
            step.batch.num_tokens,
            num_outputs,
            len(pool.running),
            pool.num_waiting,
            step.kv.num_used,
            step.kv.num_cached,
        )
        if min(values) < 0 or max(values) > LARGEST:
            values = tuple(min(max(0, value), LARGEST) for value in values)  # type: ignore[assignment]
        for builder in self._builders:
            builder.at.append(scheduled)
            builder.rows.extend(values)

    def _record_events(
        self,
        step: ScheduledStep,
        deltas: Sequence[Delta],
        number: int,
        times: RecordedTimes,
        pool: RequestPool,
    ) -> None:
        batch = step.batch
        for request_id, reason in step.preempted:
            info = self._infos.get(request_id)
            if info is not None:  # otherwise it has ended meanwhile
                at = times.finished if reason == "failure" else times.scheduled
                self._add_event(TimelineEvent("preempt", at, info.number, number, reason=reason), info)
        first = len(batch) - len(batch.admissions)
        for entry, admission in enumerate(batch.admissions, first):
            info = self._infos.get(admission.request.request_id)
            if info is None:  # it was aborted meanwhile
                info = _info(step.requests[entry])
            at, cached = times.scheduled, batch.starts[entry]
            self._add_event(TimelineEvent("admit", at, info.number, number, admission.row, cached), info)
        if len(pool.requests) == len(self._infos):
            return
        self._ended.update(
            request
            for request in step.requests
            if request.num_in_flight and request.status is Status.FINISHED
        )
        for delta in deltas:
            if delta.finish_reason is None:
                continue
            info = self._infos.pop(delta.request_id, None)
            if info is not None:
                reason = delta.finish_reason
                self._add_event(
                    TimelineEvent("finish", times.finished, info.number, number, reason=reason), info
                )

    def _record_runs(
        self,
        step: ScheduledStep,
        deltas: Sequence[Delta],
        num_outputs: int,
        pool: RequestPool,
        number: int,
        error: str | None,
    ) -> None:
        """Open and close the runs of all slots that do not simply go on decoding."""
        batch, requests = step.batch, step.requests
        present = set(requests)
        for request in self._runs.keys() - present - self._held.keys():
            self._close(request, number)
        entries = None if error else self._entries_to_check(step, present, num_outputs, number)
        tokens_of: dict[str, int] | None = None
        if entries is None:
            entries = range(len(requests))
            # A request that the policy releases in the step of its last token has a second delta, without tokens.
            with_tokens = () if error else (delta for delta in deltas if delta.token_ids)
            tokens_of = {delta.request_id: len(delta.token_ids) for delta in with_tokens}
        first_admitted = len(requests) - len(batch.admissions)
        for entry in entries:
            request = requests[entry]
            samples = batch.samples[entry]
            if tokens_of is None:
                outputs = int(samples and request not in self._ended)
            else:
                outputs = tokens_of.get(request.request_id, 0)
            count, start = batch.counts[entry], batch.starts[entry]
            if samples and not outputs and error is None:
                kind = HELD  # the request had ended: the token was dropped
            elif count == 1 and start >= request.num_prompt_tokens:
                kind = DECODE
            else:
                kind = PREFILL
            if entry >= first_admitted and request in self._runs:
                self._close(request, number)
            self._extend(request, batch.rows[entry], kind, number, count, start, outputs)
        for request, row in self._held.items():
            if request not in present:
                self._extend(request, row, HELD, number, 0, len(request.token_ids), 0)
        self._held = {request: request.row for request in pool.lingering}
        if self._ended:
            self._ended = {request for request in self._ended if request.num_in_flight}
        self._steady = requests if len(self._decoding) == len(requests) == len(self._runs) else None

    def _entries_to_check(
        self, step: ScheduledStep, present: set[Request], num_outputs: int, number: int
    ) -> Sequence[int] | None:
        """Return the entries that do not continue a run of decodes, or None if all must be checked."""
        batch, requests = step.batch, step.requests
        ended = present & self._ended
        others = (present - self._decoding) | ended
        if batch.admissions:
            others.update(requests[-len(batch.admissions) :])
        if 2 * len(others) > len(requests):
            return None
        if len(others) <= FEW:
            entries = sorted(map(requests.index, others))
        else:
            entries = [entry for entry, request in enumerate(requests) if request in others]
        num_continuing = len(requests) - len(entries)
        sum_offsets = self._sum_offsets
        for request in others & self._decoding:
            run = self._runs[request]
            sum_offsets -= run.first_token - run.first_step
        num_tokens = batch.num_tokens - sum(batch.counts[entry] for entry in entries)
        sum_starts = sum(batch.starts) - sum(batch.starts[entry] for entry in entries)
        num_dropped = sum(batch.samples[entry] for entry in entries if requests[entry] in ended)
        are_as_expected = (
            num_tokens == num_continuing
            and sum_starts == sum_offsets + number * num_continuing
            and sum(batch.samples) - num_dropped == num_outputs
        )
        return entries if are_as_expected else None

    def _extend(
        self, request: Request, slot: int, kind: int, number: int, count: int, start: int, outputs: int
    ) -> None:
        """Record what a slot did in a step: continue its run, or open another one."""
        run = self._runs.get(request)
        continues = (
            run is not None
            and (run.slot, run.kind, run.tokens_per_step) == (slot, kind, count)
            and run.expected(number) == start
            and (kind != DECODE or outputs == 1)
        )
        if not continues:
            if run is not None:
                self._close(request, number)
            info = self._infos.get(request.request_id)
            if info is None or info.number != request.record.number:
                info = _info(request)
            self._runs[request] = OpenRun(slot, info, kind, number, count, start)
            if kind == DECODE:
                self._decoding.add(request)
                self._sum_offsets += start - number
        if (kind == PREFILL and outputs) or (kind == DECODE and outputs != 1):
            self._close(request, number + 1, outputs)

    def _close(self, request: Request, end_step: int, outputs: int | None = None) -> None:
        run = self._runs.pop(request)
        if run.kind == DECODE:
            self._decoding.remove(request)
            self._sum_offsets -= run.first_token - run.first_step
            outputs = end_step - run.first_step if outputs is None else outputs
        for builder in self._builders:
            builder.add_run(run, end_step, outputs or 0)

    def _skip_to(self, number: int) -> None:
        """Begin new chunks with a step that does not follow the last one."""
        for request in list(self._runs):
            self._close(request, self._next_step)
        for builder in self._builders:
            if not builder.is_empty:
                self._overflow(builder)
            builder.first_step = number
        self._next_step, self._steady = number, None

    # ---- readers ----

    def _overflow(self, builder: ChunkBuilder) -> None:
        """Put a full chunk into the ring, or drop what viewers have not taken."""
        if builder is not self._builder:
            builder.drop()
            return
        data = builder.close(self._runs.values())
        self._ring.append((self._num_chunks, self._ended_at, data))
        self._num_chunks += 1
        self._num_bytes += len(data) + CHUNK_OVERHEAD
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._ring.popleft()[2]) + CHUNK_OVERHEAD

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
        return self._watched.close(self._runs.values())

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
        """Return the next recorded chunks. The last one is not full yet, and describes all requests in the engine."""
        position = -1 if query.positions is None else query.positions.get(replica, -1)
        chunks: list[tuple[str, bytes]] = []
        num_bytes = 0
        for number, ended_at, data in self._ring:
            if number >= position and ended_at >= query.since:
                if num_bytes >= PAGE_BYTES:
                    return TimelinePage(chunks, {replica: number})
                chunks.append((replica, data))
                num_bytes += len(data)
        snapshot = self._builder.encode(self._runs.values(), self._infos.values())
        return TimelinePage([*chunks, (replica, snapshot)], {})


def _info(request: Request) -> RecordedRequest:
    """Return the description of a request that is no longer in the engine."""
    record = request.record
    return RecordedRequest(
        record.number,
        request.request_id,
        request.num_prompt_tokens,
        request.priority,
        record.arrived_at,
        request.spec.origin,
    )
