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
from collections.abc import Generator
from dataclasses import replace
from itertools import count
from typing import Any

import uvloop

from inflight.engine import ModelFacts
from inflight.engine.remote.process_client import ProcessClient
from inflight.engine.remote.wire import Progress, Ready, StepOutputs
from inflight.entrypoints.async_engine import AsyncEngine
from inflight.errors import InflightError
from inflight.frontend import Frontend
from inflight.logs import configure_logging
from inflight.processes.channel import AsyncChildSockets, ConnectionInfo, RpcCall, RpcPeer, RpcReply, Stop
from inflight.processes.child import run_child
from inflight.server.access.keys import Keys
from inflight.server.api_workers.connection import MainConnection, RemoteAdmission, RemoteResponses, Rpc
from inflight.server.api_workers.messages import (
    Drain,
    EngineHealth,
    FindRequest,
    FromMain,
    Opened,
    RelayedRequest,
    RelayedResponse,
    RpcError,
    StartWorker,
    TakeCounts,
    WorkerHeartbeat,
    WorkerRequest,
)
from inflight.server.api_workers.relay import RelayMiddleware, answer_with
from inflight.server.app import create_app
from inflight.server.config import ServerConfig
from inflight.server.observability.metrics import MetricCounts, counts_of
from inflight.server.observability.tracing import tracer_of
from inflight.server.run import Server, hosts_of
from inflight.server.state import ServerState

logger = logging.getLogger("inflight.server.api_workers.worker")  # __name__ is __main__ here


class ApiWorkerServer(Server):
    """Ignores signals: the main process decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class ApiWorker:
    """Runs the server from the first message of the main process to the last byte of a response."""

    def __init__(self, connection: ConnectionInfo) -> None:
        loop = asyncio.get_running_loop()
        self._sockets = AsyncChildSockets(connection, FromMain, self._handle)
        self._connection = MainConnection(self._sockets)
        self._rpc: Rpc = RpcPeer(self._sockets.send, self._answer, RpcError)
        self._start: asyncio.Future[StartWorker] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._state: ServerState | None = None
        self._server: Server | None = None

    def _handle(self, message: Any) -> None:
        match message:
            case StepOutputs():
                self._connection.put(message)
            case RpcCall() | RpcReply():
                self._rpc.handle(message)
            case EngineHealth(health):
                self._connection.set_health(health)
            case Progress(num_done, num_total) if self._server is not None:
                self._server.loading_app.progress(num_done, num_total)
            case StartWorker() if not self._start.done():
                self._start.set_result(message)
            case Ready() if not self._ready.done():
                self._ready.set_result(message)
            case Drain() if self._server is not None:
                self._server.stop()
            case Stop():
                logging.shutdown()
                os._exit(0)

    async def _answer(self, request: WorkerRequest) -> object:
        assert self._state is not None
        match request:
            case RelayedRequest():
                return await answer_with(self._app, request)
            case TakeCounts():
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
                self._sockets.send(Opened())
                await serving
                state.close()
                await engine.close()
            elif serving is not None:
                await serving
        heartbeat.cancel()
        self._sockets.send(WorkerHeartbeat(self._counts()))
        self._sockets.close()

    def _serve(self, server: Server, listener: socket.socket) -> asyncio.Task[None]:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        serving.add_done_callback(lambda _: server.give_up())
        return serving

    async def _send_heartbeats(self, interval: float) -> None:
        while True:
            self._sockets.send(WorkerHeartbeat(self._counts()))
            await asyncio.sleep(interval)

    async def _load(
        self, start: StartWorker, options: ServerConfig, listener: socket.socket
    ) -> tuple[AsyncEngine, ServerState]:
        ready = await self._ready
        keys = Keys.from_digests(start.keys)
        frontend = await asyncio.to_thread(_frontend, options, ready.facts, start.launch)
        engine = AsyncEngine(frontend, ProcessClient.over(self._connection, ready))
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

    async def _find(self, caller: str, request_id: str, only_running: bool) -> int | None:
        return await self._rpc.call(FindRequest(caller, request_id, only_running), int | None)

    async def _relay(self, request: RelayedRequest) -> RelayedResponse:
        return await self._rpc.call(request, RelayedResponse)


def _frontend(options: ServerConfig, facts: ModelFacts, launch: int) -> Frontend:
    config = options.engine
    # Requests without a seed get one from a counter, which must differ between workers.
    model = replace(config.model, seed=config.model.seed + launch)
    frontend = Frontend.of(replace(config, model=model), facts, options.router.on_this_machine)
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
