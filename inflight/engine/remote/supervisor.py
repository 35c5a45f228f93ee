"""Start an engine process, watch it, and restart it within limits."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from inflight.config import ProcessConfig
from inflight.engine.client import Health
from inflight.engine.remote import wire
from inflight.errors import CheckpointChangedError, EngineDeadError, InflightError
from inflight.processes.child import ChildHost, ProcessHost, ProcessNotStartedError, start_spare
from inflight.processes.connected_process import ConnectedProcess

logger = logging.getLogger(__name__)

LoadProgress = Callable[[int, int], None]  # bytes done, bytes in all

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.engine.remote.worker")

# Seconds before a second restart in a row, the factor by which each pause grows, and the longest pause: a short lack
# of memory or file descriptors must not use up all restarts.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 1.0, 3.0, 30.0


EngineProcess = ConnectedProcess[wire.FromEngine]


def engine_host(environment: Mapping[str, str], name: str = "engine process") -> ChildHost:
    """Return the host of an engine process that is a child of this one."""
    return ChildHost(name, COMMAND, environment)


def start_spare_engine(environment: Mapping[str, str]) -> None:
    """Start an engine process before it is needed. It imports torch and the loader meanwhile."""
    start_spare(engine_host(environment), "--preload")


@dataclass(frozen=True, slots=True)
class EngineStalled:
    """The process makes no progress or is silent, so calls will not be answered soon."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The process is gone, and its requests with it."""

    reason: str


