"""The stream of one viewer: the past, then the present, from one engine or from several replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from inflight.engine.client import EngineClient
from inflight.engine.inproc import InprocClient
from inflight.router.router import Router
from inflight.timeline import stream as stream_module
from inflight.timeline.chunk_json import chunk_json
from inflight.timeline.chunks import MAX_KNOWN, Chunk, TimelinePage, TimelineQuery
from inflight.timeline.stream import ChunkConverter, Cut, TimelineStream
from tests.support.held_steps import held_steps
from tests.support.requests import FakeEngine, make_request
from tests.support.waiting import until
from tests.timeline.cells import Replay, cells_of, chunks_of


def client() -> InprocClient:
    engine = FakeEngine(num_blocks=400, max_num_seqs=16)
    engine.core.clock = time.monotonic
    return InprocClient(engine.core, engine.facts)


def viewer(source: EngineClient, replica: str | None = None) -> TimelineStream:
    converter = ChunkConverter(source, None, 0.0, asyncio.to_thread)
    return TimelineStream(source, converter, time.monotonic, replica)


async def past(stream: TimelineStream) -> list[dict[str, Any]]:
    return [json.loads(part.data) async for part in stream.past(0.0)]


async def generate(source: EngineClient, num_tokens: int, name: str | None = None) -> None:
    request = make_request([1, 2, 3], num_tokens, name)
    await source.add(request)
    async with contextlib.aclosing(source.stream(request.request_id)) as deltas:
        async for _ in deltas:
            pass


async def collect(
    stream: TimelineStream, since: float | None, num_finished: int, read: list[dict[str, Any]]
) -> None:
    """Read chunks until this many requests have finished."""
    num_ended = 0
    async with asyncio.timeout(60), contextlib.aclosing(stream.chunks(since, 1.0)) as chunks:
        async for chunk in chunks:
            if chunk is not None:
                read.append(json.loads(chunk.data))
                num_ended += sum(event["type"] == "finish" for event in read[-1]["events"])
            if num_ended >= num_finished:
                break


async def test_past_and_present_have_every_step_once() -> None:
    source = client()
    try:
        await generate(source, 50)
        read: list[dict[str, Any]] = []
        reading = asyncio.create_task(collect(viewer(source), 0.0, 3, read))
        await until(lambda: read, "the past")
        await asyncio.gather(generate(source, 300), generate(source, 200))
        await reading
    finally:
        await source.close()
    numbers = [number for chunk in read for number in chunk["steps"]["step"]]
    assert numbers == list(range(len(numbers)))
    cells = cells_of(run for chunk in read for run in chunk["runs"])
    assert len(cells) == len(set(cells))
    assert sum(cell.outputs for cell in cells) == 550


async def test_viewer_without_a_past_learns_who_is_running() -> None:
    source = client()
    try:
        with held_steps(source, 10):
            running = asyncio.create_task(generate(source, 380, "early"))
            await until(lambda: source._core._num_steps == 10, "ten steps")
            read: list[dict[str, Any]] = []
            reading = asyncio.create_task(collect(viewer(source), None, 1, read))
            await until(lambda: read, "who is running")
        await asyncio.gather(running, reading)
    finally:
        await source.close()
    assert [item["id"] for chunk in read for item in chunk["requests"]] == ["early"]
    assert read[0]["steps"]["step"] == []
    assert read[-1]["steps"]["step"]


async def test_slow_viewer_goes_on_with_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_PENDING_BYTES", 2000)
    source = client()
    try:
        stream = viewer(source)
        async with contextlib.aclosing(stream.chunks(None, 1.0)) as chunks:
            await anext(chunks)
            await generate(source, 390)
            now = time.monotonic()
            stream._clock = lambda: now + stream_module.RESUME_SECONDS  # it goes on from here
            for _ in range(3):
                await generate(source, 390)
            assert len(stream._pending) < 10, "what no one takes is not kept"
            read: list[dict[str, Any]] = []
            numbers: list[int] = []
            async with asyncio.timeout(60):
                while not numbers or numbers[-1] < 4 * 390 - 1:
                    chunk = await anext(chunks)
                    if chunk is not None:
                        read.append(json.loads(chunk.data))
                        numbers += read[-1]["steps"]["step"]
    finally:
        await source.close()
    assert sum(chunk.get("skipped", 0) for chunk in read) > 0
    assert numbers == sorted(set(numbers))


async def test_each_replica_has_its_own_lanes() -> None:
    engines: list[InprocClient] = []

    async def start(replica_id: str, beside: object = None) -> InprocClient:  # noqa: ARG001
        engines.append(client())
        return engines[-1]

    router = await Router.start(start, 2)
    try:
        await asyncio.gather(*(generate(router, 40, f"r{index}") for index in range(8)))
        read = await past(viewer(router))
        assert {chunk["replica"] for chunk in read} == {"0", "1"}
        outputs = sum(cell.outputs for cell in cells_of(run for chunk in read for run in chunk["runs"]))
        assert outputs == 320
        only = await past(viewer(router, "1"))
        assert {chunk["replica"] for chunk in only} == {"1"}
        live: list[dict[str, Any]] = []
        reading = asyncio.create_task(collect(viewer(router), None, 8, live))
        await until(lambda: all(engine._core.recorder.is_watched for engine in engines), "a viewer")
        await asyncio.gather(*(generate(router, 40) for _ in range(8)))
        await reading
        assert {chunk["replica"] for chunk in live if chunk["runs"]} == {"0", "1"}
        memory = await router.read_memory("1")
        assert len(memory.refs) == 4 * 400
    finally:
        await router.close()


async def test_known_requests_are_bounded() -> None:
    source = client()
    try:
        await generate(source, 3)
        (data,) = await past(viewer(source))
        assert data["requests"]
    finally:
        await source.close()
    recorder: Any = source._core.recorder
    known = set(range(100, 100 + 2 * MAX_KNOWN))  # of a reader that has seen many requests
    chunk_json(chunks_of(recorder)[0], "0", 0.0, known)
    assert len(known) <= MAX_KNOWN


def recorded_chunks(num_requests: int, num_tokens: int) -> list[Chunk]:
    """Return the chunks of requests that ran one after the other."""
    engine = FakeEngine(num_blocks=400, max_num_seqs=16)
    engine.core.record()
    for index in range(num_requests):
        engine.add(make_request([index, 2, 3], num_tokens))
        engine.run()
    recorder: Any = engine.core.recorder
    return chunks_of(recorder)


class Journal:
    """A converter's threads and pauses, which writes down what is done in which order."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.pauses: list[float] = []

    async def in_thread(self, function: Callable[[], Any]) -> Any:
        self.entries.append("work")
        return await asyncio.to_thread(function)

    async def pause(self, seconds: float) -> None:
        self.entries.append("pause")
        self.pauses.append(seconds)
        await asyncio.sleep(0)


