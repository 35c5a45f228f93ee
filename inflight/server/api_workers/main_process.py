"""The main process of a server with API workers: it runs the engines, and no HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any

from inflight.errors import EngineDeadError
from inflight.server.access.keys import Keys
from inflight.server.access.middleware import Hosts
from inflight.server.api_workers.pool import EXIT_SECONDS, ApiWorkerPool
from inflight.server.config import ServerConfig
from inflight.server.observability.banner import announce
from inflight.server.observability.request_log import Tracer
from inflight.server.run import BACKLOG, start_state
from inflight.server.state import ServerState

logger = logging.getLogger(__name__)

POLL = 0.02
HEALTH_POLL = 0.5  # seconds between two health checks of the engines


def listen_for_each(options: ServerConfig, probe: socket.socket) -> list[socket.socket]:
    """Return a socket for each API worker, all on one address: the kernel spreads connections over them. Connections
    that wait in a socket survive a restart of its worker. `probe`, which holds the address until now, is closed."""
    family, address = probe.family, probe.getsockname()
    probe.close()
    listeners = []
    for _ in range(options.api_workers):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listeners.append(listener)
    return listeners


async def serve_with_workers(
    options: ServerConfig, keys: Keys, hosts: Hosts, listeners: list[socket.socket]
) -> bool:
    """Serve until a stop signal. Return False if it came before the model was loaded. Raises EngineDeadError if the
    engine, or an API worker, ended too often."""
    with _stop_signals() as stop:
        return await _serve_until(stop, options, keys, hosts, listeners)


async def _serve_until(
    stop: asyncio.Event, options: ServerConfig, keys: Keys, hosts: Hosts, listeners: list[socket.socket]
) -> bool:
    workers = ApiWorkerPool(options, keys, listeners)
    running = asyncio.create_task(workers.run())
    loop = asyncio.get_running_loop()

    def progress(num_done: int, num_total: int) -> None:
        loop.call_soon_threadsafe(workers.progress, num_done, num_total)

    try:
        loading = asyncio.create_task(start_state(options, keys, hosts, Tracer(), progress))
        try:
            await _first(stop, running, loading)
        finally:
            if not loading.done():
                loading.cancel()
                await asyncio.gather(loading, return_exceptions=True)
        if running.done():
            running.result()  # raises the error of a worker that failed
        if loading.cancelled():
            return False
        engine, state = loading.result()
        try:
            await workers.open(state)
            while not workers.are_open and not running.done():
                await asyncio.sleep(POLL)
            announce(state, listeners[0].getsockname())
            await _watch(workers, state, running, stop)
        finally:
            state.close()
            await engine.close()
    finally:
        workers.stop()
        await asyncio.gather(running, return_exceptions=True)
    return True


async def _watch(
    workers: ApiWorkerPool, state: ServerState, running: asyncio.Task[None], stop: asyncio.Event
) -> None:
    """Watch the engine until all workers have ended. Raises EngineDeadError if the engine is dead."""
    while not running.done() and not stop.is_set():
        health = await state.model.client.health()
        if health.state == "dead":
            reason = health.error or "the reason is unknown"
            raise EngineDeadError(f"the engine is dead and the server stops: {reason}")
        await workers.send_health(state)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_POLL):
                await _first(stop, running)
    if not running.done():
        await _drain(workers, state, running, stop)
    running.result()


async def _drain(
    workers: ApiWorkerPool, state: ServerState, running: asyncio.Task[None], stop: asyncio.Event
) -> None:
    """Let the workers finish their requests within the shutdown timeout; a second signal ends them at once."""
    state.draining = True
    stop.clear()
    workers.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(state.options.shutdown_timeout + EXIT_SECONDS):
            await _first(stop, running)
            if not running.done():
                workers.drain()
                await asyncio.wait((running,), timeout=EXIT_SECONDS)
    workers.stop()
    await asyncio.wait((running,))


async def _first(stop: asyncio.Event, *tasks: asyncio.Task[Any]) -> None:
    """Wait until one of the tasks is done or a signal comes."""
    signal_task = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((*tasks, signal_task), return_when=asyncio.FIRST_COMPLETED)
    finally:
        signal_task.cancel()


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGINT, SIGTERM and, unless it is ignored, SIGHUP set."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
