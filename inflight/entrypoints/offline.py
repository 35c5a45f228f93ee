"""Offline runs: all requests of a blocking call, on one engine in this process or on several replicas."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from inflight.config import EngineConfig, RouterConfig
from inflight.engine import Command, EngineCore, EngineStats, StepObserver
from inflight.errors import ConfigError
from inflight.events import Delta
from inflight.frontend import Frontend
from inflight.request import Request
from inflight.timeline import TimelinePage, TimelineQuery

if TYPE_CHECKING:
    from inflight.loading import LoadedEngine

# Extra waiting requests beyond those that fill a step, so that the policy can find one that fits the rest of it.
SPARE = 16
Advance = Callable[[Sequence[Delta]], None]
T = TypeVar("T")


MAX_RECORD_BYTES = 1 << 30  # of a recording, in memory


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """Requests that are run to their end."""

    requests: Iterable[Request]
    num_requests: int
    take: Callable[[Delta], bool]  # called with every delta; True aborts its request
    doing: str  # label of the progress bar
    lazily: bool = False  # make requests as steps need them


class OfflineEngine(Protocol):
    """The engine behind `LLM`: one that it steps itself, or several behind a router."""

    @property
    def frontend(self) -> Frontend: ...

    @property
    def description(self) -> str:
        """The device, for the user."""

    def compute(self, run: OfflineRun, show: bool) -> None:
        """Run all requests, with a progress bar if `show`. After an exception, none of them is left running."""

    def command(self, command: Command) -> None: ...

    def stats(self) -> EngineStats: ...

    def read_timeline(self, query: TimelineQuery) -> TimelinePage: ...

    def observe(self, observer: StepObserver) -> None: ...

    def unobserve(self, observer: StepObserver) -> None: ...

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


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the yielded function is called, or to the end of the block. A second Ctrl-C acts at once.

    Only the main thread receives signals; in other threads this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            held.clear()
            handler(number, frame)
        else:
            held.append(frame)

    def release() -> None:
        if held:
            handler(signal.SIGINT, held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, handler)
    release()


class LocalEngine:
    """Implements `OfflineEngine`."""

    def __init__(self, loaded: LoadedEngine, record: bool = False) -> None:
        self._loaded = loaded  # its core may be replaced
        if record:
            loaded.core.record(max_bytes=MAX_RECORD_BYTES)

    @property
    def frontend(self) -> Frontend:
        return self._loaded

    @property
    def description(self) -> str:
        return self._loaded.platform.describe()

    def compute(self, run: OfflineRun, show: bool) -> None:
        core = self._loaded.core
        feed = RequestFeed(core, run.requests, run.lazily)
        with paused_collection(), held_interrupts() as allow_interrupt:
            try:
                feed.fill()
                with request_bar(run.doing, run.num_requests, show) as advance:
                    while core.has_work or not feed.is_empty:
                        allow_interrupt()  # between steps the state is consistent
                        feed.fill()
                        deltas = core.step()
                        for delta in deltas:
                            if run.take(delta):
                                deltas += core.abort(delta.request_id, "stop")[1]
                        advance(deltas)
            except BaseException:  # mostly Ctrl-C
                self._clear(feed.added)
                raise

    def _clear(self, request_ids: Iterable[str]) -> None:
        """Empty the engine after an interrupted run, so that it can be used again."""
        core = self._loaded.core
        for request_id in request_ids:
            core.abort(request_id)
        while core.has_work:  # steps in flight
            core.step()
        # An interrupted step has not filled the blocks that it registered in the prefix cache.
        core.scheduler.blocks.drop_cache()

    def command(self, command: Command) -> None:
        self._loaded.core.run_command(command)

    def stats(self) -> EngineStats:
        return self._loaded.core.stats()

    def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        return self._loaded.core.read_timeline(query)

    def observe(self, observer: StepObserver) -> None:
        self._loaded.core.observers.append(observer)

    def unobserve(self, observer: StepObserver) -> None:
        self._loaded.core.observers.remove(observer)

    def close(self) -> None:
        self._loaded.close()


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
            from inflight.router import start_router
        except ImportError as error:
            raise ConfigError(f"replicas need {error.name}: install inflight-llm[server]") from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="inflight-router", daemon=True)
        self._thread.start()
        self._stops: dict[StepObserver, Callable[[], None]] = {}
        try:
            self._router = self._wait_for(start_router(config, options, progress=progress))
        except BaseException:
            self._end_thread()
            raise
        try:
            self.frontend = Frontend.of(config, self._router.facts, options.on_this_machine)
        except BaseException:
            self._wait_for(self._router.close())
            self._end_thread()
            raise

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the router's thread and return its result. An interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def description(self) -> str:
        return f"{len(self._router.replicas.members)} replicas: {self._router.facts.device}"

    def compute(self, run: OfflineRun, show: bool) -> None:
        with request_bar(run.doing, run.num_requests, show) as advance:
            self._compute(list(run.requests), run.take, advance)

    def _compute(self, requests: list[Request], take: Callable[[Delta], bool], advance: Advance) -> None:
        arrived: SimpleQueue[Delta | None] = SimpleQueue()  # None: end of the run
        running = asyncio.run_coroutine_threadsafe(self._run(requests, arrived), self._loop)
        running.add_done_callback(lambda _: arrived.put(None))
        try:
            while (delta := arrived.get()) is not None:
                if take(delta):
                    asyncio.run_coroutine_threadsafe(self._router.abort(delta.request_id, "stop"), self._loop)
                advance([delta])
            running.result()
        except BaseException:  # mostly Ctrl-C
            running.cancel()
            with contextlib.suppress(BaseException):  # wait until nothing runs any more
                self._wait_for(self._until_idle())
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

    async def _until_idle(self) -> None:
        while self._router.is_busy:
            await asyncio.sleep(0.01)

    def command(self, command: Command) -> None:
        self._wait_for(self._router.command(command))

    def stats(self) -> EngineStats:
        return self._wait_for(self._router.stats())

    def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        return self._wait_for(self._router.read_timeline(query))

    def observe(self, observer: StepObserver) -> None:
        """Call `observer` for every step, in the router's thread."""

        async def watch() -> None:
            self._stops[observer] = self._router.watch(observer)

        self._wait_for(watch())

    def unobserve(self, observer: StepObserver) -> None:
        stop = self._stops.pop(observer)

        async def unwatch() -> None:
            stop()

        self._wait_for(unwatch())

    def close(self) -> None:
        self._wait_for(self._router.close())
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


