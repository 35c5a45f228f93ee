"""Where the news of one request waits for its reader."""

from __future__ import annotations

import asyncio

from inflight.events import Delta


def merge(earlier: Delta, later: Delta) -> Delta:
    """Two deltas of one request as one."""
    # The lists of the earlier one grow: a reader that never comes costs no copy per token.
    earlier.token_ids += later.token_ids
    later.token_ids = earlier.token_ids
    if earlier.logprobs is not None:
        earlier.logprobs += later.logprobs or []
        later.logprobs = earlier.logprobs
    later.prompt_logprobs = later.prompt_logprobs or earlier.prompt_logprobs
    return later


class Mailbox:
    """Holds at most one delta: what a slow reader has not taken is merged, so memory is bounded by the output
    itself and the engine never waits."""

    def __init__(self) -> None:
        self._pending: Delta | None = None
        self._ended = False
        self._arrived = asyncio.Event()

    def put(self, delta: Delta) -> None:
        if self._ended:  # an answer that is complete stays so, whatever happens to the engine
            return
        self._ended = delta.finish_reason is not None
        self._pending = delta if self._pending is None else merge(self._pending, delta)
        self._arrived.set()

    async def take(self) -> Delta:
        await self._arrived.wait()
        self._arrived.clear()
        delta, self._pending = self._pending, None
        assert delta is not None
        return delta
