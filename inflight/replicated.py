"""A router for callers who wait: its event loop runs in a thread, and deltas are taken in the caller's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

from inflight.config import EngineConfig
from inflight.engine import Command, EngineStats, StepObserver
from inflight.errors import ConfigError
from inflight.events import Delta
from inflight.frontend import Frontend
from inflight.offline import OfflineRun
from inflight.process_config import RouterConfig
from inflight.progress_bars import Advance, request_bar
from inflight.request import Request

T = TypeVar("T")


class ReplicatedEngine:
    """Implements `OfflineEngine`: several engines, each in a process of its own, and the text side before them."""

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
        """What it gives, in the router's thread. An interrupt cancels it."""
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
        arrived: SimpleQueue[Delta | None] = SimpleQueue()  # None: that was all
        running = asyncio.run_coroutine_threadsafe(self._run(requests, arrived), self._loop)
        running.add_done_callback(lambda _: arrived.put(None))
        try:
            while (delta := arrived.get()) is not None:
                if take(delta):
                    asyncio.run_coroutine_threadsafe(self._router.abort(delta.request_id, "stop"), self._loop)
                advance([delta])
            running.result()
        except BaseException:  # Ctrl-C above all
            running.cancel()
            with contextlib.suppress(BaseException):  # until nothing of it runs any more
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

    def observe(self, observer: StepObserver) -> None:
        """Called in the router's thread."""

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
        # A start that was interrupted has engines to end first.
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """All other tasks of this event loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        if not task.cancelling():  # twice would break off what it does to end
            task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
