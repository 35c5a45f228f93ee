"""Offline runs: all requests of a blocking call, on one engine in this process or on several replicas."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from inflight.config import EngineConfig, RouterConfig
from inflight.engine.client import Command
from inflight.engine.core import EngineCore
from inflight.engine.stats import EngineStats
from inflight.errors import ConfigError, EngineError
from inflight.events import Delta
from inflight.frontend.frontend import Frontend
from inflight.request import Request
from inflight.timeline.chunks import TimelinePage, TimelineQuery

if TYPE_CHECKING:
    from inflight.loading.engine import LoadedEngine

logger = logging.getLogger(__name__)

# Extra waiting requests beyond a full step, so that the policy can find one that fits the rest of it.
SPARE = 16
Advance = Callable[[Sequence[Delta]], None]
Consumer = Callable[[Delta], bool]
T = TypeVar("T")


MAX_RECORD_BYTES = 1 << 30  # of a recording, in memory


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """Requests that are run to their end."""

    requests: Iterable[Request]
    num_requests: int
    # By request id: the function that is called with the request's deltas. If it returns True, the request is aborted.
    consumer_of: Callable[[str], Consumer]
    doing: str  # label of the progress bar
    lazily: bool = False  # make requests as steps need them


class OfflineEngine(Protocol):
    """The engine behind `LLM`: one that it steps itself, or several behind a router."""

    @property
    def frontend(self) -> Frontend: ...

    @property
    def description(self) -> str:
        """The device, for the user."""

    @property
    def is_forked(self) -> bool:
        """Whether it belongs to the process that forked this one."""

    def compute(self, run: OfflineRun, show: bool) -> None:
        """Run all requests, with a progress bar if `show`. After an exception, none of them is left running."""

    def command(self, command: Command) -> None: ...

    def stats(self) -> EngineStats: ...

    def read_timeline(self, query: TimelineQuery) -> TimelinePage: ...

    def record(self, enabled: bool) -> None:
        """Record the timeline from now on, or stop, unless it is recorded all the time."""

    def close(self) -> None: ...


@contextmanager
def paused_collection() -> Iterator[None]:
    """Disable garbage collection: it would scan the objects of thousands of requests, which hardly form cycles."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# ---- one engine in this process ----

# Seconds until a waiting thread sees an exception that another thread has set for it: only signals end a wait at once.
NOTICE_SECONDS = 0.25

Operation = Callable[[], object]
Outcome = SimpleQueue[tuple[Any, BaseException | None]]  # a result, or what was raised


@dataclass(eq=False, slots=True)
class LocalCall:
    """A call whose requests the engine's thread runs beside those of other calls."""

    feed: RequestFeed
    consumer_of: Callable[[str], Consumer]
    advance: Advance | None
    outcome: Outcome = field(default_factory=SimpleQueue)
    num_ended: int = 0  # requests

    @property
    def is_over(self) -> bool:
        return self.feed.is_empty and self.num_ended == len(self.feed.added)


