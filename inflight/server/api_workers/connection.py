"""The API worker's access to the engine, the limits and the stored responses of the main process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from weakref import WeakValueDictionary

from inflight.engine import Health
from inflight.engine.remote.supervisor import EngineEnded, EngineStalled
from inflight.engine.remote.wire import Ready, StepOutputs
from inflight.errors import EngineError
from inflight.processes.channel import AsyncChildSockets, Message, RpcPeer
from inflight.server.access.keys import Caller
from inflight.server.api_workers.messages import (
    Enter,
    FindConversation,
    FindInputPage,
    FindItems,
    FindResponse,
    KeepResponse,
    Leave,
    RemoveResponse,
    RpcError,
    WorkerRequest,
)
from inflight.server.openai.responses.store import (
    InputPage,
    PageQuery,
    ResponseContent,
    StoredItem,
    StoredResponse,
)

Rpc = RpcPeer[WorkerRequest, RpcError]


class MainConnection:
    """Implements `EngineConnection`. This process ends when the main process does, so a call is always answered."""

    def __init__(self, sockets: AsyncChildSockets) -> None:
        self.engine_process = sockets
        self.closing = self.working = False
        self.num_dropped = 0
        self.state = "running"
        self._outputs: asyncio.Queue[StepOutputs] = asyncio.Queue()
        self._health = Health(True, 0.0)

    def put(self, outputs: StepOutputs) -> None:
        self._outputs.put_nowait(outputs)

    def set_health(self, health: Health) -> None:
        self._health = health

    async def messages(self) -> AsyncGenerator[Ready | StepOutputs | EngineStalled | EngineEnded]:
        while True:
            yield await self._outputs.get()

    def trouble(self) -> str | None:
        return None  # the main process replies with an error

    def health(self) -> Health:
        return self._health

    async def restart(self) -> None:
        raise EngineError("only the main process can restart engines")

    def give_up(self, reason: str) -> None:
        self.state = "dead"
        self._health = Health(False, 0.0, reason, "dead")

    async def close(self) -> None:
        self.state = "closed"


class RemoteAdmission:
    """Limits that hold for all API workers together: the main process counts."""

    def __init__(self, rpc: Rpc, send: Callable[[Message], None]) -> None:
        self._rpc = rpc
        self._send = send

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        try:
            await self._rpc.call(Enter(caller.name, request_id), None)
        except asyncio.CancelledError:  # it may have been admitted
            self.leave(caller, request_id)
            raise

    def leave(self, caller: Caller, request_id: str | None) -> None:
        self._send(Leave(caller.name, request_id))


class RemoteResponses:
    """The responses stored in the main process. Contents that are being sent are held here too, once each."""

    def __init__(self, rpc: Rpc) -> None:
        self._call = rpc.call
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
        cached = self._contents.get((name, response_id))
        request = FindResponse(name, response_id, None if cached is None else cached.version)
        content: ResponseContent | None = await self._call(request, ResponseContent | None)
        if content is not None and cached is not None and content.version == cached.version:
            return cached
        if content is not None:
            self._contents[name, response_id] = content
        return content

    async def conversation(self, caller: Caller, response_id: str) -> Sequence[StoredItem] | None:
        return await self._call(FindConversation(caller.name, response_id), list[StoredItem] | None)

    async def input_page(self, caller: Caller, response_id: str, query: PageQuery) -> InputPage | None:
        return await self._call(FindInputPage(caller.name, response_id, query), InputPage | None)

    async def find_items(
        self, caller: Caller, item_ids: Sequence[str], max_bytes: int
    ) -> dict[str, StoredItem | None]:
        request = FindItems(caller.name, list(item_ids), max_bytes)
        return await self._call(request, dict[str, StoredItem | None])

    async def add(self, caller: Caller, stored: StoredResponse) -> None:
        await self._call(KeepResponse(caller.name, stored), None)

    async def remove(self, caller: Caller, response_id: str) -> None:
        await self._call(RemoveResponse(caller.name, response_id), None)
