"""Starts the engine and the server, and ends both in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from inflight.engine.remote.supervisor import LoadProgress
from inflight.entrypoints.async_engine import AsyncEngine
from inflight.errors import ConfigError, EngineDeadError, InflightError
from inflight.logs import configure_logging
from inflight.server.access.keys import AdminKey, Keys, load_keys
from inflight.server.access.middleware import Hosts, RootPath
from inflight.server.app import create_app
from inflight.server.config import ServerConfig, tls_context
from inflight.server.http.limits import ConnectionLimits, fit_open_files
from inflight.server.http.protocol import BoundedProtocol, bounded_protocol
from inflight.server.http.tls import TlsListener, TlsProtocol
from inflight.server.loading_app import LoadingApp
from inflight.server.observability.banner import banner
from inflight.server.observability.tracing import Tracer, tracer_of
from inflight.server.state import ServerState

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE = 75  # seconds that an idle connection stays open
POLL = 0.05
HEALTH_POLL = 0.5  # seconds between two looks at whether the engine was given up

T = TypeVar("T")


def run(options: ServerConfig, notes: Sequence[str] = ()) -> None:
    """Serve until told to stop. `notes` are for whoever started it."""
    configure_logging(options.log_level, options.process.log_format)
    for note in notes:
        logger.warning("%s", note)
    keys = load_keys(options.api_key, options.keys)
    AdminKey(
        options.admin_key, keys
    )  # raises where it cannot be: that should not take minutes to show either
    if len(set(keys.weights().values())) > 1 and options.policy != "fair":
        logger.warning("keys have weights, but the policy is %s: only fair looks at them", options.policy)
    serve, listeners = _serve, [listen(options)]  # a port that is taken should not take minutes to show
    if options.api_workers > 1:
        from inflight.server.api_workers.serving import listen_for_each, serve_fronts  # made of what is here

        serve, listeners = serve_fronts, listen_for_each(options, listeners[0])
    try:
        hosts = hosts_of(options, keys, listeners[0])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if not runner.run(serve(options, keys, hosts, listeners)):
                # A thread may still be loading. It cannot be interrupted, and to return would be to wait for it.
                logging.shutdown()
                os._exit(0)
    finally:
        for listener in listeners:
            listener.close()


def listen(options: ServerConfig) -> socket.socket:
    """A socket that holds the address and takes connections, which wait there until they are served."""
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # At once: until then another server that also loads could take the address too.
        listener.listen(BACKLOG)
    except OSError as error:
        hint = " (--port takes another)" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"cannot listen on {options.host}, port {options.port}: {error.strerror}{hint}"
        ) from error
    return listener


def hosts_of(options: ServerConfig, keys: Keys, listener: socket.socket) -> Hosts:
    """The hosts that a server on this socket answers as."""
    bound: str = listener.getsockname()[0]
    return Hosts.for_server(options.allowed_hosts, options.host, bound, keys.required)


async def start_state(
    options: ServerConfig, keys: Keys, hosts: Hosts, tracer: Tracer, progress: LoadProgress
) -> tuple[AsyncEngine, ServerState]:
    """Load the model and put what the routes need around it."""
    engine = await AsyncEngine.start(
        in_process=options.in_process,
        process=options.process,
        progress=progress,
        **options.engine.options() | {"tenant_weights": keys.weights() or None} | asdict(options.router),
    )
    state = ServerState(engine, options, keys, hosts, tracer)
    with contextlib.suppress(InflightError):  # whoever chats is told what is wrong
        await asyncio.to_thread(lambda: engine.frontend.chat_formats)
    return engine, state


async def _serve(options: ServerConfig, keys: Keys, hosts: Hosts, listeners: list[socket.socket]) -> bool:
    """Serve from the first moment on. False if it was told to stop before the model was there. Raises
    EngineDeadError once the engine is given up: whoever started the server can start another one, no one else can."""
    (listener,) = listeners
    tracer = tracer_of(options.otlp_traces_endpoint)
    server = Server(options)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: server.give_up())
    logger.debug("listening on %s, port %d, while the model loads", *listener.getsockname()[:2])
    try:
        loaded = await server.wait_for(start_state(options, keys, hosts, tracer, server.loading_app.progress))
        if loaded is None:
            return False
        engine, state = loaded
        watching = asyncio.create_task(server.watch(state))
        try:
            gc.collect()
            gc.freeze()  # what start-up made lives as long as the process: later collections need not look at it
            server.open(state)
            announce(state, listener.getsockname())
            await serving
            if watching.done():
                raise EngineDeadError(f"the engine was given up, and so the server ends: {watching.result()}")
        finally:
            watching.cancel()
            state.close()
            await engine.close()
    finally:
        server.should_exit = True
        await serving
    return True


def announce(state: ServerState, sockname: Any) -> None:
    """Print the startup banner, or log it where the log is JSON: one object per line."""
    text = banner(state, sockname)
    if state.options.process.log_format == "json":
        logger.info("%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


class Server(uvicorn.Server):
    """Stops in two steps: first it refuses new work and lets streams finish, then it closes."""

    def __init__(self, options: ServerConfig) -> None:
        self.loading_app = LoadingApp()
        self._loop = asyncio.get_running_loop()
        limits = ConnectionLimits(
            max_header_size=options.max_header_size,
            read_timeout=options.read_timeout,
            write_timeout=options.write_timeout,
            max_connections=fit_open_files(options.max_connections),
        )
        self._tls = tls_context(options)
        kind = BoundedProtocol if self._tls is None else TlsProtocol
        super().__init__(
            uvicorn.Config(
                self.loading_app
                if options.root_path is None
                else RootPath(self.loading_app, options.root_path),
                http=bounded_protocol(kind, limits, self._loop),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=2,
            )
        )
        self._state: ServerState | None = None
        self._loading: asyncio.Future[Any] | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None or sockets is None:
            await super().startup(sockets)
            return
        protocol: Any = self.config.http_protocol_class
        given = {
            "config": self.config,
            "server_state": self.server_state,
            "app_state": {},
            "_loop": self._loop,
        }
        make_protocol = partial(protocol, **given)
        self.servers: Any = [TlsListener(listener, self._tls, make_protocol) for listener in sockets]
        self.started = True

    async def wait_for(self, loading: Coroutine[Any, Any, T]) -> T | None:
        """What the loading gives; None if the server is told to stop first."""
        self._loading = task = asyncio.ensure_future(loading)
        try:
            return await task
        except asyncio.CancelledError:
            if not self.should_exit:
                raise
            return None

    def give_up(self) -> None:
        """No one waits for the model any more."""
        if self._loading is not None:
            self._loading.cancel()

    def open(self, state: ServerState, app: ASGIApp | None = None) -> None:
        """The model is there: let requests in, to this application or to one made for the state."""
        self._state = state
        self.loading_app.open(app or create_app(state))

    async def watch(self, state: ServerState) -> str:
        """End the server once the engine is dead for good, and say why it is. While it drains it ends anyway."""
        health = await state.client.health()
        while health.state != "dead" or state.draining:
            await asyncio.sleep(HEALTH_POLL)
            health = await state.client.health()
        self.should_exit = True
        return health.error or "no reason is known"

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Those of uvicorn, and the end of a terminal, unless it is ignored (nohup)."""
        before = signal.getsignal(signal.SIGHUP)
        is_wanted = threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN
        with super().capture_signals():
            if is_wanted:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if is_wanted:
                    signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal: drain; a second one: stop now."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begin to end. Called again, or while there is nothing to drain, end at once."""
        if self._state is None:
            self.should_exit = True
            self.give_up()
        elif self._drain is None:
            self._drain = self._loop.create_task(self._drain_and_exit(self._state))
        else:
            self._end_streams(self._state)
            self.should_exit = True

    async def _drain_and_exit(self, state: ServerState) -> None:
        state.draining = True
        seconds = state.options.shutdown_timeout
        logger.info("shutting down: %d requests may finish within %g s", len(state.request_log), seconds)
        try:
            async with asyncio.timeout(seconds):
                while len(state.request_log) and not self.should_exit:
                    await asyncio.sleep(POLL)
        except TimeoutError:
            logger.warning("%d requests did not finish in time and are ended", len(state.request_log))
        self._end_streams(state)
        self.should_exit = True

    def _end_streams(self, state: ServerState) -> None:
        for logged in state.request_log:
            logged.cancel_scope.end("shutdown")