class Supervisor:
    """Runs one engine process after another. Its owner must read `messages` for as long as it lives."""

    def __init__(
        self,
        build: str,
        options: dict[str, Any],
        process: ProcessConfig,
        progress: LoadProgress | None,
        host: ProcessHost,
        generations: Iterator[int] | None = None,
    ) -> None:
        self.engine_process: EngineProcess
        self._generations = itertools.count() if generations is None else generations
        self.state: Literal["starting", "running", "restarting", "dead", "closed"] = "starting"
        self.working = False  # the engine has requests, as far as we know
        self.closing = False
        self._build = build
        self._options = options
        self._process = process
        self._progress = progress
        self._host = host
        self._clock = time.monotonic
        self._error: str | None = None
        self._fingerprint: str | None = None  # of the checkpoint that the first process loaded
        self._is_planned = False  # the process was stopped by `restart`
        self._restarted = asyncio.Event()  # the next process is ready, or there will be none
        self._restarts: deque[float] = deque()  # when, within the window
        self._num_restarts = 0
        self._received_at = self._progress_at = self._clock()

    async def launch(self) -> wire.Ready:
        """Start a process and wait until its engine is ready. Raises the error that kept it from being built."""
        process = self.engine_process = ConnectedProcess(
            self._host, wire.FromEngine, self._process.log_format, wire.Heartbeat
        )
        start = wire.Start(
            self._build, self._options, self._process.heartbeat, generation=next(self._generations)
        )
        first_message = asyncio.ensure_future(
            process.send_first(lambda: msgspec.structs.replace(start, now=self._clock()))
        )
        try:
            ready = await self._wait_until_ready(process)
            self._check_fingerprint(ready)
        except BaseException:
            process.kill()
            await process.exited.wait()
            raise
        finally:
            first_message.cancel()
        # A restarted engine must have as many blocks as this one, however much memory is free by then.
        self._options["num_blocks"] = ready.facts.num_blocks
        self.working = False
        self._received_at = self._progress_at = self._clock()
        self.state, self._error = "running", None
        return ready

    async def _wait_until_ready(self, process: EngineProcess) -> wire.Ready:
        """Return the engine's `Ready` message. An engine that reports no progress for too long is killed."""
        limit: float = self._options["start_timeout"]
        progress_at = self._clock()
        while not _is_over(process):
            message = await process.receive(self._process.heartbeat)
            match message:
                case wire.Ready() as ready:
                    return ready
                case wire.Progress(num_done, num_total) if self._progress is not None:
                    self._progress(num_done, num_total)
                case wire.Failed(problem):
                    raise problem.error()
            if message is not None or process.is_waiting_for_machine:
                progress_at = self._clock()
                continue
            process.read_frames()  # this process may have been too busy to read
            if not process.unread and self._clock() - progress_at >= limit:
                raise EngineDeadError(
                    f"the {self._host.name} (process {process.process_id}) was killed: it made no progress for "
                    f"{limit:g} seconds while it was starting (start_timeout)"
                )
        if not process.was_started:
            raise ProcessNotStartedError(process.reason)
        raise EngineDeadError(f"{process.reason} while it was starting")

    def _check_fingerprint(self, ready: wire.Ready) -> None:
        """Reject an engine whose checkpoint is not the one whose tokenizer the clients use."""
        if self._fingerprint is None:
            self._fingerprint = ready.facts.fingerprint
        elif ready.facts.fingerprint != self._fingerprint:
            raise CheckpointChangedError("the checkpoint has changed since the server started")

    async def messages(self) -> AsyncGenerator[wire.Ready | wire.StepOutputs | EngineStalled | EngineEnded]:
        """Yield the outputs and the state of the running process, then those of the process that replaces it."""
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

    async def _follow(self, process: EngineProcess) -> AsyncGenerator[wire.StepOutputs | EngineStalled]:
        """Follow one process to its end, and kill it if it hangs."""
        while not _is_over(process):
            message = await process.receive(self._process.heartbeat)
            if message is not None:
                self._received_at = self._clock()
            match message:
                case wire.StepOutputs():
                    self._progress_at = self._received_at
                    yield message
                    continue
                case wire.Heartbeat(since_step, working):
                    self._progress_at = self._received_at - since_step
                    self.working = working
                case wire.Stopped(text):
                    process.reason = text
            trouble = self.trouble()
            if trouble is not None:
                yield EngineStalled(trouble)
                if self._hangs():
                    process.kill(f"the engine was killed: {trouble}")

    def _hangs(self) -> bool:
        """Return whether it has stalled or been silent for too long to recover by itself."""
        now, limits = self._clock(), self._process
        return (
            limits.kill_silent_after is not None and now - self._received_at >= limits.kill_silent_after
        ) or (
            self.working
            and limits.kill_stalled_after is not None
            and now - self._progress_at >= limits.kill_stalled_after
        )

    async def _restart(self) -> wire.Ready | None:
        """Start processes until one is ready. Returns None once the limit on restarts is reached."""
        began, pause, counts = self._clock(), 0.0, not self._is_planned
        while self._may_restart(began) or not counts:
            await asyncio.sleep(pause)
            pause = min(max(FIRST_PAUSE, PAUSE_GROWTH * pause), LONGEST_PAUSE)
            try:
                ready = await self.launch()
            except ProcessNotStartedError as error:
                # It is not the engine's fault, so it does not count as a restart.
                logger.error("%s; trying again in %g seconds", error, pause)
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
        logger.error("giving up on the engine after %d restarts", len(self._restarts))
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
                "the engine was stopped for a restart",
                True,
            )
            self.engine_process.reason = self._error
            await self.engine_process.end()
        await self._restarted.wait()
        if self.health().state in ("restarting", "dead", "closed"):
            raise EngineDeadError(self.trouble())

    def give_up(self, reason: str) -> None:
        """Kill the process and do not restart it."""
        self.state, self._error = "dead", reason
        self._restarted.set()
        self.engine_process.kill(reason)

    async def close(self) -> None:
        """Stop the process. `messages` must no longer be read."""
        self.state, self._error = "closed", "the engine was closed"
        self._restarted.set()
        await self.engine_process.end()

    # ---- health ----

    def trouble(self) -> str | None:
        """Return why the engine cannot be called now, or None."""
        if self.state == "restarting":
            return f"{self._error}; it is being restarted"
        if self.state != "running":
            return self._error or f"the engine is {self.state}"
        self.engine_process.read_frames()
        unread = self.engine_process.unread
        if any(map(self._shows_progress, unread)):  # this process was too busy to read
            return None
        now = self._clock()
        if self.working and now - self._progress_at >= self._process.stalled_after:
            return f"the engine has made no step for {now - self._progress_at:.0f} seconds"
        if not unread and now - self._received_at >= self._process.silent_after:
            return f"the engine process has been silent for {now - self._received_at:.0f} seconds"
        return None

    def _shows_progress(self, message: wire.FromEngine) -> bool:
        """Return whether a message shows progress. A heartbeat alone does not: a hanging loop sends them too."""
        if not isinstance(message, wire.Heartbeat):
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
