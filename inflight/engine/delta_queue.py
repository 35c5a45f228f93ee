"""The queue in which the deltas of a request wait for their reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from inflight.events import Delta


def merge(earlier: Delta, later: Delta) -> Delta:
    """Return two consecutive deltas of one request as one."""
    # The earlier lists are extended in place, so a reader that never comes costs no copy per token.
    earlier.token_ids += later.token_ids
    later.token_ids = earlier.token_ids
    if earlier.logprobs is not None:
        earlier.logprobs += later.logprobs or []
        later.logprobs = earlier.logprobs
    later.vector = later.vector or earlier.vector
    later.prompt_logprobs = later.prompt_logprobs or earlier.prompt_logprobs
    return later


class DeltaQueue:
    """Holds at most one delta for a single reader.

    Deltas that a slow reader has not taken are merged, so memory is bounded by the output and the engine never waits.
    """

    def __init__(self) -> None:
        self._pending: Delta | None = None
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # resolved when there is something to take

    def put(self, delta: Delta) -> None:
        if self._ended:  # a complete output stays complete even if the engine fails
            return
        self._ended = delta.finish_reason is not None
        self._pending = delta if self._pending is None else merge(self._pending, delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the queue: the reader gets the pending delta, then the error."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> Delta:
        if self._pending is None and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        delta, self._pending = self._pending, None
        if delta is None:
            assert self._error is not None
            raise self._error
        return delta


class DeltaStream(AsyncGenerator[Delta]):
    """The deltas of one request. It is a class because a generator that was never started runs no clean-up."""

    def __init__(self, queue: DeltaQueue, leave: Callable[[bool], None]) -> None:
        self._queue = queue
        self._leave = leave  # called once, with whether the request is still running
        self._open = True

    async def asend(self, value: None) -> Delta:  # noqa: ARG002
        if not self._open:
            raise StopAsyncIteration
        try:
            delta = await self._queue.take()
        except BaseException:
            self._end(running=True)
            raise
        if delta.finish_reason is not None:
            self._end(running=False)
        return delta

    async def athrow(self, *error: Any) -> Delta:
        self._end(running=True)
        return await super().athrow(*error)

    async def aclose(self) -> None:
        self._end(running=True)

    def __del__(self) -> None:
        self._end(running=True)

    def _end(self, running: bool) -> None:
        if self._open:
            self._open = False
            self._leave(running)
