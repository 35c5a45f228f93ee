"""Keeps an engine process alive: starts it, follows its progress, restarts it within a limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from inflight.config import ProcessConfig
from inflight.engine.client import Health, ModelFacts
from inflight.engine.core import EngineStats
from inflight.engine.engine_process import EngineProcess
from inflight.engine.wire import Failed, Heartbeat, Progress, Ready, Start, StepOutputs, Stopped, ToFront
from inflight.errors import EngineDeadError, InflightError

logger = logging.getLogger(__name__)

LoadProgress = Callable[[int, int], None]  # bytes done, bytes in all

FIRST_PAUSE = 0.5  # seconds before a second restart in a row; then twice as long each time


class Supervisor:
    """One engine process after the other.

    Tells its owner of news (`on_outputs`), of every new process that is ready (`on_ready`), and why calls will not be
    answered (`on_trouble`, with whether all requests are lost too).
    """

    def __init__(
        self,
        build: str,
        options: dict[str, Any],
        process: ProcessConfig,
        progress: LoadProgress | None,
        on_outputs: Callable[[StepOutputs], None],
        on_ready: Callable[[ModelFacts, EngineStats], None],
        on_trouble: Callable[[str, bool], None],
    ) -> None:
        self.engine_process: EngineProcess
        self.state: Literal["starting", "running", "restarting", "dead", "closed"] = "starting"
        self.num_dropped = 0  # frames that the process could not read
        self.working = False  # whether the engine has requests, as far as is known
        self.closing = False
        self._build = build
        self._options = options
        self._process = process
        self._progress = progress
        self._on_outputs = on_outputs
        self._on_ready = on_ready
        self._on_trouble = on_trouble
        self._clock = time.monotonic
        self._error: str | None = None
        self._ready: asyncio.Future[Ready]
        self._task: asyncio.Task[None] | None = None
        self._restarts: deque[float] = deque()  # when, within the window
        self._num_restarts = 0
        self._heard_at = self._progress_at = self._clock()

    async def start(self) -> None:
        await self._launch()
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def close(self) -> None:
        self.closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.state, self._error = "closed", "the engine was closed"
        self._on_trouble(self._error, True)
        await self.engine_process.end()

    # ---- the life of a process ----

    async def _launch(self) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        engine_process = self.engine_process = EngineProcess(self._receive, self._process.log_format)
        greeting = asyncio.ensure_future(
            engine_process.greet(Start(self._build, self._options, self._process.heartbeat))
        )
        dying = asyncio.ensure_future(engine_process.exited.wait())
        try:
            await asyncio.wait((self._ready, dying), return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                raise EngineDeadError(f"{engine_process.reason} while it was starting")
            ready = self._ready.result()
        except BaseException:
            engine_process.kill()
            await engine_process.exited.wait()
            raise
        finally:
            greeting.cancel()
            dying.cancel()
        # A new process must hold what this one held, whatever memory is free by then.
        self._options["num_blocks"] = ready.facts.num_blocks
        self.working = False
        self._heard_at = self._progress_at = self._clock()
        self.state, self._error = "running", None
        self._on_ready(ready.facts, ready.stats)

    async def _supervise(self) -> None:
        while True:
            await self._watch_child()
            reason = self.engine_process.reason or "the engine process ended"
            logger.error("%s", reason)
            self.state, self._error = "restarting", reason
            self._on_trouble(reason, True)
            if self.closing or not await self._restart():
                return

    async def _restart(self) -> bool:
        pause = 0.0
        while self._may_restart():
            await asyncio.sleep(pause)
            pause = max(FIRST_PAUSE, 2 * pause)
            try:
                await self._launch()
            except InflightError as error:
                logger.error("the engine could not be restarted: %s", error)
            else:
                logger.warning("the engine process was restarted")
                return True
        self.state = "dead"
        logger.error("the engine is not restarted any more: %d times were enough", len(self._restarts))
        return False

    def _may_restart(self) -> bool:
        now = self._clock()
        while self._restarts and self._restarts[0] <= now - self._process.restart_window:
            self._restarts.popleft()
        if len(self._restarts) >= self._process.max_restarts:
            return False
        self._restarts.append(now)
        self._num_restarts += 1
        return True

    async def _watch_child(self) -> None:
        """Wait for the end of the process, with an eye on its progress."""
        engine_process, limit = self.engine_process, self._process.kill_stalled_after
        while not engine_process.exited.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._process.heartbeat):
                    await engine_process.exited.wait()
            trouble = self.trouble()
            if trouble is not None:
                self._on_trouble(trouble, False)
                if limit is not None and self._clock() - min(self._progress_at, self._heard_at) >= limit:
                    engine_process.kill(f"the engine was killed: {trouble}")

    # ---- what it says ----

    def _receive(self, message: ToFront) -> None:
        self._heard_at = self._clock()
        match message:
            case StepOutputs():
                self._progress_at = self._heard_at
                self._on_outputs(message)
            case Heartbeat(since_step, working, num_dropped):
                self._progress_at = self._heard_at - since_step
                self.working, self.num_dropped = working, num_dropped
            case Progress(num_done, num_total):
                if self._progress is not None:
                    self._progress(num_done, num_total)
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case Failed(problem):
                if not self._ready.done():
                    self._ready.set_exception(problem.error())
            case Stopped(text):
                self.engine_process.reason = text

    # ---- how it does ----

    def trouble(self) -> str | None:
        """Why nothing can be asked of the engine now."""
        if self.state == "restarting":
            return f"{self._error}; it is being restarted"
        if self.state != "running":
            return self._error or f"the engine is {self.state}"
        self.engine_process.take_frames()  # whoever was too busy to listen must not blame the engine
        now = self._clock()
        if self.working and now - self._progress_at >= self._process.stalled_after:
            return f"the engine has made no step for {now - self._progress_at:.0f} seconds"
        if now - self._heard_at >= self._process.silent_after:
            return f"the engine process has been silent for {now - self._heard_at:.0f} seconds"
        return None

    def health(self) -> Health:
        trouble = self.trouble()
        state: Any = self.state
        if state == "running":
            state = "stalled" if trouble else "closing" if self.closing else "running"
        since = self._clock() - self._progress_at
        return Health(state == "running", since, trouble, state, self._num_restarts)
