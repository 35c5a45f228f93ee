"""The seam between whoever serves and whoever computes: a handle on an engine, near or far."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from inflight.engine.core import EngineStats
from inflight.events import Delta
from inflight.request import Request


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine makes progress: it is idle, or its last step ended a short while ago."""

    healthy: bool
    seconds_since_step: float
    error: str | None = None


class EngineClient(Protocol):
    """Requests go in validated; deltas come out, the last one of each stream with a finish reason."""

    async def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError at once when the queue is at its limit."""

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        """The deltas of a request that was added, merged where the reader is slower than the engine. Leaving
        the iterator early aborts the request."""

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        """End a request; its stream ends with `reason` as finish reason. The number of KV blocks freed."""

    async def stats(self) -> EngineStats: ...

    async def health(self) -> Health: ...

    async def close(self) -> None: ...
