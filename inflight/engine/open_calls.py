"""Questions to an engine in another process, until they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inflight.engine.wire import Reply
from inflight.errors import EngineDeadError, QueueFullError

MAX_CALLS = 1 << 16  # unanswered at a time


class OpenCalls:
    """Each by its number."""

    def __init__(self) -> None:
        self._replies: dict[int, asyncio.Future[Reply]] = {}

    def __len__(self) -> int:
        return len(self._replies)

    async def ask(self, call: int, send: Callable[[], None]) -> Reply:
        """Send a question and wait. Raises what the engine answers with, and EngineDeadError if it does not."""
        if len(self._replies) >= MAX_CALLS:
            raise QueueFullError(f"{MAX_CALLS} calls to the engine are unanswered, which is the limit")
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        send()
        self._replies[call] = reply
        try:
            found = await reply
        finally:
            self._replies.pop(call, None)
        if found.remote_error is not None:
            raise found.remote_error.error()
        return found

    def answer(self, reply: Reply) -> None:
        waiting = self._replies.pop(reply.call, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    def end(self, reason: str) -> None:
        """No one will answer them."""
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
        self._replies.clear()
