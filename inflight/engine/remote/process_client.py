"""A client of an engine that runs in another process, where it is watched and restarted."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from inflight.config import EngineConfig, ProcessConfig
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
    id_in_use,
    not_added,
    wait_while,
)
from inflight.engine.remote import wire
from inflight.engine.remote.supervisor import (
    EngineEnded,
    EngineStalled,
    LoadProgress,
    Supervisor,
    engine_host,
)
from inflight.engine.stats import EngineStats
from inflight.errors import ConfigError, EngineDeadError
from inflight.events import Delta, RequestRecord
from inflight.processes.channel import Codec, Message, PendingCalls
from inflight.processes.child import ProcessHost
from inflight.request import Request
from inflight.timeline.chunks import TimelinePage, TimelineQuery

logger = logging.getLogger(__name__)

ACK_EVERY = 16  # StepOutputs: a fraction of the engine's window


class EngineConnection(Protocol):
    """The connection to an engine in another process. `Supervisor` implements it, and starts the process."""

    closing: bool  # no new requests are taken
    working: bool  # the engine has requests, as far as we know

    @property
    def engine_process(self) -> EngineChannel: ...

    @property
    def state(self) -> str: ...

    def messages(self) -> AsyncGenerator[wire.Ready | wire.StepOutputs | EngineStalled | EngineEnded]: ...

    def trouble(self) -> str | None:
        """Why the engine cannot be called now, or None."""

    def health(self) -> Health: ...

    async def restart(self) -> None: ...

    def give_up(self, reason: str) -> None: ...

    async def close(self) -> None: ...


class EngineChannel(Protocol):
    """The channel that messages to the engine are sent on."""

    @property
    def codec(self) -> Codec[Any]: ...

    @property
    def process_id(self) -> int | None: ...

    def send(self, message: Message) -> None: ...

    def send_frame(self, frame: bytearray) -> None: ...


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """A request that this client has added."""

    handle: int
    record: RequestRecord  # as far as this process knows it
    queue: DeltaQueue = field(default_factory=DeltaQueue)


class ProcessClient:
    """Implements `EngineClient`. Used in the event loop that started it.

    When the process dies, every open stream and call ends with EngineDeadError. A new process takes its place; until it
    is ready, requests are rejected with the same error.
    """

    def __init__(self, connection: EngineConnection) -> None:
        self.facts: ModelFacts  # set once the engine has started
        self._stats: EngineStats
        self._connection = connection
        self._reading: asyncio.Task[None]
        self._clock = time.monotonic
        self._numbers = itertools.count(1)
        self._requests: dict[str, _OpenRequest] = {}  # by request id, until their stream has ended
        self._open: dict[int, _OpenRequest] = {}  # by handle, until the engine has ended them
        self._calls: PendingCalls[wire.Reply] = PendingCalls()
        self._history = History()
        self._timeline_observers: list[TimelineObserver] = []
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
        generations: Iterator[int] | None = None,
    ) -> ProcessClient:
        """Start the process and wait until its engine is ready. Errors of the configuration are raised as if the engine
        had been built here. `build` is "model", or the `module:function` that builds another engine. Without a `host`,
        the process is a child of this one. `generations` count the engines in its place, also after restarts."""
        process = process or ProcessConfig()
        host = host or engine_host(process.environment)
        supervisor = Supervisor(build, _options_on_wire(config), process, progress, host, generations)
        ready = await supervisor.launch()
        return cls.from_connection(supervisor, ready)

    @classmethod
    def from_connection(cls, connection: EngineConnection, ready: wire.Ready) -> ProcessClient:
        """Return a client of an engine that is ready."""
        client = cls(connection)
        client._begin(ready.facts, ready.stats)
        client._reading = asyncio.get_running_loop().create_task(client._read())
        return client

    @property
    def process_id(self) -> int | None:
        return self._connection.engine_process.process_id

    # ---- messages from the engine ----

    async def _read(self) -> None:
        try:
            async for message in self._connection.messages():
                match message:
                    case wire.StepOutputs():
                        self._deliver(message)
                    case EngineStalled(reason):
                        self._calls.fail_all(reason)
                    case EngineEnded(reason):
                        self._end_all(reason)
                    case wire.Ready(facts, stats):
                        self._begin(facts, stats)
        except Exception as error:  # a bug of ours must not keep callers waiting forever
            logger.exception("the engine's messages could not be read")
            self._connection.give_up(f"its messages could not be read: {type(error).__name__}: {error}")
            self._end_all("the engine's messages could not be read")

    def _begin(self, facts: ModelFacts, stats: EngineStats) -> None:
        """Note that a process is ready, the first or a later one."""
        self.facts, self._stats = facts, stats
        self._num_received = 0
        if self._timeline_observers:
            self._send(wire.WatchTimeline(True))
        if self._cache_observer is not None:
            self._send(wire.WatchCache(True))

    def _end_all(self, reason: str) -> None:
        """Fail all requests and calls: the process is gone."""
        for opened in self._open.values():
            opened.record.finish_reason, opened.record.finished_at = "error", self._clock()
            self._history.add(opened.record)
            opened.queue.fail(EngineDeadError(reason))
        self._open.clear()
        self._calls.fail_all(reason)

    def _deliver(self, outputs: wire.StepOutputs) -> None:
        if outputs.cache is not None and self._cache_observer is not None:
            self._cache_observer(outputs.cache)
        for handle, token_ids in zip(outputs.handles, outputs.tokens_of_handles(), strict=False):
            opened = self._open.get(handle)
            if opened is not None:
                opened.queue.put(Delta(opened.record.request_id, token_ids))
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
            if reply.remote_error is not None:  # the request was rejected
                self._open.pop(reply.call, None)
            self._calls.resolve(reply.call, reply)
        if outputs.stats is not None:
            self._stats = outputs.stats
        for replica, data in outputs.timeline:
            for show in self._timeline_observers[:]:
                show(replica, data)
        self._connection.working = bool(self._open)
        self._num_received += 1
        if self._num_received % ACK_EVERY == 0:
            self._send(wire.Ack(self._num_received))

    # ---- calls to the engine ----

    def _send(self, message: Message) -> None:
        self._connection.engine_process.send(message)

    async def _call(self, call: int, send: Callable[[], None]) -> wire.Reply:
        trouble = self._connection.trouble()
        if trouble is not None:
            raise EngineDeadError(trouble)
        reply = await self._calls.call(call, send)
        if reply.remote_error is not None:
            raise reply.remote_error.error()
        return reply

    async def _ask(self, make_call: Callable[[int], Message]) -> wire.Reply:
        """Send a call, made from its number, and return the reply."""
        call = next(self._numbers)
        return await self._call(call, lambda: self._send(make_call(call)))

    async def add(self, request: Request) -> None:
        if self._connection.closing:
            raise EngineDeadError(self._connection.trouble() or "the engine is closing")
        if request.request_id in self._requests:
            raise id_in_use(request.request_id)
        handle = next(self._numbers)
        request.record.arrived_at = self._clock()
        opened = _OpenRequest(handle, request.record)

        def send() -> None:
            engine_process = self._connection.engine_process
            engine_process.send_frame(wire.encode_add(engine_process.codec, handle, request))
            self._open[handle] = self._requests[request.request_id] = opened

        try:
            await self._call(handle, send)
        except BaseException:
            if self._requests.get(request.request_id) is opened:
                del self._requests[request.request_id]
            self._abandon(opened)
            raise

    def _abandon(self, opened: _OpenRequest) -> None:
        """Abort a request without waiting for the reply."""
        if opened.handle in self._open:
            self._send(wire.Abort(None, opened.handle, "abort"))

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        opened = self._requests.get(request_id)
        if opened is None:
            raise not_added(request_id)

        def leave(running: bool) -> None:
            if self._requests.get(request_id) is opened:
                del self._requests[request_id]
                if running:
                    self._abandon(opened)

        return DeltaStream(opened.queue.take, leave)

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        opened = self._requests.get(request_id)
        if opened is None or opened.handle not in self._open:
            return 0
        try:
            reply = await self._ask(lambda call: wire.Abort(call, opened.handle, reason))
        except EngineDeadError:
            if opened.handle in self._open:
                raise
            return 0  # it ended with its process
        return reply.num_freed

    async def describe(self, request_id: str) -> RequestState | None:
        opened = self._requests.get(request_id)
        if opened is not None and opened.handle in self._open:
            reply = await self._ask(lambda call: wire.Describe(call, opened.handle))
            if reply.state is not None:
                return self._history.complete(reply.state)
        return self._history.get(request_id)

    async def command(self, command: Command) -> None:
        await self._ask(lambda call: wire.COMMAND_MESSAGES[type(command)](call, command))

    def watch_timeline(self, observer: TimelineObserver) -> Callable[[], None]:
        self._timeline_observers.append(observer)
        self._send(wire.WatchTimeline(True))

        def stop() -> None:
            self._timeline_observers.remove(observer)
            if not self._timeline_observers:
                self._send(wire.WatchTimeline(False))

        return stop

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        reply = await self._ask(lambda call: wire.ReadTimeline(call, query))
        assert reply.timeline is not None
        return reply.timeline

    async def read_memory(self, replica: str) -> MemoryState:
        reply = await self._ask(lambda call: wire.ReadMemory(call, replica))
        assert reply.memory is not None
        return reply.memory

    def watch_cache(self, observer: CacheObserver) -> None:
        self._cache_observer = observer
        self._send(wire.WatchCache(True))

    async def stats(self) -> EngineStats:
        """Return the statistics of the last step, or of one a few hundredths of a second before it."""
        if self._connection.state != "running":
            raise EngineDeadError(self._connection.trouble())
        return self._stats

    async def health(self) -> Health:
        return self._connection.health()

    async def restart(self) -> None:
        """Restart the process. Running requests end with EngineDeadError, as if the engine had died."""
        await self._connection.restart()

    async def close(self, drain: float = 0.0) -> None:
        self._connection.closing = True
        await wait_while(lambda: bool(self._open), drain)
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._end_all("the engine was closed")
        await self._connection.close()


def _options_on_wire(config: EngineConfig) -> dict[str, Any]:
    """Return the config's options as msgpack-serializable data."""
    policy = config.scheduler.policy
    if not isinstance(policy, str):
        raise ConfigError(
            f"policy is {policy!r}: an engine in a process of its own takes a policy by name, or as module:Class"
        )
    options = config.options()
    try:
        msgspec.msgpack.encode(options)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"an option cannot be sent to the engine process: {error}") from error
    return options
