"""Serves an engine client to another process, as `EngineLoop` serves an engine core.

API worker: ProcessClient ══ the messages of an engine process ══ ClientService ─ Router, or another client
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from inflight.engine.client import EngineClient
from inflight.engine.remote import wire
from inflight.engine.remote.engine_loop import Outbox
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
        self, client: EngineClient, send: Callable[[wire.StepOutputs], None], stats: Callable[[], EngineStats]
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

    def handle(self, message: wire.ServiceMessage) -> None:
        match message:
            case wire.Add(handle, added):
                served = self._served[handle] = _ServedRequest(added.request_id)
                self._begin(self._run(handle, served, added))
            case wire.Ack(num_read):
                self._outbox.taken(num_read)
                self._flush_soon()
            case wire.WatchTimeline(enabled):
                self._watch_timeline(enabled)
            case _:
                self._begin(self._answer(message))

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
                self._reply(wire.Reply(handle, remote_error=RemoteError.from_exception(error)))
                return
            self._outbox.open(request.request_id, handle)
            self._reply(wire.Reply(handle))
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

    async def _answer(self, message: wire.ServiceCall) -> None:
        """Send the reply to a call, or its error. An abort whose `call` is None expects no reply."""
        try:
            reply = await self._reply_to(message)
        except Exception as error:
            reply = wire.Reply(message.call or 0, remote_error=RemoteError.from_exception(error))
        if message.call is not None:
            self._reply(reply)

    async def _reply_to(self, message: wire.ServiceCall) -> wire.Reply:
        client = self._client
        match message:
            case wire.Abort(call, handle, reason):
                return wire.Reply(call or 0, await self._abort(handle, reason))
            case wire.Describe(call, handle):
                served = self._served.get(handle)
                state = None if served is None else await client.describe(served.request_id)
                return wire.Reply(call, state=state)
            case wire.RunCommand(call, command):
                await client.command(command)
                return wire.Reply(call)
            case wire.ReadTimeline(call, query):
                return wire.Reply(call, timeline=await client.read_timeline(query))
            case wire.ReadMemory(call, replica):
                return wire.Reply(call, memory=await client.read_memory(replica))

    async def _abort(self, handle: int, reason: str) -> int:
        served = self._served.get(handle)
        if served is None:
            return 0
        await served.settled.wait()
        return await self._client.abort(served.request_id, reason) if handle in self._served else 0

    def _watch_timeline(self, enabled: bool) -> None:
        if self._stop_timeline is not None:
            self._stop_timeline()
        self._stop_timeline = self._client.watch_timeline(self._show) if enabled else None

    def _show(self, replica: str, data: bytes) -> None:
        self._outbox.show(data, replica)
        self._flush_soon()

    def _reply(self, reply: wire.Reply) -> None:
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
