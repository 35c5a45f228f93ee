"""A front process that says nothing any more: killed, so that another one takes the connections that wait for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from inflight.server.access.keys import load_keys
from inflight.server.api_workers.fronts import Fronts
from inflight.server.config import ServerConfig


class SilentProcess:
    """Is there, and says nothing."""

    def __init__(self) -> None:
        self.exited, self.unread = asyncio.Event(), False
        self.reasons: list[str] = []

    async def greet(self, _: Any) -> None:
        await self.exited.wait()

    async def receive(self, _: float) -> None:
        await asyncio.sleep(0.001)

    def kill(self, reason: str = "") -> None:
        self.reasons.append(reason)
        self.exited.set()


async def test_one_that_is_open_is_soon_given_up_and_one_that_starts_is_not() -> None:
    options = ServerConfig.create(silent_after=0.01)
    listeners: Any = [None, None]
    fronts = Fronts(options, load_keys((), None), listeners)
    front: Any = SimpleNamespace(process=SilentProcess(), is_open=False)
    assert fronts._patience_with(front) == options.process.kill_silent_after == 60
    front.is_open = True
    async with asyncio.timeout(60):
        await fronts._follow(front)
    assert "silent for too long" in front.process.reasons[0]
