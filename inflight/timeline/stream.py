"""The past and the present of a timeline for one viewer, each step exactly once."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from inflight.errors import EngineDeadError
from inflight.timeline.chunks import (
    Chunk,
    RecordedRequest,
    TimelinePage,
    TimelineQuery,
    chunk_json,
    decode_chunk,
)
from inflight.timeline.recorder import NUMBERS_PER_GENERATION

MAX_PENDING_BYTES = 4 << 20  # of chunks that a slow viewer has not taken
RESUME_SECONDS = 2.0  # a viewer that was too slow goes on with the last seconds


class TimelineSource(Protocol):
    """The part of an engine client that a viewer needs."""

    def watch_timeline(self, observer: Callable[[str, bytes], None]) -> Callable[[], None]: ...

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage: ...


class TimelineStream:
    """The chunks for one viewer. Those that it does not take in time are left out."""

    def __init__(
        self,
        source: TimelineSource,
        sees: Callable[[RecordedRequest], bool],
        clock: Callable[[], float],
        to_unix: float,
        replica: str | None = None,
    ) -> None:
        """`sees` returns whether the viewer may know a request; `to_unix` is added to times of `clock`."""
        self._source = source
        self._sees = sees
        self._clock = clock
        self._to_unix = to_unix
        self._replica = replica
        self._pending: list[tuple[str, bytes]] = []
        self._num_pending_bytes = 0
        self._is_behind = False  # chunks were left out
        self._arrived = asyncio.Event()
        self._known: dict[str, set[int]] = {}  # request numbers that were sent, by replica
        # The next step and event, by replica and generation of its engine.
        self._next: dict[tuple[str, int], tuple[int, int]] = {}

    async def chunks(self, since: float | None, idle: float) -> AsyncGenerator[dict[str, Any] | None]:
        """Yield chunks as JSON, beginning with those since a moment or, without one, with what happens from now on.

        Yield None after `idle` seconds without a chunk.
        """
        stop = self._source.watch_timeline(self._put)
        try:
            async for chunk in self.past(self._clock() if since is None else since):
                yield chunk
            while True:
                try:
                    async with asyncio.timeout(idle):
                        await self._arrived.wait()
                except TimeoutError:
                    yield None
                    continue
                self._arrived.clear()
                pending, self._pending, self._num_pending_bytes = self._pending, [], 0
                decoded = [(replica, decode_chunk(data)) for replica, data in pending]
                if self._is_behind or any(self._misses(*item) for item in decoded):
                    self._is_behind = False
                    async for chunk in self.past(self._clock() - RESUME_SECONDS):
                        yield chunk
                for replica, latest in decoded:
                    shown = self._show(replica, latest)
                    if shown is not None:
                        yield shown
        finally:
            stop()

    def _put(self, replica: str, data: bytes) -> None:
        if self._replica not in (None, replica):
            return
        self._pending.append((replica, data))
        self._num_pending_bytes += len(data)
        if self._num_pending_bytes > MAX_PENDING_BYTES:
            self._pending, self._num_pending_bytes, self._is_behind = [], 0, True
        self._arrived.set()

    async def past(self, since: float) -> AsyncGenerator[dict[str, Any]]:
        """Yield what was recorded since a moment and has not been yielded."""
        query = TimelineQuery(since, None, self._replica)
        while True:
            page = TimelinePage([], {})
            with contextlib.suppress(EngineDeadError):
                page = await self._source.read_timeline(query)
            for replica, data in page.chunks:
                chunk = await asyncio.to_thread(decode_chunk, data)
                shown = self._show(replica, _since(chunk, since), is_first=True)
                if shown is not None:
                    yield shown
            if not page.positions:
                return
            query = TimelineQuery(since, page.positions, self._replica)

    def _misses(self, replica: str, chunk: Chunk) -> bool:
        """Return whether steps before a chunk are missing."""
        step, _ = self._next.get(_engine(replica, chunk), (chunk.first_step, 0))
        return chunk.first_step > step

    def _show(self, replica: str, chunk: Chunk, is_first: bool = False) -> dict[str, Any] | None:
        """Return the part of a chunk that was not shown yet, or None. `is_first`: new descriptions suffice."""
        engine = _engine(replica, chunk)
        known = self._known.setdefault(replica, set())
        is_new = engine not in self._next
        step, event = self._next.get(engine, (chunk.first_step, chunk.first_event))
        skipped = max(0, chunk.first_step - step)
        chunk = chunk.after(step, event)._replace(skipped=skipped)
        self._next[engine] = max(step, chunk.end_step), max(event, chunk.end_event)
        has_news = is_first and any(info.number not in known for info in chunk.requests)
        if not chunk.num_steps and not chunk.events and not has_news and not is_new:
            return None
        return chunk_json(chunk, replica, self._to_unix, self._sees, known)


def _engine(replica: str, chunk: Chunk) -> tuple[str, int]:
    return replica, chunk.first_step // NUMBERS_PER_GENERATION


def _since(chunk: Chunk, since: float) -> Chunk:
    """Return the part of a chunk since a moment."""
    step = chunk.first_step + bisect_left(chunk.times, since)
    event = next((index for index, event in enumerate(chunk.events) if event.at >= since), len(chunk.events))
    return chunk.after(step, chunk.first_event + event)
