"""Serves an engine client to another process, as `EngineLoop` serves an engine core.

API worker: ProcessClient ══ the messages of an engine process ══ ClientService ─ Router, or another client
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from inflight.engine.client import EngineClient
from inflight.engine.remote.engine_loop import Outbox
from inflight.engine.remote.wire import (
    Abort,
    Ack,
    Add,
    Describe,
    ReadMemory,
    ReadMessage,
    ReadTimeline,
    Reply,
    RunCommand,
    ServiceMessage,
    StepOutputs,
    WatchTimeline,
)
from inflight.engine.stats import EngineStats
from inflight.processes.channel import RemoteError
from inflight.request import Request, RequestSpec


@dataclass(eq=False, slots=True)
class _ServedRequest:
    request_id: str
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # the client has accepted or rejected it


class ClientService:
    """Serves one process. Its requests end with it."""

    def __init__(
        self,
        client: EngineClient,
        send: Callable[[StepOutputs], None],
        stats: Callable[[], EngineStats],
    ) -> None:
        self._client = client
        self._outbox = Outbox(send, stats, time.monotonic)
        self._served: dict[int, _ServedRequest] = {}  # by handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._is_flushing = False
        self._stop_timeline: Callable[[], None] | None = None

    @property
    def num_requests(self) -> int:
        return len(self._served)

    def handle(self, message: ServiceMessage) -> None:
        match message:
            case Add(handle, added):
                served = self._served[handle] = _ServedRequest(added.request_id)
                self._begin(self._run(handle, served, added))
            case Abort():
                self._begin(self._answer(message.call, lambda: self._abort(message)))
            case Describe():
                self._begin(self._answer(message.call, lambda: self._describe(message)))
            case RunCommand():
                self._begin(self._answer(message.call, lambda: self._run_command(message)))
            case Ack(num_read):
                self._outbox.taken(num_read)
                self._flush_soon()
            case WatchTimeline(enabled):
                self._watch_timeline(enabled)
            case ReadTimeline() | ReadMemory():
                self._begin(self._answer(message.call, lambda: self._read(message)))

    def send_stats(self) -> None:
        """Send the statistics, even if there is nothing else to send."""
        self._outbox.flush(idle=not self._served, stepped=True)

    async def close(self) -> None:
        """Abort all requests and calls of the process, which is gone."""
        self._watch_timeline(False)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, handle: int, served: _ServedRequest, added: RequestSpec) -> None:
        """Run one request to its end. Leaving its stream aborts it."""
        try:
            try:
                request = Request(added)
                await self._client.add(request)
            except Exception as error:
                self._reply(Reply(handle, remote_error=RemoteError.from_exception(error)))
                return
            self._outbox.open(request.request_id, handle)
            self._reply(Reply(handle))
            served.settled.set()
            try:
                async with contextlib.aclosing(self._client.stream(request.request_id)) as deltas:
                    async for delta in deltas:
                        self._outbox.put([delta])
                        self._flush_soon()
            except Exception as error:
                self._outbox.lose(handle, RemoteError.from_exception(error))
                self._flush_soon()
        finally:
            del self._served[handle]
            served.settled.set()

    async def _answer(self, call: int | None, work: Callable[[], Awaitable[Reply]]) -> None:
        """Send the reply that `work` returns, or its error. No reply is expected if `call` is None."""
        try:
            reply = await work()
        except Exception as error:
            reply = Reply(call or 0, remote_error=RemoteError.from_exception(error))
        if call is not None:
            self._reply(reply)

    async def _abort(self, message: Abort) -> Reply:
        served, num_freed = self._served.get(message.handle), 0
        if served is not None:
            await served.settled.wait()
            if message.handle in self._served:
                num_freed = await self._client.abort(served.request_id, message.reason)
        return Reply(message.call or 0, num_freed)

    async def _describe(self, message: Describe) -> Reply:
        served = self._served.get(message.handle)
        state = None if served is None else await self._client.describe(served.request_id)
        return Reply(message.call, state=state)

    async def _run_command(self, message: RunCommand) -> Reply:
        await self._client.command(message.command)
        return Reply(message.call)

    def _watch_timeline(self, enabled: bool) -> None:
        if self._stop_timeline is not None:
            self._stop_timeline()
        self._stop_timeline = self._client.watch_timeline(self._show) if enabled else None

    def _show(self, replica: str, data: bytes) -> None:
        self._outbox.show(data, replica)
        self._flush_soon()

    async def _read(self, message: ReadMessage) -> Reply:
        if isinstance(message, ReadTimeline):
            return Reply(message.call, timeline=await self._client.read_timeline(message.query))
        return Reply(message.call, memory=await self._client.read_memory(message.replica))

    def _reply(self, reply: Reply) -> None:
        self._outbox.reply(reply)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Flush once for all outputs of a step, which arrive in one turn of the event loop."""
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        self._outbox.flush(idle=not self._served)
