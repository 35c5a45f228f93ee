"""The main process of a server with several front processes: it has the engines, and speaks no HTTP itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable

from inflight.errors import EngineDeadError
from inflight.server.access.keys import Keys
from inflight.server.access.middleware import Hosts
from inflight.server.api_workers.fronts import EXIT_SECONDS, Fronts
from inflight.server.config import ServerConfig
from inflight.server.observability.tracing import NoTracer
from inflight.server.run import BACKLOG, announce, start_state
from inflight.server.state import ServerState

logger = logging.getLogger(__name__)

POLL = 0.02
HEALTH_POLL = 0.5  # seconds between two looks at how the engines do


def listen_for_each(options: ServerConfig, probe: socket.socket) -> list[socket.socket]:
    """A socket for each front process, all on one address: the system spreads connections over them. Each holds those
    that wait for its process, be it a later one. `probe` has shown that the address is free, and gives it up."""
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


async def serve_fronts(
    options: ServerConfig, keys: Keys, hosts: Hosts, listeners: list[socket.socket]
) -> bool:
    """Serve until told to stop. False if that was before the model was there. Raises EngineDeadError once the engine,
    or a front process, is given up."""
    fronts = Fronts(options, keys, listeners)
    told = StopSignals()
    running = asyncio.create_task(fronts.run())
    loop = asyncio.get_running_loop()

    def progress(num_done: int, num_total: int) -> None:
        loop.call_soon_threadsafe(fronts.progress, num_done, num_total)

    try:
        loading = asyncio.create_task(start_state(options, keys, hosts, NoTracer(), progress))
        if not await _finishes_first(loading, running, told):
            return False
        engine, state = loading.result()
        try:
            await fronts.open(state)
            while not fronts.are_open and not running.done():
                await asyncio.sleep(POLL)
            announce(state, listeners[0].getsockname())
            await _watch(fronts, state, running, told)
        finally:
            state.close()
            await engine.close()
    finally:
        told.close()
        fronts.stop()
        await asyncio.gather(running, return_exceptions=True)
    return True


async def _finishes_first(
    loading: asyncio.Task[object], running: asyncio.Task[None], told: StopSignals
) -> bool:
    """Whether the engine is there before anyone wants the end. Raises what went wrong."""
    stopping = asyncio.create_task(told.wait())
    try:
        await asyncio.wait((loading, running, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
    if running.done():
        running.result()
    return not loading.cancelled()


async def _watch(fronts: Fronts, state: ServerState, running: asyncio.Task[None], told: StopSignals) -> None:
    """Until all front processes have ended, as they were told to. Raises EngineDeadError if the engine is given up."""
    while not running.done() and not told.times:
        health = await state.client.health()
        if health.state == "dead":
            reason = health.error or "no reason is known"
            raise EngineDeadError(f"the engine was given up, and so the server ends: {reason}")
        await fronts.tell_health(state)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_POLL):
                await _first(running, told.wait)
    if not running.done():
        await _drain(fronts, state, running, told)
    running.result()


async def _drain(fronts: Fronts, state: ServerState, running: asyncio.Task[None], told: StopSignals) -> None:
    """The front processes end by themselves, within the time that their requests have; at once when told again."""
    state.draining = True
    fronts.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(state.options.shutdown_timeout + EXIT_SECONDS):
            await _first(running, told.wait)
            if not running.done():
                fronts.drain()
                await asyncio.wait((running,), timeout=EXIT_SECONDS)
    fronts.stop()
    await asyncio.wait((running,))


async def _first(running: asyncio.Task[None], wait: Callable[[], Awaitable[None]]) -> None:
    other = asyncio.ensure_future(wait())
    try:
        await asyncio.wait((running, other), return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()


class StopSignals:
    """Ctrl-C, SIGTERM and, unless it is ignored, the end of the terminal."""

    def __init__(self) -> None:
        self.times = 0  # that one came
        self._came = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._taken = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._taken.append(signal.SIGHUP)
        for number in self._taken:
            self._loop.add_signal_handler(number, self._come)

    def _come(self) -> None:
        self.times += 1
        self._came.set()

    async def wait(self) -> None:
        """For one that no one has waited for yet."""
        await self._came.wait()
        self._came.clear()

    def close(self) -> None:
        for number in self._taken:
            self._loop.remove_signal_handler(number)