@contextmanager
def request_bar(doing: str, total: int, show: bool) -> Iterator[Advance]:
    """Yield a function that takes the deltas of each step. `doing` is the label of the bar.

    It shows finished requests and tokens per second: output tokens, or prompt tokens if nothing is generated.
    """
    if not (show and sys.stderr.isatty()):
        yield lambda _: None
        return
    num_tokens = 0
    with _progress(TextColumn(doing), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")) as progress:
        task = progress.add_task("", total=total, speed="")

        def advance(deltas: Sequence[Delta]) -> None:
            nonlocal num_tokens
            num_tokens += sum(map(_num_tokens, deltas))
            elapsed = progress.tasks[0].elapsed or 0.0
            speed = f"{num_tokens / elapsed:,.0f} tokens/s" if elapsed > 0 else ""
            done = sum(delta.finish_reason is not None for delta in deltas)
            progress.update(task, advance=done, speed=speed)

        yield advance


def _progress(label: ProgressColumn, *figures: ProgressColumn) -> Progress:
    return Progress(label, BarColumn(), *figures, TimeElapsedColumn(), console=Console(stderr=True))


def _num_tokens(delta: Delta) -> int:
    if delta.vector is not None and delta.record is not None:
        return delta.record.num_prompt_tokens
    return len(delta.token_ids)
