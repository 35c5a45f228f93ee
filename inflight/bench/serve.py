"""Measuring: sends requests at their moments, whether or not earlier ones are answered, and notes what came when.

Times are of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Callable

import msgspec

from inflight.bench.connection import Pool, Target
from inflight.bench.events import EventReader, StreamError
from inflight.bench.workload import PlannedRequest

HEARTBEAT = 0.02  # seconds between two looks at how late the event loop is

Progress = Callable[[], None]  # called when a request has ended


class LoadPlan(msgspec.Struct):
    """What one process sends."""

    target: Target
    jobs: list[PlannedRequest]
    concurrency: int | None = None  # requests at once; None: as many as come
    timeout: float = 600.0  # seconds for one request


class Record(msgspec.Struct, gc=False):
    """What happened to one request."""

    index: int
    sent: float  # when it began to be sent, a new connection included
    ended: float
    lag: float | None  # later than it should have been sent; None: it had to wait for others
    times: list[float]  # when its tokens came
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None = None  # its kind
    detail: str = ""

    @property
    def first(self) -> float:
        """When the first token came. One whose tokens have no text shows at its end."""
        return self.times[0] if self.times else self.ended

    @property
    def last(self) -> float:
        return self.times[-1] if self.times else self.ended


class Measured(msgspec.Struct):
    """What one process, or all together, saw."""

    records: list[Record]
    loop_lags: list[float]  # how late the event loop was, every HEARTBEAT
    cpu_share: float  # of one core, used by the client itself; the busiest process's


def measure(plan: LoadPlan, start: float | None = None, progress: Progress | None = None) -> Measured:
    """Run a plan in this process, from the moment `start`."""
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would be taken for a slow server
    try:
        with asyncio.Runner(loop_factory=_event_loop()) as runner:
            return runner.run(drive(plan, start, progress))
    finally:
        gc.enable()
        if not was_frozen:  # by whoever called this, to stay so
            gc.unfreeze()


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not everywhere to be had
        return asyncio.new_event_loop
    found: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return found


async def drive(plan: LoadPlan, start: float | None = None, progress: Progress | None = None) -> Measured:
    """Run a plan in this event loop."""
    start = time.perf_counter() if start is None else start
    await asyncio.sleep(start - time.perf_counter())
    cpu, began = time.process_time(), time.perf_counter()
    loop_lags: list[float] = []
    heart = asyncio.create_task(_beat(loop_lags))
    try:
        records = await _Driver(plan, start, progress).run()
    finally:
        heart.cancel()
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    return Measured(records, loop_lags, share)


async def _beat(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(HEARTBEAT)
        lags.append(max(time.perf_counter() - before - HEARTBEAT, 0.0))


class _Driver:
    def __init__(self, plan: LoadPlan, start: float, progress: Progress | None) -> None:
        self._plan = plan
        self._start = start
        self._progress = progress
        self._pool = Pool(plan.target)
        self._gate = None if plan.concurrency is None else asyncio.Semaphore(plan.concurrency)

    async def run(self) -> list[Record]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._one(job, had_to_wait)) async for job, had_to_wait in self._due()
                ]
        finally:
            self._pool.close()
        return [task.result() for task in tasks]

    async def _due(self) -> AsyncGenerator[tuple[PlannedRequest, bool]]:
        """Jobs at their moments, and whether each had to wait for others to end."""
        waited_until = 0.0
        for job in self._plan.jobs:
            moment = self._start + job.at
            delay = moment - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            if self._gate is not None:
                was_locked = self._gate.locked()
                await self._gate.acquire()
                if was_locked:
                    waited_until = time.perf_counter()
            had_to_wait = moment < waited_until  # also behind one that had to
            yield job, had_to_wait

    async def _one(self, job: PlannedRequest, had_to_wait: bool) -> Record:
        plan, reader = self._plan, EventReader()
        request = plan.target.request(job.body)
        sent = time.perf_counter()
        error: StreamError | None = None
        try:
            async with asyncio.timeout(plan.timeout):
                await self._pool.stream(request, reader)
        except StreamError as raised:
            error = raised
        except TimeoutError:
            error = StreamError("timeout", f"no complete answer within {plan.timeout:g} s")
        ended = reader.ended or time.perf_counter()
        if self._gate is not None:
            self._gate.release()
        if self._progress is not None:
            self._progress()
        return Record(
            index=job.index,
            sent=sent,
            ended=ended,
            lag=None if had_to_wait else max(sent - self._start - job.at, 0.0),
            times=reader.times,
            num_tokens=reader.num_tokens,
            num_prompt_tokens=reader.num_prompt_tokens,
            num_cached_tokens=reader.num_cached_tokens,
            error=None if error is None else error.kind,
            detail="" if error is None else str(error),
        )
