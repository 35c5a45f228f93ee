"""Waiting for conditions. Every test that polls does it here, with a limit that only a hang reaches."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from inflight.engine.stats import EngineStats

SECONDS = 120.0
PAUSE = 0.002


async def until(condition: Callable[[], Any], what: str = "a condition", seconds: float = SECONDS) -> Any:
    """Wait until the condition, which may be a coroutine function, holds, and return its value."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                value = condition()
                if inspect.isawaitable(value):
                    value = await value
                if value:
                    return value
                await asyncio.sleep(PAUSE)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


def wait_until(condition: Callable[[], Any], what: str = "a condition", seconds: float = SECONDS) -> Any:
    """Wait until the condition holds, and return its value, in a thread without an event loop."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(PAUSE)
    return value


class HasStats(Protocol):
    def stats(self) -> Awaitable[EngineStats]: ...


async def is_idle(engine: HasStats) -> bool:
    """Return whether no request is left in the engine, and all of its blocks are free."""
    stats = await engine.stats()
    return stats.num_running == stats.num_waiting == stats.kv.num_used == 0


async def until_idle(engine: HasStats) -> None:
    await until(lambda: is_idle(engine), "an idle engine")
