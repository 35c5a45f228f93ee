"""An engine in a process of its own, watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from inflight.config import EngineConfig, ProcessConfig
from inflight.engine.client import CacheObserver, Health, ModelFacts, RequestState
from inflight.engine.delta_queue import DeltaQueue, DeltaStream
from inflight.engine.history import History
from inflight.engine.remote.child_process import ChildHost
from inflight.engine.remote.host import ProcessHost
from inflight.engine.remote.link import EngineLink
from inflight.engine.remote.supervisor import EngineEnded, EngineStalled, LoadProgress, Supervisor
from inflight.engine.remote.wire import (
    Abort,
    Ack,
    Describe,
    Message,
    Ready,
    Reply,
    StepOutputs,
    Tell,
    Watch,
    WatchCache,
    encode_add,
)
from inflight.engine.sleep import Command
from inflight.engine.stats import EngineStats
from inflight.engine.step_records import StepObserver, notify
from inflight.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from inflight.events import Delta, RequestRecord, StepRecord
from inflight.request import Request

logger = logging.getLogger(__name__)

ACK_EVERY = 16  # StepOutputs; a fraction of the engine's window
DRAIN_POLL = 0.02


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """A request of this client."""

    handle: int
    record: RequestRecord  # as far as this side knows it
    queue: DeltaQueue = field(default_factory=DeltaQueue)


class ProcessClient:
    """Implements `EngineClient`. Used in the event loop that started it.

    When the process dies, every open stream and call ends with EngineDeadError; a new process takes its place,
    and until it is ready requests are refused with the same error.
    """

    def __init__(self, link: EngineLink) -> None:
        self.facts: ModelFacts  # of the model, once started
        self._stats: EngineStats
        self._link = link
        self._reading: asyncio.Task[None]
        self._clock = time.monotonic
        self._numbers = itertools.count(1)
        self._requests: dict[str, _OpenRequest] = {}  # by request id, until their stream has ended
        self._open: dict[int, _OpenRequest] = {}  # by handle, until the engine has ended them
        self._calls = OpenCalls()
        self._history = History()
        self._observers: list[StepObserver] = []
        self._cache_observer: CacheObserver | None = None
        self._num_received = 0

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        process: ProcessConfig | None = None,
        progress: LoadProgress | None = None,
        build: str = "model",
        host: ProcessHost | None = None,
    ) -> ProcessClient:
        """Start the process and wait until its engine is ready. What the engine cannot do with its configuration
        is raised as if it had been built here. `build` is "model", or `module:function` for another engine. Without
        a `host`, the process is a child of this one."""
        process = process or ProcessConfig()
        host = host or ChildHost(process.environment)
        supervisor = Supervisor(build, _travelling(config), process, progress, host)
        ready = await supervisor.launch()
        return cls.over(supervisor, ready)

    @classmethod
    def over(cls, link: EngineLink, ready: Ready) -> ProcessClient:
        """Of an engine that is there already."""
        client = cls(link)
        client._begin(ready.facts, ready.stats)
        client._reading = asyncio.get_running_loop().create_task(client._read())
        return client

    @property
    def process_id(self) -> int | None:
        return self._link.engine_process.process_id

    @property
    def num_dropped_frames(self) -> int:
        """Frames that one side could not read."""
        return self._link.engine_process.codec.num_dropped + self._link.num_dropped

    # ---- what comes from the engine ----

    async def _read(self) -> None:
        try:
            async for message in self._link.messages():
                match message:
                    case StepOutputs():
                        self._deliver(message)
                    case EngineStalled(reason):
                        self._calls.end(reason)
                    case EngineEnded(reason):
                        self._end_all(reason)
                    case Ready(facts, stats):
                        self._begin(facts, stats)
        except Exception as error:  # a mistake of ours: whoever waits for the engine must not wait for ever
            logger.exception("no one reads what the engine says any more")
            self._link.give_up(f"its messages could not be read: {type(error).__name__}: {error}")
            self._end_all("the engine's messages could not be read")

    def _begin(self, facts: ModelFacts, stats: EngineStats) -> None:
        """A process is ready, the first or a later one."""
        self.facts, self._stats = facts, stats
        self._num_received = 0
        if self._observers:
            self._send(Watch(True))
        if self._cache_observer is not None:
            self._send(WatchCache(True))

    def _end_all(self, reason: str) -> None:
        """The process is gone, and its requests with it."""
        for opened in self._open.values():
            opened.record.finish_reason, opened.record.finished_at = "error", self._clock()
            self._history.add(opened.record)
            opened.queue.fail(EngineDeadError(reason))
        self._open.clear()
        self._calls.end(reason)

    def _deliver(self, outputs: StepOutputs) -> None:
        if outputs.cache is not None and self._cache_observer is not None:
            self._cache_observer(outputs.cache)
        for handle, token_id in zip(outputs.handles, outputs.token_ids, strict=False):
            opened = self._open.get(handle)
            if opened is not None:
                opened.queue.put(Delta(opened.record.request_id, [token_id]))
        for handle, delta in outputs.deltas:
            opened = self._open.get(handle)
            if opened is None:
                continue
            if delta.finish_reason is not None:
                del self._open[handle]
                self._history.add(delta.record or opened.record)
            opened.queue.put(delta)
        for handle, problem in outputs.lost:
            opened = self._open.pop(handle, None)
            if opened is not None:
                opened.queue.fail(problem.error())
        for reply in outputs.replies:
            if reply.remote_error is not None:  # refused: it never was there
                self._open.pop(reply.call, None)
            self._calls.answer(reply)
        if outputs.stats is not None:
            self._stats = outputs.stats
        for record in outputs.steps:
            self._observe(record)
        self._link.working = bool(self._open)
        self._num_received += 1
        if self._num_received % ACK_EVERY == 0:
            self._send(Ack(self._num_received))

    def _observe(self, record: StepRecord) -> None:
        if self._observers:
            notify(self._observers, record)
            if not self._observers:
                self._send(Watch(False))

    # ---- what it is asked ----

    def _send(self, message: Message) -> None:
        self._link.engine_process.send(message)

    async def _ask(self, call: int, send: Callable[[], None]) -> Reply:
        trouble = self._link.trouble()
        if trouble is not None:
            raise EngineDeadError(trouble)
        return await self._calls.ask(call, send)

    async def add(self, request: Request) -> None:
        if self._link.closing:
            raise EngineDeadError(self._link.trouble() or "the engine is closing")
        if request.request_id in self._requests:
            raise RequestError(
                f"request id {request.request_id!r} is already in use",
                param="request_id",
                code="request_id_in_use",
            )
        handle = next(self._numbers)
        request.record.arrived_at = self._clock()
        opened = _OpenRequest(handle, request.record)

        def send() -> None:
            engine_process = self._link.engine_process
            engine_process.send_frame(encode_add(engine_process.codec, handle, request))
            self._open[handle] = self._requests[request.request_id] = opened

        try:
            await self._ask(handle, send)
        except BaseException:
            if self._requests.get(request.request_id) is opened:
                del self._requests[request.request_id]
            self._abandon(opened)
            raise

    def _abandon(self, opened: _OpenRequest) -> None:
        """Abort without waiting for it."""
        if opened.handle in self._open:
            self._send(Abort(None, opened.handle, "abort"))

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        opened = self._requests.get(request_id)
        if opened is None:
            raise RequestError(
                f"there is no request {request_id!r} to stream: add it first",
                param="request_id",
                code="request_not_found",
            )

        def leave(running: bool) -> None:
            if self._requests.get(request_id) is opened:
                del self._requests[request_id]
                if running:
                    self._abandon(opened)

        return DeltaStream(opened.queue, leave)

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        opened = self._requests.get(request_id)
        if opened is None or opened.handle not in self._open:
            return 0
        call = next(self._numbers)
        try:
            reply = await self._ask(call, lambda: self._send(Abort(call, opened.handle, reason)))
        except EngineDeadError:
            if opened.handle in self._open:
                raise
            return 0  # it ended with its process
        return reply.num_freed

    async def describe(self, request_id: str) -> RequestState | None:
        opened = self._requests.get(request_id)
        if opened is not None and opened.handle in self._open:
            call = next(self._numbers)
            reply = await self._ask(call, lambda: self._send(Describe(call, opened.handle)))
            if reply.state is not None:
                return self._history.complete(reply.state)
        return self._history.get(request_id)

    async def command(self, command: Command) -> None:
        call = next(self._numbers)
        await self._ask(call, lambda: self._send(Tell(call, command)))

    def watch(self, observer: StepObserver) -> Callable[[], None]:
        self._observers.append(observer)
        self._send(Watch(True))

        def stop() -> None:
            with contextlib.suppress(ValueError):
                self._observers.remove(observer)
            if not self._observers:
                self._send(Watch(False))

        return stop

    def watch_cache(self, observer: CacheObserver) -> None:
        self._cache_observer = observer
        self._send(WatchCache(True))

    async def stats(self) -> EngineStats:
        """As of the last step, or a few hundredths of a second before it."""
        if self._link.state != "running":
            raise EngineDeadError(self._link.trouble())
        return self._stats

    async def health(self) -> Health:
        return self._link.health()

    async def restart(self) -> None:
        """What runs in the engine ends with EngineDeadError, as if the engine had died."""
        await self._link.restart()

    async def close(self, drain: float = 0.0) -> None:
        self._link.closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain):
                while self._open:
                    await asyncio.sleep(DRAIN_POLL)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._end_all("the engine was closed")
        await self._link.close()


def _travelling(config: EngineConfig) -> dict[str, Any]:
    """The options of a configuration, fit for a journey."""
    policy = config.scheduler.policy
    if not isinstance(policy, str):
        raise ConfigError(
            f"policy is {policy!r}: an engine in a process of its own takes one by name, or as module:Class"
        )
    options = config.options()
    try:
        msgspec.msgpack.encode(options)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"an option cannot be sent to the engine's process: {error}") from error
    return options


MAX_CALLS = 1 << 16  # unanswered at a time


class OpenCalls:
    """Each by its number."""

    def __init__(self) -> None:
        self._replies: dict[int, asyncio.Future[Reply]] = {}

    def __len__(self) -> int:
        return len(self._replies)

    async def ask(self, call: int, send: Callable[[], None]) -> Reply:
        """Send a question and wait. Raises what the engine answers with, and EngineDeadError if it does not."""
        if len(self._replies) >= MAX_CALLS:
            raise QueueFullError(f"{MAX_CALLS} calls to the engine are unanswered, which is the limit")
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        send()
        self._replies[call] = reply
        try:
            found = await reply
        finally:
            self._replies.pop(call, None)
        if found.remote_error is not None:
            raise found.remote_error.error()
        return found

    def answer(self, reply: Reply) -> None:
        waiting = self._replies.pop(reply.call, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def end(self, reason: str) -> None:
        """No one will answer them."""
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
        self._replies.clear()
