"""Interrupts a request: on a timeout, when its client disconnects, or when the server shuts down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Literal

from starlette.types import Receive

Reason = Literal["first_token", "request", "disconnect", "cancelled", "shutdown"]


class CancelScope:
    """A context that may be interrupted with TimeoutError; `reason` then says why.

    A task of its own waits for the client to disconnect, so that this costs nothing while tokens flow.
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
                await self._watcher  # it counts the blocks that the abort frees
            else:
                self._watcher.cancel()
        await self._timeout.__aexit__(*error)  # type: ignore[arg-type]

    def watch(self, on_disconnect: Callable[[], Awaitable[None]]) -> None:
        """When the client disconnects, await `on_disconnect` and interrupt. The body must have been read."""
        self._watcher = self._loop.create_task(self._watch(on_disconnect))

    async def _watch(self, on_disconnect: Callable[[], Awaitable[None]]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await self._receive())["type"] != "http.disconnect":
                pass
            if not self._ended:
                self.reason = "disconnect"
                await on_disconnect()
                self.end("disconnect")

    def first_token(self) -> None:
        """Drop the timeout of the first token: from now on, only that of the whole request applies."""
        if self.reason == "first_token":
            self.reason = "request"
            self._timeout.reschedule(self._ends_at)

    def end(self, reason: Reason) -> None:
        """Interrupt the request now."""
        if not self._ended:
            self._ended = True
            self.reason = reason
            self._timeout.reschedule(self._loop.time())
