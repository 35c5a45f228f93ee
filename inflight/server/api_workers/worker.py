"""An API worker: an HTTP server whose engine, limits and stored responses are in the main process.

Started by `pool.py` as `python -m inflight.server.api_workers.worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import uvloop

from inflight.engine.client import Health, ModelFacts
from inflight.engine.remote.process_client import ProcessClient
from inflight.engine.remote.supervisor import EngineEnded, EngineStalled
from inflight.engine.remote.wire import Progress, Ready, StepOutputs
from inflight.entrypoints.async_engine import AsyncEngine
from inflight.errors import EngineError, InflightError
from inflight.frontend.frontend import Frontend
from inflight.logs import configure_logging
from inflight.processes.channel import (
    AsyncChildSockets,
    ConnectionInfo,
    Message,
    RpcCall,
    RpcPeer,
    RpcReply,
    Stop,
)
from inflight.processes.child import run_child
from inflight.server.access.keys import Caller, Keys
from inflight.server.api_workers import messages
from inflight.server.api_workers.relay import RelayMiddleware, answer_with
from inflight.server.app import create_app
from inflight.server.config import ServerConfig
from inflight.server.observability.metrics import MetricCounts, counts_of
from inflight.server.observability.request_log import tracer_of
from inflight.server.openai.responses.store import (
    InputPage,
    PageQuery,
    ResponseContent,
    StoredItem,
    StoredResponse,
)
from inflight.server.routes.requests import OwnRequests
from inflight.server.run import Server, hosts_of
from inflight.server.state import ServerState


class MainConnection:
    """Implements `EngineConnection`. This process ends when the main process does, so a call is always answered."""

    def __init__(self, sockets: AsyncChildSockets) -> None:
        self.engine_process = sockets
        self.closing = self.working = False
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

    def __init__(self, rpc: messages.Rpc, send: Callable[[Message], None]) -> None:
        self._rpc = rpc
        self._send = send

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        try:
            await self._rpc.call(messages.Enter(caller.name, request_id), None)
        except asyncio.CancelledError:  # it may have been admitted
            self.leave(caller, request_id)
            raise

    def leave(self, caller: Caller, request_id: str | None) -> None:
        self._send(messages.Leave(caller.name, request_id))


class RemoteResponses:
    """The responses stored in the main process. Contents that are being sent are held here too, once each."""

    def __init__(self, rpc: messages.Rpc) -> None:
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
        request = messages.FindResponse(name, response_id, None if cached is None else cached.version)
        content: ResponseContent | None = await self._call(request, ResponseContent | None)
        if content is not None and cached is not None and content.version == cached.version:
            return cached
        if content is not None:
            self._contents[name, response_id] = content
        return content

    async def conversation(self, caller: Caller, response_id: str) -> Sequence[StoredItem] | None:
        return await self._call(messages.FindConversation(caller.name, response_id), list[StoredItem] | None)

    async def input_page(self, caller: Caller, response_id: str, query: PageQuery) -> InputPage | None:
        return await self._call(messages.FindInputPage(caller.name, response_id, query), InputPage | None)

    async def find_items(
        self, caller: Caller, item_ids: Sequence[str], max_bytes: int
    ) -> dict[str, StoredItem | None]:
        request = messages.FindItems(caller.name, list(item_ids), max_bytes)
        return await self._call(request, dict[str, StoredItem | None])

    async def add(self, caller: Caller, stored: StoredResponse) -> None:
        await self._call(messages.KeepResponse(caller.name, stored), None)

    async def remove(self, caller: Caller, response_id: str) -> None:
        await self._call(messages.RemoveResponse(caller.name, response_id), None)


class ApiWorkerServer(Server):
    """Ignores signals: the main process decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class ApiWorker:
    """Runs the server from the first message of the main process to the last byte of a response."""

    def __init__(self, connection: ConnectionInfo) -> None:
        loop = asyncio.get_running_loop()
        self._sockets = AsyncChildSockets(connection, messages.FromMain, self._handle)
        self._connection = MainConnection(self._sockets)
        self._rpc: messages.Rpc = RpcPeer(self._sockets.send, self._answer, messages.RpcError)
        self._start: asyncio.Future[messages.StartWorker] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._state: ServerState | None = None
        self._server: Server | None = None

    def _handle(self, message: Any) -> None:
        match message:
            case StepOutputs():
                self._connection.put(message)
            case RpcCall() | RpcReply():
                self._rpc.handle(message)
            case messages.EngineHealth(health):
                self._connection.set_health(health)
            case Progress(num_done, num_total) if self._server is not None:
                self._server.loading_app.progress(num_done, num_total)
            case messages.StartWorker() if not self._start.done():
                self._start.set_result(message)
            case Ready() if not self._ready.done():
                self._ready.set_result(message)
            case messages.Drain() if self._server is not None:
                self._server.stop()
            case Stop():
                logging.shutdown()
                os._exit(0)

    async def _answer(self, request: messages.WorkerRequest) -> object:
        assert self._state is not None
        match request:
            case messages.RelayedRequest():
                return await answer_with(self._app, request)
            case messages.SummarizeRequests(keys, selection):
                return await OwnRequests(self._state).summaries(keys, selection)
            case messages.TakeCounts():
                return self._counts()
        raise AssertionError(f"an API worker does not handle {request}")

    def _counts(self) -> MetricCounts | None:
        state = self._state
        return None if state is None else counts_of(state.metrics, state.keys.callers)

    async def run(self) -> None:
        start = await self._start
        options = ServerConfig.create(**_tuples(start.options))
        heartbeat = asyncio.create_task(self._send_heartbeats(options.process.heartbeat))
        self._server = server = ApiWorkerServer(options)
        with socket.socket(fileno=start.listener) as listener:
            serving: asyncio.Task[None] | None = None
            if not start.is_loaded:
                serving = self._serve(server, listener)
            loaded = await server.wait_for(self._load(start, options, listener))
            if loaded is not None:
                engine, state = loaded
                relay = RelayMiddleware(self._app, state, start.number, self._find, self._relay)
                server.open(state, relay)
                gc.collect()
                gc.freeze()
                serving = serving or self._serve(server, listener)
                self._sockets.send(messages.Opened())
                await serving
                state.close()
                await engine.close()
            elif serving is not None:
                await serving
        heartbeat.cancel()
        self._sockets.send(messages.WorkerHeartbeat(self._counts()))
        self._sockets.close()

    def _serve(self, server: Server, listener: socket.socket) -> asyncio.Task[None]:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        serving.add_done_callback(lambda _: server.give_up())
        return serving

    async def _send_heartbeats(self, interval: float) -> None:
        while True:
            self._sockets.send(messages.WorkerHeartbeat(self._counts()))
            await asyncio.sleep(interval)

    async def _load(
        self, start: messages.StartWorker, options: ServerConfig, listener: socket.socket
    ) -> tuple[AsyncEngine, ServerState]:
        ready = await self._ready
        keys = Keys.from_digests(start.keys)
        frontend = await asyncio.to_thread(_frontend, options, ready.facts, start.launch)
        engine = AsyncEngine(frontend, ProcessClient.from_connection(self._connection, ready))
        self._state = state = ServerState(
            engine,
            options,
            keys,
            hosts_of(options, keys, listener),
            tracer_of(options.otlp_traces_endpoint),
            serials=map(f"{start.launch}.{{}}".format, count()),
            admission=RemoteAdmission(self._rpc, self._sockets.send),
            stored=RemoteResponses(self._rpc),
        )
        self._app = create_app(state)
        return engine, state

    async def _find(self, caller: str | None, request_id: str, only_running: bool) -> int | None:
        return await self._rpc.call(messages.FindRequest(caller, request_id, only_running), int | None)

    async def _relay(self, request: messages.RelayedRequest) -> messages.RelayedResponse:
        return await self._rpc.call(request, messages.RelayedResponse)


def _frontend(options: ServerConfig, facts: ModelFacts, launch: int) -> Frontend:
    config = options.engine
    # Requests without a seed get one from a counter, which must differ between workers.
    model = replace(config.model, seed=config.model.seed + launch)
    frontend = Frontend.from_config(replace(config, model=model), facts, options.router.on_this_machine)
    frontend.warm_up()
    with contextlib.suppress(InflightError):  # the first chat request reports the error
        _ = frontend.chat_formats
    return frontend


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with lists, which msgpack makes of tuples, turned back into tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


async def _run(connection: ConnectionInfo) -> None:
    await ApiWorker(connection).run()


def run_worker(connection: ConnectionInfo) -> int:
    configure_logging(connection.log_level, connection.log_format, process="api worker")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(connection))
    return 0


if __name__ == "__main__":
    run_child(ConnectionInfo, run_worker)
