"""A front process: a server like any other, whose engine, limits and stored responses are the main process's.

Started by `front_process.py` as `python -m inflight.server.api_workers.worker`.
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
from inflight.processes.channel import ConnectionInfo, Stop
from inflight.processes.parent_watch import run_child
from inflight.server.access.keys import Keys
from inflight.server.api_workers.asking import Asking
from inflight.server.api_workers.link import MainLink, MainSockets, RemoteAdmission, RemoteResponses
from inflight.server.api_workers.relay import RelayMiddleware, answer_with
from inflight.server.api_workers.wire import (
    Ask,
    AskReply,
    Drain,
    EngineHealth,
    FindRequest,
    FrontHeartbeat,
    Opened,
    Question,
    RelayedRequest,
    RelayedResponse,
    StartFront,
    TakeCounts,
)
from inflight.server.app import create_app
from inflight.server.config import ServerConfig
from inflight.server.observability.metrics import MetricCounts, counts_of
from inflight.server.observability.tracing import tracer_of
from inflight.server.run import Server, hosts_of
from inflight.server.state import ServerState

logger = logging.getLogger(
    "inflight.server.api_workers.worker"
)  # as the main module it would be called __main__


class FrontServer(Server):
    """Signals are for the main process, which says when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class FrontWorker:
    """From the first message to the last byte."""

    def __init__(self, connection: ConnectionInfo) -> None:
        loop = asyncio.get_running_loop()
        self._sockets = MainSockets(connection, self._take)
        self._link = MainLink(self._sockets)
        self._asking = Asking(self._sockets.send, self._answer)
        self._start: asyncio.Future[StartFront] = loop.create_future()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._state: ServerState | None = None
        self._server: Server | None = None

    def _take(self, message: Any) -> None:
        match message:
            case StepOutputs():
                self._link.take(message)
            case Ask() | AskReply():
                self._asking.handle(message)
            case EngineHealth(health):
                self._link.take_health(health)
            case Progress(num_done, num_total) if self._server is not None:
                self._server.loading_app.progress(num_done, num_total)
            case StartFront() if not self._start.done():
                self._start.set_result(message)
            case Ready() if not self._ready.done():
                self._ready.set_result(message)
            case Drain() if self._server is not None:
                self._server.stop()
            case Stop():
                logging.shutdown()
                os._exit(0)

    async def _answer(self, question: Question) -> object:
        assert self._state is not None
        match question:
            case RelayedRequest():
                return await answer_with(self._app, question)
            case TakeCounts():
                return self._counts()
        raise AssertionError(f"a front process is not asked for {question}")

    def _counts(self) -> MetricCounts | None:
        state = self._state
        return None if state is None else counts_of(state.metrics, state.keys.callers)

    # ---- its life ----

    async def run(self) -> None:
        start = await self._start
        options = ServerConfig.create(**_tuples(start.options))
        heartbeat = asyncio.create_task(self._send_heartbeats(options.process.heartbeat))
        self._server = server = FrontServer(options)
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
        self._sockets.send(FrontHeartbeat(self._counts()))
        self._sockets.close()

    def _serve(self, server: Server, listener: socket.socket) -> asyncio.Task[None]:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        serving.add_done_callback(lambda _: server.give_up())
        return serving

    async def _send_heartbeats(self, interval: float) -> None:
        while True:
            self._sockets.send(FrontHeartbeat(self._counts()))
            await asyncio.sleep(interval)

    async def _load(
        self, start: StartFront, options: ServerConfig, listener: socket.socket
    ) -> tuple[AsyncEngine, ServerState]:
        ready = await self._ready
        keys = Keys.from_digests(start.keys)
        frontend = await asyncio.to_thread(_frontend, options, ready.facts, start.launch)
        engine = AsyncEngine(frontend, ProcessClient.over(self._link, ready))
        self._state = state = ServerState(
            engine,
            options,
            keys,
            hosts_of(options, keys, listener),
            tracer_of(options.otlp_traces_endpoint),
            serials=map(f"{start.launch}.{{}}".format, count()),
            admission=RemoteAdmission(self._asking, self._sockets.send),
            stored=RemoteResponses(self._asking),
        )
        self._app = create_app(state)
        return engine, state

    async def _find(self, caller: str, request_id: str, only_running: bool) -> int | None:
        return await self._asking.ask(FindRequest(caller, request_id, only_running), int | None)

    async def _relay(self, request: RelayedRequest) -> RelayedResponse:
        return await self._asking.ask(request, RelayedResponse)


def _frontend(options: ServerConfig, facts: ModelFacts, launch: int) -> Frontend:
    config = options.engine
    # Requests without a seed get one by their number: those of several processes must not be the same.
    model = replace(config.model, seed=config.model.seed + launch)
    frontend = Frontend.of(replace(config, model=model), facts, options.router.on_this_machine)
    frontend.warm_up()
    with contextlib.suppress(InflightError):  # whoever chats is told what is wrong
        _ = frontend.chat_formats
    return frontend


def _tuples(options: dict[str, Any]) -> dict[str, Any]:
    """Lists on the wire were tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


async def _run(connection: ConnectionInfo) -> None:
    await FrontWorker(connection).run()


def run_worker(connection: ConnectionInfo) -> int:
    configure_logging(connection.log_level, connection.log_format, process="front")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(connection))
    return 0


if __name__ == "__main__":
    run_child(ConnectionInfo, run_worker)
