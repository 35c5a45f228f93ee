"""The past and the present of a timeline for one viewer, each step exactly once.

engine ─► TimelineStream, one for each viewer ─► parts of `GET /v1/steps`
                └── ChunkConverter, one for all viewers of a key: each chunk becomes JSON once
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from inflight.errors import EngineDeadError
from inflight.timeline.chunk_json import chunk_json
from inflight.timeline.chunks import (
    ENDS,
    Chunk,
    RecordedRequest,
    TimelinePage,
    TimelineQuery,
    decode_chunk,
    forget_old,
)
from inflight.timeline.recorder import NUMBERS_PER_GENERATION

T = TypeVar("T")

MAX_PENDING_BYTES = 4 << 20  # of chunks that a slow viewer has not taken
RESUME_SECONDS = 2.0  # a viewer that was too slow goes on with the last seconds
MAX_CONVERTED_BYTES = 8 << 20  # of chunks that a converter keeps for the other viewers of its key


class TimelineSource(Protocol):
    """The part of an engine client that a viewer needs."""

    def watch_timeline(self, observer: Callable[[str, bytes], None]) -> Callable[[], None]: ...

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage: ...


class Cut(NamedTuple):
    """Leaves out the steps and events before a moment, before a step, and before an event."""

    since: float
    step: int
    event: int


class ConvertedChunk(NamedTuple):
    """A chunk as JSON. `requests` are apart, because each viewer is sent only those that it does not know."""

    first_step: int
    end_step: int
    first_event: int
    end_event: int
    began_at: float  # the first step or event
    body: bytes  # a JSON object without requests and without its closing brace
    has_events: bool
    requests: dict[int, bytes]  # by number
    ended: frozenset[int]

    def part(self, replica: str, known: set[int], skipped: int) -> TimelinePart:
        """Return the JSON for a viewer who knows some of the requests."""
        descriptions = [data for number, data in self.requests.items() if number not in known]
        left_out = b',"skipped":%d' % skipped if skipped else b""
        data = b'%b,"requests":[%b]%b}' % (self.body, b",".join(descriptions), left_out)
        return TimelinePart(replica, self.end_step - 1 if self.end_step > self.first_step else -1, data)


class TimelinePart(NamedTuple):
    """A chunk for one viewer."""

    replica: str
    last_step: int  # -1: it has none
    data: bytes  # JSON


class ChunkConverter:
    """Turns chunks into JSON for the viewers of one key: each chunk once, one at a time, with a pause before each.

    A chunk is a bounded amount of work. It is done outside the event loop, and each pause is as long as the work before
    it took, so that a key's viewers never keep more than half a processor busy, however many there are. Viewers who
    leave take their place in the queue with them, but the next piece of work waits until the one that began has ended.
    """

    def __init__(
        self,
        source: TimelineSource,
        sees: Callable[[RecordedRequest], bool] | None,
        to_unix: float,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`sees` returns whether the key may know a request; None: it may know all. `to_unix` is added to all times."""
        self._source = source
        self._sees = sees
        self._to_unix = to_unix
        self._in_thread = in_thread
        self._pause = pause
        self._rest = 0.0  # seconds of a processor that the last work took
        self._working, self._reading = asyncio.Lock(), asyncio.Lock()
        self._visible: dict[str, set[int]] = {}  # numbers of the requests that the key may know, by replica
        self._converted: OrderedDict[object, asyncio.Task[ConvertedChunk]] = OrderedDict()
        self._waiting: Counter[object] = Counter()  # viewers of a chunk that is being converted
        self._sizes: dict[object, int] = {}  # bytes of those that are done
        self._num_bytes = 0

    async def read(self, query: TimelineQuery) -> TimelinePage:
        """Return a page of the past, which is empty if the engine is gone."""
        with contextlib.suppress(EngineDeadError):
            await self._reading.acquire()
            return await _finish(self._reading, self._source.read_timeline(query))
        return TimelinePage([], {})

    async def convert(self, replica: str, data: bytes, cut: Cut | None = None) -> ConvertedChunk:
        """Return an encoded chunk as JSON."""
        key = replica, data, cut
        task = self._converted.get(key)
        if task is None:
            task = asyncio.ensure_future(self.work(lambda: self._convert(replica, data, cut)))
            self._converted[key] = task
            task.add_done_callback(lambda done: self._keep(key, done))
        self._converted.move_to_end(key)
        self._waiting[key] += 1
        try:
            return await asyncio.shield(task)  # other viewers may wait for it too
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                if not task.done():
                    del self._converted[key]
                    task.cancel()

    async def work(self, function: Callable[[], T]) -> T:
        """Do a bounded piece of work for the key in a thread, after a pause."""

        def timed() -> T:
            began = time.thread_time()
            try:
                return function()
            finally:
                self._rest = time.thread_time() - began

        await self._working.acquire()
        try:
            await self._pause(self._rest)
        except BaseException:
            self._working.release()
            raise
        return await _finish(self._working, self._in_thread(timed))

    def _keep(self, key: tuple[str, bytes, Cut | None], task: asyncio.Task[ConvertedChunk]) -> None:
        """Keep a converted chunk, and drop the ones that were used longest ago."""
        if task.cancelled():  # by its last viewer, who has removed it
            return
        if task.exception() is not None:
            del self._converted[key]
            return
        result = task.result()
        self._sizes[key] = len(key[1]) + len(result.body) + sum(map(len, result.requests.values()))
        self._num_bytes += self._sizes[key]
        while self._num_bytes > MAX_CONVERTED_BYTES:
            oldest = next(key for key in self._converted if key in self._sizes)
            del self._converted[oldest]
            self._num_bytes -= self._sizes.pop(oldest)

    def _convert(self, replica: str, data: bytes, cut: Cut | None) -> ConvertedChunk:
        import msgspec

        chunk = decode_chunk(data)
        visible: set[int] | None = None
        if self._sees is not None:
            visible = self._visible.setdefault(replica, set())
            visible.update(info.number for info in chunk.requests if self._sees(info))
            forget_old(visible)
        if cut is not None:
            chunk = _since(chunk, cut.since).after(cut.step, cut.event)
        began_at = min([*chunk.times[:1], *(event.at for event in chunk.events[:1])], default=math.inf)
        result = chunk_json(chunk._replace(skipped=0), replica, self._to_unix, set(), visible)
        encode = msgspec.json.encode
        return ConvertedChunk(
            *(chunk.first_step, chunk.end_step, chunk.first_event, chunk.end_event, began_at),
            requests={request["number"]: encode(request) for request in result.pop("requests")},
            ended=frozenset(event["request"] for event in result["events"] if event["type"] in ENDS),
            has_events=bool(result["events"]),
            body=encode(result)[:-1],
        )


