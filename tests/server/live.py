"""Real servers on free ports, over one engine, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvloop

from inflight import AsyncEngine
from inflight.config import EngineConfig, ProcessConfig
from inflight.engine.core import EngineCore
from inflight.engine.inproc import InprocClient
from inflight.engine.remote.process_client import ProcessClient
from inflight.frontend.frontend import Frontend
from inflight.server.access.keys import load_keys
from inflight.server.config import ServerConfig
from inflight.server.observability.request_log import Tracer
from inflight.server.run import Server, hosts_of, listen
from inflight.server.state import ServerState
from tests.server.faulty import BUILD
from tests.support.held_steps import HeldSteps, held_steps
from tests.support.waiting import SECONDS, is_idle, until

T = TypeVar("T")


class Backend:
    """An event loop in a thread, and the engine that its servers share."""

    def __init__(self, **options: Any) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = self.run(self._start(options))

    async def _start(self, options: dict[str, Any]) -> AsyncEngine:
        return await AsyncEngine.start(in_process=True, **options)

    @property
    def core(self) -> EngineCore:
        assert isinstance(self.engine.client, InprocClient)
        return self.engine.client._core

    def held_steps(self, num_steps: int = 0) -> AbstractContextManager[HeldSteps]:
        """Hold the engine's steps after the next `num_steps`; it takes calls meanwhile."""
        assert isinstance(self.engine.client, InprocClient)
        return held_steps(self.engine.client, num_steps)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(2 * SECONDS)

    async def idle(self) -> bool:
        return await is_idle(self.engine)

    def close(self) -> None:
        self.run(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()


class ProcessBackend(Backend):
    """The same with the engine in a process of its own."""

    def __init__(self, process: ProcessConfig | None = None, **options: Any) -> None:
        self._process = process or ProcessConfig(heartbeat=0.05)
        super().__init__(**options)

    async def _start(self, options: dict[str, Any]) -> AsyncEngine:
        config = EngineConfig.create(**options)
        client = await ProcessClient.start(config, self._process, build=BUILD)
        return AsyncEngine(Frontend.from_config(config, client.facts), client)

    @property
    def client(self) -> ProcessClient:
        assert isinstance(self.engine.client, ProcessClient)
        return self.engine.client


@dataclass(eq=False)
class Live:
    """One server. `http` is a client of it."""

    backend: Backend
    state: ServerState
    server: Server
    url: str
    http: httpx.Client
    finished: Any

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **body})
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def wait_until(self, what: str, condition: Any) -> None:
        """Wait until the condition, which is evaluated in the server's loop, holds."""
        self.backend.run(until(condition, what))

    def wait_until_idle(self) -> None:
        """No request anywhere, every block back."""

        async def idle() -> bool:
            return not len(self.state.request_log) and await self.backend.idle()

        self.wait_until("an idle engine", idle)

    def stop(self) -> None:
        self.backend.loop.call_soon_threadsafe(self.server.stop)
        self.finished.result(SECONDS)


@contextlib.contextmanager
def live_server(
    backend: Backend, tracer: Tracer | None = None, is_open: bool = True, **options: Any
) -> Iterator[Live]:
    """A server with these options over the backend's engine; unless it is open, one that still loads."""
    config = ServerConfig.create(in_process=True, **{"port": 0, "shutdown_timeout": 0.0, **options})
    listener = listen(config)
    engine = backend.engine
    keys = load_keys(config.api_key, config.keys)
    hosts = hosts_of(config, keys, listener)

    async def start() -> tuple[ServerState, Server]:
        state = ServerState(engine, config, keys, hosts, tracer or Tracer())
        server = Server(config)
        if is_open:
            server.open(state)
        return state, server

    state, server = backend.run(start())
    finished = asyncio.run_coroutine_threadsafe(server.serve([listener]), backend.loop)
    url = f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=SECONDS) as http:
        live = Live(backend, state, server, url, http, finished)
        try:
            live.wait_until("a server that listens", lambda: server.started)
            yield live
        finally:
            live.stop()
            state.close()
            listener.close()


def events(response: httpx.Response) -> Iterator[Any]:
    """The objects of a stream, without its end mark, which must be there."""
    done = False
    for line in response.iter_lines():
        if not line:
            continue
        assert not done, "something came after the end"
        assert line.startswith("data: ")
        if line == "data: [DONE]":
            done = True
        else:
            yield json.loads(line[6:])
    assert done, "the stream has no end"


def stream(live: Live, path: str, body: Any, **options: Any) -> list[Any]:
    """All events of a streamed answer."""
    with live.http.stream("POST", path, json={**body, "stream": True}, **options) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return list(events(response))
