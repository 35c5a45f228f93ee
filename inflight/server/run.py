"""Start the engine and the server, and stop both in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
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
from inflight.server.access.keys import Keys, load_keys
from inflight.server.access.middleware import Hosts, RootPath
from inflight.server.app import LoadingApp, create_app
from inflight.server.config import ServerConfig, tls_context
from inflight.server.http.limits import ConnectionLimits, fit_open_files
from inflight.server.http.protocol import BoundedProtocol, bounded_protocol
from inflight.server.http.tls import TlsListener, TlsProtocol
from inflight.server.observability.banner import announce
from inflight.server.observability.request_log import Tracer, tracer_of
from inflight.server.state import ServerState

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE = 75  # seconds before an idle connection is closed
POLL = 0.05
HEALTH_POLL = 0.5  # seconds between checks whether the engine is dead for good

T = TypeVar("T")


def run(options: ServerConfig, notes: Sequence[str] = ()) -> None:
    """Serve until a signal stops the server. `notes` are logged as warnings first."""
    configure_logging(options.log_level, options.process.log_format)
    for note in notes:
        logger.warning("%s", note)
    keys = load_keys(options.api_key, options.keys)
    keys.set_admin(options.admin_key)  # raises if it is not valid, before minutes of loading
    if len(set(keys.weights().values())) > 1 and options.policy != "fair":
        logger.warning(
            "keys have weights, but the policy is %s: only the fair policy uses them", options.policy
        )
    serve, listeners = _serve, [listen(options)]  # fails if the port is taken, before minutes of loading
    if options.api_workers > 1:
        from inflight.server.api_workers.main_process import (  # made of what is here
            listen_for_each,
            serve_with_workers,
        )

        serve, listeners = serve_with_workers, listen_for_each(options, listeners[0])
    try:
        hosts = hosts_of(options, keys, listeners[0])
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if not runner.run(serve(options, keys, hosts, listeners)):
                # A thread may still be loading. It cannot be interrupted, and returning would wait for it.
                logging.shutdown()
                os._exit(0)
    finally:
        for listener in listeners:
            listener.close()


def listen(options: ServerConfig) -> socket.socket:
    """Return a listening socket. Connections wait there until they are served."""
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listen at once: until then, another loading server could bind the address too.
        listener.listen(BACKLOG)
    except OSError as error:
        hint = " (choose another with --port)" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"cannot listen on {options.host}, port {options.port}: {error.strerror}{hint}"
        ) from error
    return listener


def hosts_of(options: ServerConfig, keys: Keys, listener: socket.socket) -> Hosts:
    """Return the hosts that a server on this socket accepts in the Host header."""
    bound: str = listener.getsockname()[0]
    return Hosts.for_server(options.allowed_hosts, options.host, bound, keys.required)


async def start_state(
    options: ServerConfig, keys: Keys, hosts: Hosts, tracer: Tracer, progress: LoadProgress
) -> tuple[AsyncEngine, ServerState]:
    """Load the model and build the state of the routes."""
    engine = await AsyncEngine.start(
        in_process=options.in_process,
        process=options.process,
        progress=progress,
        **options.engine.options() | {"tenant_weights": keys.weights() or None} | asdict(options.router),
    )
    state = ServerState(engine, options, keys, hosts, tracer)
    with contextlib.suppress(InflightError):  # chats then fail with the reason
        await asyncio.to_thread(lambda: engine.frontend.chat_formats)
    return engine, state


async def _serve(options: ServerConfig, keys: Keys, hosts: Hosts, listeners: list[socket.socket]) -> bool:
    """Serve, with 503 until the model is loaded. Return False if the server was stopped before that.

    Raises EngineDeadError when the engine is dead for good, so that a supervisor can restart the server.
    """
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
            gc.freeze()  # startup objects live as long as the process: collections can skip them
            server.open(state)
            announce(state, listener.getsockname())
            await serving
            if watching.done():
                raise EngineDeadError(f"the engine is dead and the server stops: {watching.result()}")
        finally:
            watching.cancel()
            state.close()
            await engine.close()
    finally:
        server.should_exit = True
        await serving
    return True


class Server(uvicorn.Server):
    """A server that stops in two steps: it refuses new work and lets streams finish, then it closes."""

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
        protocol = BoundedProtocol if self._tls is None else TlsProtocol
        super().__init__(
            uvicorn.Config(
                self.loading_app
                if options.root_path is None
                else RootPath(self.loading_app, options.root_path),
                http=bounded_protocol(protocol, limits, self._loop),
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
        make_protocol = partial(
            protocol, config=self.config, server_state=self.server_state, app_state={}, _loop=self._loop
        )
        self.servers: Any = [TlsListener(listener, self._tls, make_protocol) for listener in sockets]
        self.started = True

    async def wait_for(self, loading: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of loading, or None if the server is stopped first."""
        self._loading = task = asyncio.ensure_future(loading)
        try:
            return await task
        except asyncio.CancelledError:
            if not self.should_exit:
                raise
            return None

    def give_up(self) -> None:
        """Cancel loading."""
        if self._loading is not None:
            self._loading.cancel()

    def open(self, state: ServerState, app: ASGIApp | None = None) -> None:
        """Let requests in once the model is loaded, to this application or to one created for the state."""
        self._state = state
        self.loading_app.open(app or create_app(state))

    async def watch(self, state: ServerState) -> str:
        """Stop the server when the engine is dead for good, and return why. A draining server stops anyway."""
        health = await state.model.client.health()
        while health.state != "dead" or state.draining:
            await asyncio.sleep(HEALTH_POLL)
            health = await state.model.client.health()
        self.should_exit = True
        return health.error or "the reason is unknown"

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle uvicorn's signals, and SIGHUP unless it is ignored (nohup)."""
        before = signal.getsignal(signal.SIGHUP)
        handles_hangup = (
            threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN
        )
        with super().capture_signals():
            if handles_hangup:
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                if handles_hangup:
                    signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain on the first signal, stop at once on the second."""
        self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Start to drain. Stop at once if called again, or while there is nothing to drain."""
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
            logger.warning("%d requests did not finish in time and are aborted", len(state.request_log))
        self._end_streams(state)
        self.should_exit = True

    def _end_streams(self, state: ServerState) -> None:
        for logged in state.request_log:
            logged.interrupt("shutdown")
