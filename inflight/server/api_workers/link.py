"""A front process's end of the wire: an engine, limits and stored responses, as if they were here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import zmq

from inflight.engine import Health
from inflight.engine.remote.supervisor import EngineEnded, EngineStalled
from inflight.engine.remote.wire import Ready, StepOutputs
from inflight.errors import EngineError
from inflight.processes.channel import Codec, ConnectionInfo, Message
from inflight.server.access.keys import Caller
from inflight.server.api_workers.asking import Asking
from inflight.server.api_workers.wire import (
    Enter,
    FindConversation,
    FindInputPage,
    FindItems,
    FindResponse,
    FromMain,
    KeepResponse,
    Leave,
    RemoveResponse,
)
from inflight.server.openai.responses.input_listing import InputPage, PageQuery
from inflight.server.openai.responses.store import ResponseContent, StoredResponse
from inflight.server.openai.responses.stored_items import StoredItem

MAX_FRAMES = 64  # taken at a time, so that others get their turn


class MainSockets:
    """Two sockets to the main process, read by the event loop."""

    def __init__(self, connection: ConnectionInfo, take: Callable[[Any], None]) -> None:
        secret = bytes.fromhex(connection.secret)
        self.codec: Codec[Any] = Codec(secret, FromMain)
        self.process_id: int | None = os.getpid()
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._up = self._context.socket(zmq.PUSH)
        self._down = self._context.socket(zmq.PULL)
        for socket in (self._up, self._down):
            socket.set_hwm(0)  # what is on its way is bounded by the requests that run
            socket.linger = 1000
        self._up.connect(connection.up)
        self._down.connect(connection.down)
        self._loop.add_reader(self._down.fileno(), self._take_frames)
        self._loop.call_soon(self._take_frames)

    def _take_frames(self) -> None:
        for _ in range(MAX_FRAMES):
            try:
                frame = self._down.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            message = self.codec.decode(frame)
            if message is not None:
                self._take(message)
        self._loop.call_soon(self._take_frames)

    def send(self, message: Message) -> None:
        self.send_frame(self.codec.encode(message))

    def send_frame(self, frame: bytearray) -> None:
        if not self._up.closed:
            self._up.send(frame)

    def close(self) -> None:
        self._loop.remove_reader(self._down.fileno())
        self._up.close()
        self._down.close()
        self._context.term()


class MainLink:
    """Implements `EngineLink`. This process ends when the main process does, so there is always someone to ask."""

    def __init__(self, sockets: MainSockets) -> None:
        self.engine_process = sockets
        self.closing = self.working = False
        self.num_dropped = 0
        self.state = "running"
        self._outputs: asyncio.Queue[StepOutputs] = asyncio.Queue()
        self._health = Health(True, 0.0)

    def take(self, outputs: StepOutputs) -> None:
        self._outputs.put_nowait(outputs)

    def take_health(self, health: Health) -> None:
        self._health = health

    async def messages(self) -> AsyncGenerator[Ready | StepOutputs | EngineStalled | EngineEnded]:
        while True:
            yield await self._outputs.get()

    def trouble(self) -> str | None:
        return None  # whoever is asked says so

    def health(self) -> Health:
        return self._health

    async def restart(self) -> None:
        raise EngineError("engines are restarted by the main process")

    def give_up(self, reason: str) -> None:
        self.state = "dead"
        self._health = Health(False, 0.0, reason, "dead")

    async def close(self) -> None:
        self.state = "closed"


class RemoteAdmission:
    """Limits that hold over all front processes: the main process counts."""

    def __init__(self, asking: Asking, send: Callable[[Message], None]) -> None:
        self._asking = asking
        self._send = send

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        try:
            await self._asking.ask(Enter(caller.name, request_id), None)
        except asyncio.CancelledError:  # it may have been let in
            self.leave(caller, request_id)
            raise

    def leave(self, caller: Caller, request_id: str | None) -> None:
        self._send(Leave(caller.name, request_id))


class RemoteResponses:
    """Stored responses, in the main process. Contents that are being sent are here too, once each."""

    def __init__(self, asking: Asking) -> None:
        self._ask = asking.ask
        self._contents: WeakValueDictionary[tuple[str, str], ResponseContent] = WeakValueDictionary()
        self._fetches: dict[tuple[str, str], asyncio.Task[ResponseContent | None]] = {}

    async def content(self, caller: Caller, response_id: str) -> ResponseContent | None:
        key = caller.name, response_id
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = self._fetches[key] = asyncio.create_task(self._fetch(*key))
            fetch.add_done_callback(lambda _: self._fetches.pop(key))
        return await asyncio.shield(fetch)  # others may wait for it too

    async def _fetch(self, name: str, response_id: str) -> ResponseContent | None:
        held = self._contents.get((name, response_id))
        question = FindResponse(name, response_id, None if held is None else held.version)
        content: ResponseContent | None = await self._ask(question, ResponseContent | None)
        if content is not None and held is not None and content.version == held.version:
            return held
        if content is not None:
            self._contents[name, response_id] = content
        return content

    async def conversation(self, caller: Caller, response_id: str) -> Sequence[StoredItem] | None:
        return await self._ask(FindConversation(caller.name, response_id), list[StoredItem] | None)

    async def input_page(self, caller: Caller, response_id: str, query: PageQuery) -> InputPage | None:
        return await self._ask(FindInputPage(caller.name, response_id, query), InputPage | None)

    async def find_items(
        self, caller: Caller, item_ids: Sequence[str], max_bytes: int
    ) -> dict[str, StoredItem | None]:
        question = FindItems(caller.name, list(item_ids), max_bytes)
        return await self._ask(question, dict[str, StoredItem | None])

    async def add(self, caller: Caller, stored: StoredResponse) -> None:
        await self._ask(KeepResponse(caller.name, stored), None)

    async def remove(self, caller: Caller, response_id: str) -> None:
        await self._ask(RemoveResponse(caller.name, response_id), None)
