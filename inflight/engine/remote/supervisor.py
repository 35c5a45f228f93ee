"""Keeps an engine process alive: starts it, follows its progress, restarts it within a limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from inflight.config import ProcessConfig
from inflight.engine.client import Health
from inflight.engine.remote.connected_process import EngineProcess
from inflight.engine.remote.host import ProcessHost, ProcessNotStartedError
from inflight.engine.remote.wire import (
    Failed,
    Heartbeat,
    Progress,
    Ready,
    Start,
    StepOutputs,
    Stopped,
    ToFront,
)
from inflight.errors import CheckpointChangedError, EngineDeadError, InflightError

logger = logging.getLogger(__name__)

LoadProgress = Callable[[int, int], None]  # bytes done, bytes in all

# Seconds before a second restart in a row, and how much longer each pause is than the one before, up to a limit:
# what is short for a moment (memory, descriptors, a folder) must not use up the restarts at once.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 1.0, 3.0, 30.0


@dataclass(frozen=True, slots=True)
class EngineStalled:
    """Calls will not be answered soon: the process makes no progress, or says nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The process is gone, and its requests with it."""

    reason: str


class Supervisor:
    """One engine process after the other. Whoever starts it reads `messages` as long as it lives."""

    def __init__(
        self,
        build: str,
        options: dict[str, Any],
        process: ProcessConfig,
        progress: LoadProgress | None,
        host: ProcessHost,
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
        self._host = host
        self._clock = time.monotonic
        self._error: str | None = None
        self._fingerprint: str | None = None  # of the checkpoint that the first process loaded
        self._is_planned = False  # the process was ended for a restart that somebody asked for
        self._restarted = asyncio.Event()  # the next process is ready, or none will come
        self._restarts: deque[float] = deque()  # when, within the window
        self._num_restarts = 0
        self._heard_at = self._progress_at = self._clock()

    async def launch(self) -> Ready:
        """Start a process and wait until its engine is ready. Raises what the engine could not do."""
        process = self.engine_process = EngineProcess(self._host, self._process.log_format)
        start = Start(self._build, self._options, self._process.heartbeat)
        greeting = asyncio.ensure_future(
            process.greet(lambda: msgspec.structs.replace(start, now=self._clock()))
        )
        try:
            ready = await self._wait_until_ready(process)
            self._check_fingerprint(ready)
        except BaseException:
            process.kill()
            await process.exited.wait()
            raise
        finally:
            greeting.cancel()
        # A new process must hold what this one held, whatever memory is free by then.
        self._options["num_blocks"] = ready.facts.num_blocks
        self.working = False
        self._heard_at = self._progress_at = self._clock()
        self.state, self._error = "running", None
        return ready

    async def _wait_until_ready(self, process: EngineProcess) -> Ready:
        """Return what the engine says when it is ready. An engine that reports no progress for too long is killed."""
        limit: float = self._options["start_timeout"]
        progress_at = self._clock()
        while not _is_over(process):
            message = await process.receive(self._process.heartbeat)
            match message:
                case Ready() as ready:
                    return ready
                case Progress(num_done, num_total) if self._progress is not None:
                    self._progress(num_done, num_total)
                case Failed(problem):
                    raise problem.error()
            if message is not None or process.is_waiting_for_room:
                progress_at = self._clock()
                continue
            process.take_frames()  # this process may have been too busy to listen
            if not process.unread and self._clock() - progress_at >= limit:
                raise EngineDeadError(
                    f"the {self._host.name} (process {process.process_id}) was killed: it made no progress for "
                    f"{limit:g} seconds while it was starting (start_timeout)"
                )
        if not process.was_started:
            raise ProcessNotStartedError(process.reason)
        raise EngineDeadError(f"{process.reason} while it was starting")

    def _check_fingerprint(self, ready: Ready) -> None:
        """Refuse an engine whose checkpoint is not the one that clients have the tokenizer of."""
        if self._fingerprint is None:
            self._fingerprint = ready.facts.fingerprint
        elif ready.facts.fingerprint != self._fingerprint:
            raise CheckpointChangedError("the checkpoint has changed since the server started")

    async def messages(self) -> AsyncGenerator[Ready | StepOutputs | EngineStalled | EngineEnded]:
        """What the running process says and how it does; then the same of the one that takes its place."""
        while True:
            async for message in self._follow(self.engine_process):
                yield message
            reason = self.engine_process.reason or "the engine process ended"
            logger.log(logging.INFO if self._is_planned else logging.ERROR, "%s", reason)
            self.state, self._error = "restarting", reason
            yield EngineEnded(reason)
            ready = None if self.closing else await self._restart()
            self._is_planned = False
            if ready is not None:
                yield ready
            self._restarted.set()
            if ready is None:
                return

    async def _follow(self, process: EngineProcess) -> AsyncGenerator[StepOutputs | EngineStalled]:
        """One process to its end, with an eye on its progress."""
        while not _is_over(process):
            message = await process.receive(self._process.heartbeat)
            if message is not None:
                self._heard_at = self._clock()
            match message:
                case StepOutputs():
                    self._progress_at = self._heard_at
                    yield message
                    continue
                case Heartbeat(since_step, working, num_dropped):
                    self._progress_at = self._heard_at - since_step
                    self.working, self.num_dropped = working, num_dropped
                case Stopped(text):
                    process.reason = text
            trouble = self.trouble()
            if trouble is not None:
                yield EngineStalled(trouble)
                if self._hangs():
                    process.kill(f"the engine was killed: {trouble}")

    def _hangs(self) -> bool:
        """Whether it has stalled or been silent for so long that it will not come back by itself."""
        now, limits = self._clock(), self._process
        return (
            limits.kill_silent_after is not None and now - self._heard_at >= limits.kill_silent_after
        ) or (
            self.working
            and limits.kill_stalled_after is not None
            and now - self._progress_at >= limits.kill_stalled_after
        )

    async def _restart(self) -> Ready | None:
        """The next process that is ready; None when the engine is given up. Whatever goes wrong is tried again."""
        began, pause, counts = self._clock(), 0.0, not self._is_planned
        while self._may_restart(began) or not counts:
            await asyncio.sleep(pause)
            pause = min(max(FIRST_PAUSE, PAUSE_GROWTH * pause), LONGEST_PAUSE)
            try:
                ready = await self.launch()
            except ProcessNotStartedError as error:  # no fault of the engine: this counts as no restart
                logger.error("%s; it is tried again in %g seconds", error, pause)
            except Exception as error:
                expected = isinstance(error, InflightError)
                self._error = f"the engine could not be restarted: {error}"
                logger.error("%s", self._error, exc_info=not expected)
                self._count_restart()
            else:
                logger.warning("the engine process was restarted")
                if counts:
                    self._count_restart()
                return ready
            counts = True
        self.state = "dead"
        logger.error("the engine is not restarted any more, after %d restarts", len(self._restarts))
        return None

    def _may_restart(self, began: float) -> bool:
        now, window = self._clock(), self._process.restart_window
        while self._restarts and self._restarts[0] <= now - window:
            self._restarts.popleft()
        return len(self._restarts) < self._process.max_restarts and now - began < window

    def _count_restart(self) -> None:
        self._restarts.append(self._clock())
        self._num_restarts += 1

    async def restart(self) -> None:
        """End the process and wait until the next one is ready. A start that fails is retried within the limits for a
        process that died, and raises EngineDeadError once they are used up. While the process is being restarted
        anyway, only wait."""
        if self.state in ("dead", "closed"):
            raise EngineDeadError(self.trouble())
        self._restarted.clear()
        if self.state == "running":
            self.state, self._error, self._is_planned = (
                "restarting",
                "the engine was ended for a restart",
                True,
            )
            self.engine_process.reason = self._error
            await self.engine_process.end()
        await self._restarted.wait()
        if self.health().state in ("restarting", "dead", "closed"):
            raise EngineDeadError(self.trouble())

    def give_up(self, reason: str) -> None:
        """Kill the process for good."""
        self.state, self._error = "dead", reason
        self._restarted.set()
        self.engine_process.kill(reason)

    async def close(self) -> None:
        """End the process. Nothing may read `messages` any more."""
        self.state, self._error = "closed", "the engine was closed"
        self._restarted.set()
        await self.engine_process.end()

    # ---- how it does ----

    def trouble(self) -> str | None:
        """Why nothing can be asked of the engine now."""
        if self.state == "restarting":
            return f"{self._error}; it is being restarted"
        if self.state != "running":
            return self._error or f"the engine is {self.state}"
        self.engine_process.take_frames()
        unread = self.engine_process.unread
        if any(
            map(self._tells_of_progress, unread)
        ):  # whoever was too busy to listen must not blame the engine
            return None
        now = self._clock()
        if self.working and now - self._progress_at >= self._process.stalled_after:
            return f"the engine has made no step for {now - self._progress_at:.0f} seconds"
        if not unread and now - self._heard_at >= self._process.silent_after:
            return f"the engine process has been silent for {now - self._heard_at:.0f} seconds"
        return None

    def _tells_of_progress(self, message: ToFront) -> bool:
        """A heartbeat alone does not: a loop that hangs has them too."""
        if not isinstance(message, Heartbeat):
            return True
        return not message.working or message.since_step < self._process.stalled_after

    def health(self) -> Health:
        trouble = self.trouble()
        state: Any = self.state
        if state == "running":
            state = "stalled" if trouble else "closing" if self.closing else "running"
        since = self._clock() - self._progress_at
        return Health(state == "running", since, trouble, state, self._num_restarts)


def _is_over(process: EngineProcess) -> bool:
    return process.exited.is_set() and not process.unread