class TimelineStream:
    """The chunks for one viewer. Those that it does not take in time are left out."""

    def __init__(
        self,
        source: TimelineSource,
        converter: ChunkConverter,
        clock: Callable[[], float],
        replica: str | None = None,
    ) -> None:
        self._source = source
        self._converter = converter
        self._clock = clock
        self._replica = replica
        self._pending: list[tuple[str, bytes]] = []
        self._num_pending_bytes = 0
        self._is_behind = False  # chunks were left out
        self._arrived = asyncio.Event()
        self._known: dict[str, set[int]] = {}  # request numbers that were sent, by replica
        # The next step and event, by replica and generation of its engine.
        self._next: dict[tuple[str, int], tuple[int, int]] = {}
        self._idle: dict[tuple[str, int], TimelinePart] = {}  # of engines that did nothing: what they are

    async def chunks(self, since: float | None, idle: float) -> AsyncGenerator[TimelinePart | None]:
        """Yield chunks, beginning with those since a moment or, without one, with what happens from now on.

        Yield None after `idle` seconds without a chunk.
        """
        stop = self._source.watch_timeline(self._put)
        try:
            async for part in self.past(self._clock() if since is None else since):
                yield part
            while True:
                try:
                    async with asyncio.timeout(idle):
                        await self._arrived.wait()
                except TimeoutError:
                    yield None
                    continue
                self._arrived.clear()
                pending, self._pending, self._num_pending_bytes = self._pending, [], 0
                is_behind, self._is_behind = self._is_behind, False
                for replica, data in pending:
                    if is_behind or await self._misses(replica, data):
                        is_behind = False
                        async for part in self.past(self._clock() - RESUME_SECONDS):
                            yield part
                    latest = await self._show(replica, data)
                    if latest is not None:
                        yield latest
        finally:
            stop()

    def _put(self, replica: str, data: bytes) -> None:
        if self._replica not in (None, replica):
            return
        self._pending.append((replica, data))
        self._num_pending_bytes += len(data)
        if self._num_pending_bytes > MAX_PENDING_BYTES:
            self._pending, self._num_pending_bytes = [(replica, data)], len(data)
            self._is_behind = True
        self._arrived.set()

    async def past(self, since: float) -> AsyncGenerator[TimelinePart]:
        """Yield what was recorded since a moment and has not been yielded."""
        query = TimelineQuery(since, None, self._replica)
        while True:
            page = await self._converter.read(query)
            for replica, data in page.chunks:
                part = await self._show(replica, data, since)
                if part is not None:
                    yield part
            if not page.positions:
                break
            query = TimelineQuery(since, page.positions, self._replica)
        for part in self._idle.values():
            yield part
        self._idle.clear()

    async def _misses(self, replica: str, data: bytes) -> bool:
        """Return whether steps before a chunk are missing."""
        chunk = await self._converter.convert(replica, data)
        step, _ = self._next.get(_engine(replica, chunk), (chunk.first_step, 0))
        return chunk.first_step > step

    async def _show(self, replica: str, data: bytes, since: float | None = None) -> TimelinePart | None:
        """Return the part of a chunk that was not shown yet, or None. With `since`, which a chunk of the past has, new
        descriptions suffice."""
        chunk = await self._converter.convert(replica, data)
        engine, known = _engine(replica, chunk), self._known.setdefault(replica, set())
        is_new = engine not in self._next
        step, event = self._next.get(engine, (chunk.first_step, chunk.first_event))
        if since is None and not is_new and chunk.end_step <= step and chunk.end_event <= event:
            return None
        # What the chunk does not have need not be cut: so viewers share what was converted.
        begin = -math.inf if since is None or since <= chunk.began_at else since
        cut = Cut(begin, max(step, chunk.first_step), max(event, chunk.first_event))
        if cut != (-math.inf, chunk.first_step, chunk.first_event):
            chunk = await self._converter.convert(replica, data, cut)
        skipped = 0 if is_new else max(0, chunk.first_step - step)
        self._next[engine] = max(step, chunk.end_step), max(event, chunk.end_event)
        has_news = since is not None and not known.issuperset(chunk.requests)
        part = chunk.part(replica, known, skipped)
        known.update(chunk.requests)
        known -= chunk.ended
        forget_old(known)
        if chunk.end_step > chunk.first_step or chunk.has_events or has_news:
            self._idle.pop(engine, None)
            return part
        if is_new:
            self._idle[engine] = part
        return None


async def _finish(lock: asyncio.Lock, work: Awaitable[T]) -> T:
    """Return the result of work that holds a lock. It is released when the work ends, not when its caller leaves."""
    begun = asyncio.ensure_future(work)
    begun.add_done_callback(lambda _: lock.release())
    return await asyncio.shield(begun)


def _engine(replica: str, chunk: ConvertedChunk) -> tuple[str, int]:
    return replica, chunk.first_step // NUMBERS_PER_GENERATION


def _since(chunk: Chunk, since: float) -> Chunk:
    """Return the part of a chunk since a moment."""
    step = chunk.first_step + bisect_left(chunk.times, since)
    event = next((index for index, event in enumerate(chunk.events) if event.at >= since), len(chunk.events))
    return chunk.after(step, chunk.first_event + event)
