"""What one viewer gets: the past, then the present, from one engine or from several replicas."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from inflight.engine import EngineClient, InprocClient
from inflight.router import Router
from inflight.timeline import stream as stream_module
from inflight.timeline.chunks import MAX_KNOWN, chunk_json
from inflight.timeline.stream import TimelineStream
from tests.support.requests import FakeEngine, make_request
from tests.timeline.cells import cells_of


def client(step_seconds: float = 0.0) -> InprocClient:
    engine = FakeEngine(num_blocks=400, max_num_seqs=16)
    collect_step = engine.runner.collect

    def slowly(handle: Any) -> Any:
        time.sleep(step_seconds)
        return collect_step(handle)

    engine.runner.collect = slowly  # type: ignore[method-assign]
    engine.core.clock = time.monotonic
    return InprocClient(engine.core, engine.facts)


def viewer(source: EngineClient, replica: str | None = None) -> TimelineStream:
    return TimelineStream(source, lambda _: True, time.monotonic, 0.0, replica)


async def generate(source: EngineClient, num_tokens: int, name: str | None = None) -> None:
    request = make_request([1, 2, 3], num_tokens, name)
    await source.add(request)
    async with contextlib.aclosing(source.stream(request.request_id)) as deltas:
        async for _ in deltas:
            pass


async def collect(stream: TimelineStream, since: float | None, until: int) -> list[dict[str, Any]]:
    """Return chunks until this many requests have finished."""
    read: list[dict[str, Any]] = []
    num_ended = 0
    async with asyncio.timeout(60), contextlib.aclosing(stream.chunks(since, 1.0)) as chunks:
        async for chunk in chunks:
            if chunk is not None:
                read.append(chunk)
                num_ended += sum(event["type"] == "finish" for event in chunk["events"])
            if num_ended >= until:
                break
    return read


async def test_past_and_present_have_every_step_once() -> None:
    source = client()
    try:
        await generate(source, 50)
        reading = asyncio.create_task(collect(viewer(source), 0.0, 3))
        await asyncio.sleep(0.1)
        await asyncio.gather(generate(source, 300), generate(source, 200))
        read = await reading
    finally:
        await source.close()
    numbers = [number for chunk in read for number in chunk["steps"]["step"]]
    assert numbers == list(range(len(numbers)))
    cells = cells_of(run for chunk in read for run in chunk["runs"])
    assert len(cells) == len(set(cells))
    assert sum(cell.outputs for cell in cells) == 550


async def test_viewer_without_a_past_learns_who_is_running() -> None:
    source = client(step_seconds=0.005)
    try:
        running = asyncio.create_task(generate(source, 380, "early"))
        await asyncio.sleep(0.05)
        read = await collect(viewer(source), None, 1)
        await running
    finally:
        await source.close()
    assert [item["id"] for chunk in read for item in chunk["requests"]] == ["early"]
    assert read[0]["steps"]["step"] == []
    assert read[-1]["steps"]["step"]


async def test_slow_viewer_goes_on_with_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_PENDING_BYTES", 2000)
    monkeypatch.setattr(stream_module, "RESUME_SECONDS", 0.02)
    source = client()
    try:
        stream = viewer(source)
        async with contextlib.aclosing(stream.chunks(None, 1.0)) as chunks:
            await anext(chunks)
            await generate(source, 390)
            await asyncio.sleep(0.2)
            for _ in range(3):
                await generate(source, 390)
            assert len(stream._pending) < 10, "what no one takes is not kept"
            read: list[dict[str, Any]] = []
            async with asyncio.timeout(60):
                async for chunk in chunks:
                    if chunk is None:
                        break
                    read.append(chunk)
    finally:
        await source.close()
    assert sum(chunk.get("skipped", 0) for chunk in read) > 0
    numbers = [number for chunk in read for number in chunk["steps"]["step"]]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 4 * 390 - 1


async def test_each_replica_has_its_own_lanes() -> None:
    async def start(replica_id: str, beside: object = None) -> InprocClient:  # noqa: ARG001
        return client()

    router = await Router.start(start, 2)
    try:
        await asyncio.gather(*(generate(router, 40, f"r{index}") for index in range(8)))
        read = [chunk async for chunk in viewer(router).past(0.0)]
        assert {chunk["replica"] for chunk in read} == {"0", "1"}
        outputs = sum(cell.outputs for cell in cells_of(run for chunk in read for run in chunk["runs"]))
        assert outputs == 320
        only = [chunk async for chunk in viewer(router, "1").past(0.0)]
        assert {chunk["replica"] for chunk in only} == {"1"}
        reading = asyncio.create_task(collect(viewer(router), None, 8))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(generate(router, 40) for _ in range(8)))
        live = await reading
        assert {chunk["replica"] for chunk in live if chunk["runs"]} == {"0", "1"}
        memory = await router.read_memory("1")
        assert len(memory.refs) == 4 * 400
    finally:
        await router.close()


async def test_known_requests_are_bounded() -> None:
    source = client()
    try:
        await generate(source, 3)
        (data,) = [chunk async for chunk in viewer(source).past(0.0)]
        assert data["requests"]
    finally:
        await source.close()
    from tests.timeline.cells import chunks_of  # the same chunk, for a reader that has seen many requests

    recorder: Any = source._core.recorder
    known = set(range(100, 100 + 2 * MAX_KNOWN))
    chunk_json(chunks_of(recorder)[0], "0", 0.0, lambda _: True, known)
    assert len(known) <= MAX_KNOWN
