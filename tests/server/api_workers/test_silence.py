"""A silent API worker is killed, so that its replacement takes the connections that wait for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from inflight.server.access.keys import load_keys
from inflight.server.api_workers.pool import ApiWorkerPool
from inflight.server.config import ServerConfig


class SilentProcess:
    """A process that runs and sends nothing."""

    def __init__(self) -> None:
        self.exited, self.unread = asyncio.Event(), False
        self.reasons: list[str] = []

    async def send_first(self, _: Any) -> None:
        await self.exited.wait()

    async def receive(self, _: float) -> None:
        await asyncio.sleep(0.001)

    def kill(self, reason: str = "") -> None:
        self.reasons.append(reason)
        self.exited.set()


async def test_open_worker_is_killed_sooner_than_a_starting_one() -> None:
    options = ServerConfig.create(silent_after=0.01)
    listeners: Any = [None, None]
    pool = ApiWorkerPool(options, load_keys((), None), listeners)
    worker: Any = SimpleNamespace(process=SilentProcess(), is_open=False)
    assert pool._silence_limit(worker) == options.process.kill_silent_after == 60
    worker.is_open = True
    async with asyncio.timeout(60):
        await pool._follow(worker)
    assert "silent for too long" in worker.process.reasons[0]