async def test_viewers_of_a_key_share_one_conversion_of_each_chunk_with_pauses_between() -> None:
    chunks, journal = recorded_chunks(6, 300), Journal()
    source = Replay(chunks)
    converter = ChunkConverter(source, None, 0.0, journal.in_thread, journal.pause)
    streams = [TimelineStream(source, converter, time.monotonic) for _ in range(8)]
    read = await asyncio.gather(*map(past, streams))
    assert len(chunks) > 6
    assert journal.entries == ["pause", "work"] * len(chunks)
    assert journal.pauses[0] == 0.0
    assert all(seconds > 0 for seconds in journal.pauses[1:]), "as long as the work before"
    assert all(each == read[0] for each in read)
    assert sum(len(chunk["steps"]["step"]) for chunk in read[0]) == 1800


async def test_converted_chunks_are_kept_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_CONVERTED_BYTES", 100_000)
    chunks = recorded_chunks(6, 300)
    source = Replay(chunks)
    converter = ChunkConverter(source, None, 0.0, asyncio.to_thread)
    first = await past(TimelineStream(source, converter, time.monotonic))
    kept = [task.result() for task in converter._converted.values()]
    assert 0 < sum(len(chunk.body) for chunk in kept) < 100_000
    assert len(kept) < len(chunks)
    assert await past(TimelineStream(source, converter, time.monotonic)) == first


async def test_viewer_that_leaves_does_not_end_the_conversion_for_others() -> None:
    source = Replay(recorded_chunks(1, 30))
    began, may_end = asyncio.Event(), asyncio.Event()

    async def slowly(function: Callable[[], Any]) -> Any:
        began.set()
        await may_end.wait()
        return function()

    converter = ChunkConverter(source, None, 0.0, slowly)
    reading = [asyncio.create_task(past(TimelineStream(source, converter, time.monotonic))) for _ in range(2)]
    await began.wait()
    reading[0].cancel()
    may_end.set()
    assert await reading[1]
    with pytest.raises(asyncio.CancelledError):
        await reading[0]


class HeldPages(Replay):
    """A recording whose pages are read one by one, when the test says so."""

    def __init__(self, chunks: list[Chunk]) -> None:
        super().__init__(chunks)
        self.num_begun, self.may_end = 0, asyncio.Event()

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        self.num_begun += 1
        await self.may_end.wait()
        return await super().read_timeline(query)


async def leave(reading: asyncio.Task[Any]) -> None:
    """Cancel a reader once it waits."""
    for _ in range(10):  # turns of the event loop: nothing else happens until the test goes on
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_page_of_a_viewer_that_left_is_read_before_the_next_one() -> None:
    source = HeldPages(recorded_chunks(1, 30))
    converter = ChunkConverter(source, None, 0.0, asyncio.to_thread)
    for _ in range(20):
        leaving = asyncio.create_task(past(TimelineStream(source, converter, time.monotonic)))
        await leave(leaving)
    assert source.num_begun == 1, "the engine has one page of a key to read at a time"
    source.may_end.set()
    assert await past(TimelineStream(source, converter, time.monotonic))


async def test_viewers_that_left_leave_nothing_to_convert() -> None:
    source = Replay(recorded_chunks(1, 30))
    begun, may_end = 0, asyncio.Event()

    async def slowly(function: Callable[[], Any]) -> Any:
        nonlocal begun
        begun += 1
        await may_end.wait()
        return function()

    converter = ChunkConverter(source, None, 0.0, slowly)
    chunk = (await source.read_timeline(TimelineQuery(0.0, None))).chunks[0]
    for step in range(20):  # each wants another part of it
        leaving = asyncio.create_task(converter.convert(*chunk, Cut(0.0, step, 0)))
        await leave(leaving)
    assert begun == 1
    assert not converter._converted
    may_end.set()
    assert (await converter.convert(*chunk, Cut(0.0, 5, 0))).first_step == 5
    assert begun == 2
