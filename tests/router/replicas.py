"""Routers over the fake runner: with engines in this process, and with processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from inflight.config import EngineConfig, ProcessConfig, RouterConfig
from inflight.engine.inproc import InprocClient
from inflight.engine.remote.process_client import ProcessClient
from inflight.events import Delta
from inflight.request import Request
from inflight.router.router import Router
from inflight.router.start import start_router
from tests.engine.faulty import BUILD
from tests.support.processes import exists
from tests.support.requests import FakeEngine, make_request
from tests.support.waiting import until

QUICK = ProcessConfig(heartbeat=0.05, max_restarts=1000)


class Script:
    """Tells the next engine what to do at its start, and counts the engines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.model = f"script:{path}"
        self.say("")

    def say(self, fault: str) -> None:
        self._path.write_text(fault)

    @property
    def num_starts(self) -> int:
        return len(self._path.with_suffix(".starts").read_text().splitlines())


@contextlib.asynccontextmanager
async def in_process(
    count: int, routing: str = "prefix_aware", **options: Any
) -> AsyncIterator[tuple[Router, list[FakeEngine]]]:
    """A router over engines in threads of this process."""
    engines: list[FakeEngine] = []

    async def start(replica_id: str, beside: object = None) -> InprocClient:  # noqa: ARG001
        engine = FakeEngine(**options)
        engines.append(engine)
        return InprocClient(engine.core, engine.facts)

    router = await Router.start(start, count, routing)
    try:
        yield router, engines
    finally:
        await router.close()


@contextlib.asynccontextmanager
async def processes(
    count: int, process: ProcessConfig = QUICK, patience: float = 60.0, **options: Any
) -> AsyncIterator[Router]:
    """A router over engine processes, which must leave nothing behind."""
    config = EngineConfig.create(**({"model": "faulty"} | options))
    routing = RouterConfig(replicas=count, failover_timeout=patience)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with asyncio.timeout(120):
        router = await start_router(config, routing, process, build=BUILD)
        try:
            yield router
        finally:
            await router.close()
    await asyncio.sleep(0)
    assert router._requests == {}
    for replica in router.replicas.members:
        assert not replica.requests
        assert not exists(process_id(replica.client))
    assert complaints == []


def process_id(client: Any) -> int:
    assert isinstance(client, ProcessClient)
    process_id = client.process_id
    assert process_id is not None
    return process_id


async def lose(router: Router, replica_id: str) -> None:
    """Kill a replica's process and wait until the router has noticed. No other engine can be there yet."""
    lost, on_loss = asyncio.Event(), router.replicas._on_loss

    def note(*args: Any) -> None:
        on_loss(*args)
        lost.set()

    router.replicas._on_loss = note
    strike(router, replica_id)
    await lost.wait()
    router.replicas._on_loss = on_loss


def strike(router: Router, replica_id: str, number: int = signal.SIGKILL) -> None:
    """Send a replica's process a signal."""
    os.kill(process_id(router.replicas.find(replica_id).client), number)


async def until_all_run(router: Router) -> None:
    await until(lambda: all(replica.available for replica in router.replicas.members))


async def read(router: Router, request: Request) -> tuple[list[int], Delta]:
    """All tokens of a request, and its last delta."""
    await router.add(request)
    tokens: list[int] = []
    async for delta in router.stream(request.request_id):
        tokens += delta.token_ids
    return tokens, delta


async def answer(router: Router, prompt: list[int], count: int) -> list[int]:
    return (await read(router, make_request(prompt, count)))[0]
