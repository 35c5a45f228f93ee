"""Ends the waiting of one generation: its time is over, its client has gone, or the server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Literal

from starlette.types import Receive

Reason = Literal["first_token", "request", "disconnect", "cancelled", "shutdown"]


class CancelScope:
    """A context whose content is interrupted with TimeoutError; `reason` then says why.

    The client is watched by a task of its own, which costs nothing while tokens flow.
    """

    def __init__(self, receive: Receive, first_token_timeout: float, request_timeout: float) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._ends_at = self._loop.time() + request_timeout
        first = self._loop.time() + first_token_timeout
        self.reason: Reason = "first_token" if first < self._ends_at else "request"
        self._timeout = asyncio.timeout_at(min(first, self._ends_at))
        self._watcher: asyncio.Task[None] | None = None
        self._ended = False

    async def __aenter__(self) -> CancelScope:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ended = True
        if self._watcher is not None:
            if self.reason == "disconnect":
                await self._watcher  # it is about to hear what the client's end has freed
            else:
                self._watcher.cancel()
        await self._timeout.__aexit__(*error)  # type: ignore[arg-type]

    def watch(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Look out for the client's end from now on; then `leave`, and interrupt. The body must have been read."""
        self._watcher = self._loop.create_task(self._watch(leave))

    async def _watch(self, leave: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._ended:
                self.reason = "disconnect"
                await leave()
                self.end("disconnect")

    def first_token(self) -> None:
        """From now on only the whole request's time counts."""
        if self.reason == "first_token":
            self.reason = "request"
            self._timeout.reschedule(self._ends_at)

    def end(self, reason: Reason) -> None:
        """Interrupt now."""
        if not self._ended:
            self._ended = True
            self.reason = reason
            self._timeout.reschedule(self._loop.time())