class LocalEngine:
    """Implements `OfflineEngine`. One thread steps the engine for the calls of all threads, which join one batch.

    Every operation is a function that this thread runs between two steps, so that no interrupt of a caller can hit a
    step. While idle, the thread has no reference to the engine: an LLM is freed when its user drops it.
    """

    def __init__(self, loaded: LoadedEngine, record: bool = False) -> None:
        self._loaded = loaded  # its core may be replaced while it is idle
        self._calls: list[LocalCall] = []
        self._pause = ExitStack()  # of garbage collection, while there are calls
        self._consumers: dict[str, tuple[LocalCall, Consumer]] = {}  # by request id
        self._deltas: list[Delta] = []  # not passed on yet
        self._operations: SimpleQueue[Operation | None] = SimpleQueue()  # None ends the thread
        self._is_closed = False
        self._process = os.getpid()
        self._always_records = record
        if record:
            loaded.core.record(max_bytes=MAX_RECORD_BYTES)
        arguments = self._operations, weakref.ref(self)
        self._thread = threading.Thread(target=_serve, args=arguments, name="inflight-llm", daemon=True)
        self._thread.start()
        weakref.finalize(self, _end_thread, self._operations, self._thread)  # also at exit

    @property
    def frontend(self) -> Frontend:
        return self._loaded.frontend

    @property
    def description(self) -> str:
        return self._loaded.platform.describe()

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._process

    def compute(self, run: OfflineRun, show: bool) -> None:
        if threading.current_thread() is self._thread:
            raise EngineError("the engine's thread cannot run requests: it would wait for itself")
        with REQUEST_BARS.add(run.doing, run.num_requests, show) as advance:
            call = LocalCall(
                RequestFeed(self._loaded.core, run.requests, run.lazily), run.consumer_of, advance
            )
            try:
                self._submit(partial(self._begin, call))
                self._wait(call.outcome)
            except BaseException as error:  # mostly Ctrl-C
                with contextlib.suppress(EngineError):  # the engine was closed, which has ended the call
                    self._ask(partial(self._end, call, error))
                raise

    def command(self, command: Command) -> None:
        self._ask(lambda: self._loaded.core.run_command(command))

    def stats(self) -> EngineStats:
        return self._ask(lambda: self._loaded.core.stats())

    def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        return self._ask(lambda: self._loaded.core.read_timeline(query))

    def record(self, enabled: bool) -> None:
        core = self._loaded.core
        if not self._always_records:
            self._ask(partial(core.record, max_bytes=MAX_RECORD_BYTES) if enabled else core.stop_recording)

    def close(self) -> None:
        if threading.current_thread() is self._thread:
            raise EngineError("the engine's thread cannot close the engine: it would wait for itself")
        if self.is_forked:
            return
        outcome: Outcome = SimpleQueue()
        if not self._is_closed:
            self._operations.put(partial(_answer, self._close, outcome))
            self._operations.put(None)
            self._is_closed = True
        self._thread.join()
        if not outcome.empty():  # else another thread has closed it
            _result_of(outcome.get())

    # ---- between threads ----

    def _ask(self, function: Callable[[], T]) -> T:
        """Run a function in the thread, between two steps, and return its result."""
        if threading.current_thread() is self._thread:  # a policy or a finalizer asks
            return function()
        outcome: Outcome = SimpleQueue()
        self._submit(partial(_answer, function, outcome))
        result: T = self._wait(outcome)
        return result

    def _submit(self, operation: Operation) -> None:
        if self.is_forked:
            raise forked()
        if self._is_closed:
            raise _closed()
        self._operations.put(operation)

    def _wait(self, outcome: Outcome) -> Any:
        """Return the result of what the thread does for a caller, or raise its error."""
        while True:
            try:
                result = outcome.get(timeout=NOTICE_SECONDS)
            except Empty:
                if not self._thread.is_alive() and outcome.empty():  # it ended before it got to this
                    raise _closed() from None
            else:
                return _result_of(result)

    # ---- in the thread ----

    def step(self) -> bool:
        """Run one step for all calls together. Return whether there is more to do."""
        core, calls = self._loaded.core, self._calls
        try:
            for call in calls[:]:
                if not call.feed.is_empty:
                    self._fill(call)
            self._deltas += core.step()
            self._deliver(core)
            for call in [call for call in calls if call.is_over]:
                self._end(call, None)
        except BaseException as error:
            self._fail(error)
        return bool(calls)

    def _begin(self, call: LocalCall) -> None:
        if not self._calls:
            self._pause.enter_context(paused_collection())  # in this thread, where Ctrl-C cannot come between
        self._calls.append(call)

    def _fill(self, call: LocalCall) -> None:
        num_added = len(call.feed.added)
        try:
            call.feed.fill()
        except BaseException as error:  # the caller's own requests are at fault
            self._end(call, error)
        else:
            for request_id in call.feed.added[num_added:]:
                self._consumers[request_id] = call, call.consumer_of(request_id)

    def _deliver(self, core: EngineCore) -> None:
        """Pass all deltas to their calls."""
        deltas, consumers = self._deltas, self._consumers
        for delta in deltas:  # grows: with an aborted request, a policy may let others leave
            consumer = consumers.get(delta.request_id)
            if consumer is None:  # its call was interrupted
                continue
            call, take = consumer
            if delta.finish_reason is not None:
                call.num_ended += 1
            try:
                if take(delta):
                    deltas += core.abort(delta.request_id, "stop")[1]
            except BaseException as error:
                self._end(call, error)
        for call in self._calls:
            if call.advance is not None:
                call.advance([delta for delta in deltas if self._is_of(call, delta)])
        deltas.clear()

    def _is_of(self, call: LocalCall, delta: Delta) -> bool:
        consumer = self._consumers.get(delta.request_id)
        return consumer is not None and consumer[0] is call

    def _end(self, call: LocalCall, error: BaseException | None) -> None:
        """Let a call return, or raise the error; nothing of it runs any more."""
        if call in self._calls:
            self._remove(call)
            if not self._calls:
                self._drain()
                self._pause.close()
            call.outcome.put((None, error))

    def _remove(self, call: LocalCall) -> None:
        self._calls.remove(call)
        for request_id in call.feed.added:
            self._consumers.pop(request_id, None)
            self._deltas += self._loaded.core.abort(request_id)[1]  # of other calls

    def _drain(self) -> None:
        """Collect the steps in flight, which compute nothing that anyone still waits for."""
        core = self._loaded.core
        while core.has_work:
            core.step()

    def _fail(self, error: BaseException) -> None:
        """End all calls with an error of the engine, and empty it, so that it can be used again."""
        calls = self._calls[:]
        try:
            for call in calls:
                self._remove(call)
            self._drain()
            # An interrupted step has not filled the blocks that it registered in the prefix cache.
            self._loaded.core.reset_prefix_cache()
        except Exception:
            logger.exception("the engine could not be emptied after an error")
        finally:
            self._calls.clear()
            self._pause.close()
            for call in calls:
                call.outcome.put((None, error))

    def _close(self) -> None:
        for call in self._calls[:]:
            self._end(call, EngineError("the LLM was closed while this call was running"))
        self._loaded.close()


