"""A client of an engine in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from inflight.engine.client import (
    CacheObserver,
    Command,
    DeltaQueue,
    DeltaStream,
    Health,
    History,
    MemoryState,
    ModelFacts,
    RequestState,
    TimelineObserver,
    check_only_replica,
    id_in_use,
    not_added,
    wait_while,
)
from inflight.engine.core import EngineCore
from inflight.engine.stats import EngineStats
from inflight.errors import EngineDeadError, EngineError
from inflight.events import Delta
from inflight.kv.prefix_cache import CacheChanges
from inflight.request import Request
from inflight.timeline.chunks import TimelinePage, TimelineQuery

logger = logging.getLogger(__name__)
T = TypeVar("T")

STALLED_AFTER = 60.0  # seconds without a step, with work to do, before the engine counts as unhealthy
CHECK_EVERY = 1.0  # seconds between checks of the device while the engine is idle
MIN_WAIT = 0.001


class InprocClient:
    """Implements `EngineClient`. The thread owns the core: every operation is a call that it runs between steps.

    A client is used by one event loop. All deltas of a step cross to it in a single callback.
    """

    def __init__(self, core: EngineCore, facts: ModelFacts) -> None:
        self.facts = facts
        self._core = core
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queues: dict[str, DeltaQueue] = {}  # by request id, until the stream ends
        self._adding: set[str] = set()  # request ids that the engine's thread has not added yet
        self._cache_changes: CacheChanges | None = None  # None unless they are observed
        self._cache_observer: CacheObserver | None = None
        self._timeline_observers: list[TimelineObserver] = []
        self._history = History()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: str | None = None
        self._last_progress = core.clock()
        core.record()
        self._thread = threading.Thread(target=self._run, name="inflight-engine", daemon=True)
        self._thread.start()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while self._take_calls():
                deltas = self._core.step()
                self._last_progress = self._core.clock()
                if self._cache_changes:
                    self._report_cache_changes()
                if deltas:
                    self._publish(deltas)
                if self._core.recorder.is_watched:
                    self._publish_timeline()
        except Exception as error:
            logger.exception("the engine loop stopped")
            self._stop(f"the engine stopped: {type(error).__name__}: {error}")
        else:
            self._stop("the engine was closed")

    def _take_calls(self) -> bool:
        """Run the pending calls, and those that arrive while the next step can wait; while idle, wait for calls.

        Return False to stop.
        """
        num_left = self._calls.qsize()  # only these: a flood of calls must not keep the engine from stepping
        while True:
            idle = num_left > 0 or not self._core.has_work
            until_due = self._core.recorder.seconds_until_due(self._core.clock())
            wait = min(CHECK_EVERY, until_due + MIN_WAIT) if idle else self._core.schedule_delay()
            if wait == 0:
                return True
            try:
                call = self._calls.get(timeout=wait)
            except Empty:
                if not idle:
                    return True
                self._core.check()
                self._publish_timeline()
                continue
            num_left -= 1
            if call is None:
                return False
            self._last_progress = self._core.clock()
            try:
                call()
            except Exception:  # calls with a waiting caller report to it themselves
                logger.exception("a call in the engine thread failed")

    def _stop(self, reason: str) -> None:
        self._error = reason
        self._post(self._end_streams)
        self._fail_calls()

    def _fail_calls(self) -> None:
        """Fail calls that arrive after the engine stopped."""
        with contextlib.suppress(Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call()

    def _publish(self, deltas: list[Delta]) -> None:
        self._post(lambda: self._deliver(deltas))

    def _publish_timeline(self) -> None:
        data = self._core.take_timeline()
        if data is not None:
            self._post(lambda: self._show_timeline(data))

    def _post(self, callback: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(callback)

    # ---- the event loop ----

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.record is not None:
                self._history.add(delta.record)
            queue = self._queues.get(delta.request_id)
            if queue is not None:
                queue.put(delta)

    def _end_streams(self) -> None:
        for queue in self._queues.values():
            queue.fail(EngineDeadError(self._error))

    async def _run_in_thread(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine's thread, between two steps."""
        loop = self._loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(set_outcome: Callable[[], None]) -> None:
            self._post(lambda: None if result.done() else set_outcome())

        def call() -> None:
            try:
                if self._error is not None:
                    raise EngineDeadError(self._error)
                settle(partial(result.set_result, function()))
            except Exception as error:
                settle(partial(result.set_exception, error))

        if self._error is not None:
            raise EngineDeadError(self._error)
        self._calls.put(call)
        if self._error is not None:  # the thread may have ended just before the call was queued
            self._fail_calls()
        return await result

    async def add(self, request: Request) -> None:
        if self._closing:
            raise EngineDeadError(self._error or "the engine is closing")
        request_id = request.request_id
        if request_id in self._queues or request_id in self._adding:
            raise id_in_use(request_id)
        queue = DeltaQueue()

        def add() -> None:
            self._core.add(request)
            # Not earlier: deltas of a previous request with this id may still be on their way.
            self._post(lambda: self._queues.__setitem__(request_id, queue))

        self._adding.add(request_id)
        try:
            await self._run_in_thread(add)
        except asyncio.CancelledError:
            self._abandon(request_id)  # it may already have been added, or may still be
            raise
        finally:
            self._adding.discard(request_id)

    def _abort(self, request_id: str, reason: str = "abort") -> int:
        num_freed, deltas = self._core.abort(request_id, reason)
        self._publish(deltas)
        return num_freed

    def _abandon(self, request_id: str) -> None:
        """Abort a request without waiting for the result."""

        def call() -> None:
            if self._error is None:
                self._abort(request_id)
            self._post(lambda: self._queues.pop(request_id, None))

        self._calls.put(call)

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        queue = self._queues.get(request_id)
        if queue is None:
            raise not_added(request_id)

        def leave(running: bool) -> None:
            if self._queues.get(request_id) is queue:
                del self._queues[request_id]
                if running:
                    self._abandon(request_id)

        return DeltaStream(queue.take, leave)

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        return await self._run_in_thread(lambda: self._abort(request_id, reason))

    async def stats(self) -> EngineStats:
        return await self._run_in_thread(self._core.stats)

    async def health(self) -> Health:
        since = self._core.clock() - self._last_progress
        working = self._core.has_work
        if self._error is not None:
            return Health(False, since, self._error, "closed" if self._closing else "dead")
        if working and since >= STALLED_AFTER:
            return Health(False, since, f"no step for {since:.0f} seconds", "stalled")
        return Health(not self._closing, since, state="closing" if self._closing else "running")

    async def describe(self, request_id: str) -> RequestState | None:
        state = await self._run_in_thread(lambda: self._core.describe(request_id))
        return self._history.get(request_id) if state is None else self._history.complete(state)

    async def command(self, command: Command) -> None:
        def run_command() -> None:
            self._core.run_command(command)
            self._report_cache_changes()

        await self._run_in_thread(run_command)

    def _show_timeline(self, data: bytes) -> None:
        for observer in self._timeline_observers[:]:
            observer("0", data)

    def watch_timeline(self, observer: TimelineObserver) -> Callable[[], None]:
        self._loop = asyncio.get_running_loop()

        def update() -> None:
            is_watched = bool(self._timeline_observers)
            self._calls.put(lambda: self._core.recorder.watch(is_watched))

        def stop() -> None:
            self._timeline_observers.remove(observer)
            update()

        self._timeline_observers.append(observer)
        update()
        return stop

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        return await self._run_in_thread(lambda: self._core.read_timeline(query))

    async def read_memory(self, replica: str) -> MemoryState:
        check_only_replica(replica)
        return await self._run_in_thread(self._core.read_memory)

    def watch_cache(self, observer: CacheObserver) -> None:
        self._loop = asyncio.get_running_loop()
        self._cache_observer = observer

        def call() -> None:
            self._cache_changes = CacheChanges()
            self._core.watch_cache(self._cache_changes)
            self._report_cache_changes()

        self._calls.put(call)

    def _report_cache_changes(self) -> None:
        """Report changes to the observer. Runs in the engine's thread."""
        update = None if self._cache_changes is None else self._cache_changes.take()
        observer = self._cache_observer
        if update is not None and observer is not None:
            self._post(lambda: observer(update))

    async def restart(self) -> None:
        raise EngineError("an engine in the same process cannot be restarted")

    async def close(self, drain: float = 0.0) -> None:
        self._closing = True
        await wait_while(lambda: self._core.has_work and self._error is None, drain)
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)
        self._core.close()
