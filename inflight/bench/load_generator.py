"""The load generator: sends requests at their scheduled times, whether or not earlier ones have been answered.

A plan runs in this process, or is split over worker processes so that each has a core of its own:

parent                worker (python -m inflight.bench.load_generator)
RunPlan ───────────►  decodes its share of the requests
        ◄──────── PlanReady
StartAt ───────────►  sends them, from a start time that all workers have in common
        ◄──────── Measured

Times are those of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import NoReturn, TypeVar

import msgspec

from inflight.bench.client import ConnectionPool, EventReader, StreamError, Target
from inflight.bench.workload import PlannedRequest
from inflight.errors import EngineError
from inflight.processes.channel import ChildSockets, ConnectionInfo, Message
from inflight.processes.child import ChildHost, run_child
from inflight.processes.connected_process import ConnectedProcess

HEARTBEAT = 0.02  # seconds between two measurements of the event loop's lag
START_DELAY = 0.05  # seconds between sending the start time to the workers and the start

Progress = Callable[[], None]  # called when a request has ended


class LoadPlan(msgspec.Struct):
    """The requests that one process sends."""

    target: Target
    jobs: list[PlannedRequest]
    concurrency: int | None = None  # maximum number of requests in flight; None: no limit
    timeout: float = 600.0  # seconds for one request


class Record(msgspec.Struct, gc=False):
    """The measurements of one request."""

    index: int
    sent: float  # before the connection was opened, if a new one was needed
    ended: float
    lag: float | None  # how late it was sent; None: the concurrency limit delayed it
    times: list[float]  # when its tokens arrived
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None = None  # the kind of error
    detail: str = ""

    @property
    def first(self) -> float:
        """When the first token arrived. If no token has text, this is the end of the answer."""
        return self.times[0] if self.times else self.ended

    @property
    def last(self) -> float:
        return self.times[-1] if self.times else self.ended


class LoadResult(msgspec.Struct):
    """The measurements of one process, or of all of them together."""

    records: list[Record]
    loop_lags: list[float]  # the event loop's lag, sampled every HEARTBEAT
    cpu_share: float  # share of a core used by the client (by its busiest process)


def measure(plan: LoadPlan, start: float | None = None, progress: Progress | None = None) -> LoadResult:
    """Run a plan in this process, starting at time `start`."""
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would look like a slow server
    try:
        with asyncio.Runner(loop_factory=_event_loop()) as runner:
            return runner.run(drive(plan, start, progress))
    finally:
        gc.enable()
        if not was_frozen:  # leave it frozen if the caller had frozen it
            gc.unfreeze()


def _event_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        return asyncio.new_event_loop
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return new_event_loop


async def drive(plan: LoadPlan, start: float | None = None, progress: Progress | None = None) -> LoadResult:
    """Run a plan in this event loop."""
    start = time.perf_counter() if start is None else start
    await asyncio.sleep(start - time.perf_counter())
    cpu, began = time.process_time(), time.perf_counter()
    loop_lags: list[float] = []
    heartbeat = asyncio.create_task(_measure_loop_lag(loop_lags))
    try:
        records = await _Driver(plan, start, progress).run()
    finally:
        heartbeat.cancel()
    share = (time.process_time() - cpu) / (time.perf_counter() - began)
    return LoadResult(records, loop_lags, share)


async def _measure_loop_lag(lags: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(HEARTBEAT)
        lags.append(max(time.perf_counter() - before - HEARTBEAT, 0.0))


class _Driver:
    def __init__(self, plan: LoadPlan, start: float, progress: Progress | None) -> None:
        self._plan = plan
        self._start = start
        self._progress = progress
        self._pool = ConnectionPool(plan.target)
        self._gate = None if plan.concurrency is None else asyncio.Semaphore(plan.concurrency)

    async def run(self) -> list[Record]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._send(job, had_to_wait)) async for job, had_to_wait in self._due()
                ]
        finally:
            self._pool.close()
        return [task.result() for task in tasks]

    async def _due(self) -> AsyncGenerator[tuple[PlannedRequest, bool]]:
        """Yield each request when it is due, and whether the concurrency limit delayed it."""
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
            had_to_wait = moment < waited_until  # also if it queued behind a request that waited
            yield job, had_to_wait

    async def _send(self, job: PlannedRequest, had_to_wait: bool) -> Record:
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


# ---- worker processes ----


class RunPlan(Message, frozen=True):
    plan: LoadPlan


class PlanReady(Message, frozen=True):
    """The worker has decoded its plan."""


class StartAt(Message, frozen=True):
    time: float


class Measured(Message, frozen=True):
    result: LoadResult


FromWorker = PlanReady | Measured
ToWorker = RunPlan | StartAt
FromWorkerT = TypeVar("FromWorkerT", PlanReady, Measured)


def measure_with_workers(num_workers: int, plan: LoadPlan, progress: Progress | None = None) -> LoadResult:
    """Run a plan in `num_workers` processes. With one, that is this process."""
    if num_workers == 1:
        return measure(plan, progress=progress)
    return asyncio.run(_run_workers(split_plan(plan, num_workers)))


async def _run_workers(plans: list[LoadPlan]) -> LoadResult:
    host = ChildHost("load generator worker", (sys.executable, "-P", "-m", "inflight.bench.load_generator"))
    workers: list[ConnectedProcess[FromWorker]] = []
    try:
        for _ in plans:
            workers.append(ConnectedProcess(host, FromWorker, "text"))
        for worker, plan in zip(workers, plans, strict=True):
            await worker.send_first(partial(RunPlan, plan))
        for worker in workers:
            await _receive(worker, PlanReady)
        start = StartAt(time.perf_counter() + START_DELAY)
        for worker in workers:
            worker.send(start)
        return join_results([(await _receive(worker, Measured)).result for worker in workers])
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            await worker.exited.wait()


async def _receive(worker: ConnectedProcess[FromWorker], message_type: type[FromWorkerT]) -> FromWorkerT:
    while not worker.exited.is_set() or worker.unread:
        message = await worker.receive()
        if isinstance(message, message_type):
            return message
    raise EngineError(f"a load generator worker exited early: {worker.reason}")


def split_plan(plan: LoadPlan, num_workers: int) -> list[LoadPlan]:
    """Give each worker every n-th request, so that all are equally busy, and its share of the concurrency limit."""
    limit = plan.concurrency
    count = min(num_workers, len(plan.jobs), limit or num_workers)
    return [
        LoadPlan(
            plan.target,
            plan.jobs[index::count],
            None if limit is None else (limit + count - 1 - index) // count,
            plan.timeout,
        )
        for index in range(count)
    ]


def join_results(parts: list[LoadResult]) -> LoadResult:
    """Merge the workers' results, with the records in the order of the plan."""
    records = [record for part in parts for record in part.records]
    return LoadResult(
        sorted(records, key=lambda record: record.index),
        [lag for part in parts for lag in part.loop_lags],
        max(part.cpu_share for part in parts),
    )


def _work(connection: ConnectionInfo) -> NoReturn:
    """Run a worker process until the parent kills it."""
    sockets: ChildSockets[ToWorker] = ChildSockets(connection, ToWorker)
    plan: LoadPlan
    while True:
        match sockets.receive(wait=True):
            case RunPlan(plan):
                sockets.send(PlanReady())
            case StartAt(start):
                sockets.send(Measured(measure(plan, start)))


if __name__ == "__main__":
    run_child(ConnectionInfo, _work)