def _serve(operations: SimpleQueue[Operation | None], engine: weakref.ref[LocalEngine]) -> None:
    """Run operations, and steps while there are calls."""
    is_busy = False
    while True:
        # While busy, only the operations that are here already: a flood must not keep the engine from stepping.
        for _ in range(operations.qsize() if is_busy else 1):
            operation = operations.get()
            if operation is None:
                return
            operation()
            del operation
        stepping = engine()
        is_busy = stepping is not None and stepping.step()
        del stepping


def forked() -> EngineError:
    return EngineError("this LLM was created before a fork: create it in the process that uses it")


def _end_thread(operations: SimpleQueue[Operation | None], thread: threading.Thread) -> None:
    operations.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _closed() -> EngineError:
    return EngineError("this LLM is closed")


def _answer(function: Callable[[], Any], outcome: Outcome) -> None:
    try:
        outcome.put((function(), None))
    except BaseException as error:
        outcome.put((None, error))


def _result_of(outcome: tuple[Any, BaseException | None]) -> Any:
    value, error = outcome
    if error is None:
        return value
    try:
        raise error
    finally:
        del error, outcome  # the traceback refers to this frame


class RequestFeed:
    """Adds requests to an engine, all at once or lazily.

    Lazily, only as many requests wait in the engine as fill its next step. The others are created while the device
    computes, and the first step waits only for its own.
    """

    def __init__(self, core: EngineCore, requests: Iterable[Request], lazily: bool) -> None:
        self._core = core
        self._requests = iter(requests)
        limits = core.scheduler.limits
        self._enough = limits.max_num_batched_tokens if lazily else sys.maxsize
        # A step has at most max_num_seqs requests, however short they are.
        self._least_cost = -(-limits.max_num_batched_tokens // limits.max_num_seqs)
        self._ends = [0]  # prefix sums of the tokens of all added requests
        self.added: list[str] = []  # request ids
        self.is_empty = False

    def fill(self) -> None:
        """Add the requests that the next step needs. Call it before every step."""
        while not self.is_empty and self._num_waiting_tokens() < self._enough:
            request = next(self._requests, None)
            if request is None:
                self.is_empty = True
            else:
                self._core.add(request)
                self.added.append(request.request_id)
                self._ends.append(self._ends[-1] + max(request.num_tokens, self._least_cost))

    def _num_waiting_tokens(self) -> int:
        """Return the tokens of the waiting requests, which are nearly always the latest, without the spare ones."""
        num_waiting = min(self._core.scheduler.pool.num_waiting, len(self.added))
        if num_waiting <= SPARE:
            return 0
        return self._ends[-1 - SPARE] - self._ends[-1 - num_waiting]


class ReplicatedEngine:
    """Implements `OfflineEngine`: several engines, each in its own process, behind a router in a thread."""

    def __init__(
        self, config: EngineConfig, options: RouterConfig, progress: Callable[[int, int], None] | None
    ) -> None:
        try:
            from inflight.router.start import start_router
        except ImportError as error:
            raise ConfigError(f"replicas need {error.name}: install inflight-llm[server]") from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="inflight-router", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = os.getpid()
        try:
            self._router = self._wait_for(start_router(config, options, progress=progress))
        except BaseException:
            self._end_thread()
            raise
        try:
            self.frontend = Frontend.from_config(config, self._router.facts, options.on_this_machine)
        except BaseException:
            self._wait_for(self._router.close())
            self._end_thread()
            raise

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the router's thread and return its result. An interrupt cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if threading.current_thread() is self._thread:
            work.close()
            raise EngineError("the router's thread cannot ask replicas: it would wait for itself")
        if self.is_forked:  # before the lock, which another thread may have had
            work.close()
            raise forked()
        with self._lock:
            if self._is_closed:
                work.close()
                raise _closed()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def description(self) -> str:
        return f"{len(self._router.replicas.members)} replicas: {self._router.facts.device}"

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._process

    def compute(self, run: OfflineRun, show: bool) -> None:
        with REQUEST_BARS.add(run.doing, run.num_requests, show) as advance:
            self._compute(list(run.requests), run.consumer_of, advance or (lambda _: None))

    def _compute(
        self, requests: list[Request], consumer_of: Callable[[str], Consumer], advance: Advance
    ) -> None:
        arrived: SimpleQueue[Delta | None] = SimpleQueue()  # None: end of the run
        running = self._submit(self._run(requests, arrived))
        running.add_done_callback(lambda _: arrived.put(None))
        try:
            while (delta := arrived.get()) is not None:
                if consumer_of(delta.request_id)(delta):
                    self._submit(self._router.abort(delta.request_id, "stop"))
                advance([delta])
            running.result()
        except BaseException:  # mostly Ctrl-C
            running.cancel()
            with contextlib.suppress(BaseException):  # wait until nothing of it runs any more
                self._wait_for(self._until_ended([request.request_id for request in requests]))
            raise

    async def _run(self, requests: list[Request], arrived: SimpleQueue[Delta | None]) -> None:
        async def run(request: Request) -> None:
            await self._router.add(request)
            async with contextlib.aclosing(self._router.stream(request.request_id)) as deltas:
                async for delta in deltas:
                    arrived.put(delta)

        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(run(request))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _until_ended(self, request_ids: Sequence[str]) -> None:
        while any(map(self._router.runs, request_ids)):
            await asyncio.sleep(0.01)

    def command(self, command: Command) -> None:
        self._wait_for(self._router.command(command))

    def stats(self) -> EngineStats:
        return self._wait_for(self._router.stats())

    def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        return self._wait_for(self._router.read_timeline(query))

    def record(self, enabled: bool) -> None:
        """Do nothing: engines in their own processes always record."""

    def close(self) -> None:
        if self.is_forked:
            return
        with self._lock:
            if self._is_closed:
                return
            closing = asyncio.run_coroutine_threadsafe(self._router.close(), self._loop)
            self._is_closed = True
        closing.result()
        self.frontend.close()
        self._end_thread()

    def _end_thread(self) -> None:
        # An interrupted start must stop its engines first.
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of this event loop and wait for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        if not task.cancelling():  # cancelling twice would interrupt its cleanup
            task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# ---- progress bars ----


@contextmanager
def loading_bar(model: str, show: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function that shows how much of a model is loaded, or None if nothing is to be shown."""
    if not (show and sys.stderr.isatty()):
        yield None
        return
    with _progress(
        TextColumn("loading {task.description}"), TextColumn("{task.percentage:>3.0f}%")
    ) as progress:
        task = progress.add_task(model, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class RequestBars:
    """The progress bars of running calls, one below the other: rich redraws all bars of one `Progress` together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._num_calls = 0

    @contextmanager
    def add(self, doing: str, total: int, show: bool) -> Iterator[Advance | None]:
        """Yield a function that takes the deltas of each step, or None if nothing is to be shown.

        The bar shows finished requests and tokens per second: output tokens, or prompt tokens if nothing is generated.
        """
        # While bars are shown, rich has replaced stderr by a file that is no terminal.
        if not show or (self._progress is None and not sys.stderr.isatty()):
            yield None
            return
        num_tokens, began = 0, time.monotonic()
        progress = self._join()
        task = progress.add_task(doing, total=total, speed="")

        def advance(deltas: Sequence[Delta]) -> None:
            nonlocal num_tokens
            num_tokens += sum(map(_num_tokens, deltas))
            elapsed = time.monotonic() - began
            speed = f"{num_tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""
            done = sum(delta.finish_reason is not None for delta in deltas)
            progress.update(task, advance=done, speed=speed)

        try:
            yield advance
        finally:
            self._leave(progress, task)

    def _join(self) -> Progress:
        with self._lock:
            if self._progress is None:
                label, speed = TextColumn("{task.description}"), TextColumn("{task.fields[speed]}")
                self._progress = _progress(label, MofNCompleteColumn(), speed)
                self._progress.start()
            self._num_calls += 1
            return self._progress

    def _leave(self, progress: Progress, task: TaskID) -> None:
        """Remove a bar. The last one stays on the screen."""
        with self._lock:
            self._num_calls -= 1
            if self._num_calls:
                progress.remove_task(task)
            else:
                progress.stop()
                self._progress = None


REQUEST_BARS = RequestBars()


def _progress(label: ProgressColumn, *figures: ProgressColumn) -> Progress:
    return Progress(label, BarColumn(), *figures, TimeElapsedColumn(), console=Console(stderr=True))


def _num_tokens(delta: Delta) -> int:
    if delta.vector is not None and delta.record is not None:
        return delta.record.num_prompt_tokens
    return len(delta.token_ids)
