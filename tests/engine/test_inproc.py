"""The in-process client over the fake runner, whose output is known: a lost or repeated token shows."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inflight.engine.inproc import STALLED_AFTER, InprocClient
from inflight.errors import EngineDeadError, EngineError, QueueFullError, RequestError
from inflight.events import CACHE_HASH_LENGTH, CacheUpdate, Delta
from inflight.scheduling.batch import Batch
from tests.support.fake_runner import expected_tokens
from tests.support.requests import FakeEngine, make_request
from tests.support.waiting import until, until_idle

LONG = 30_000  # tokens: a request that a test must end, since it would not itself for minutes


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(num_blocks=8192)


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[InprocClient]:
    """Closed after the test, which must leave nothing behind."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    client = InprocClient(engine.core, engine.facts)
    yield client
    await client.close()
    await asyncio.sleep(0)
    gc.collect()
    await asyncio.sleep(0)
    assert client._queues == {}
    assert complaints == []


async def test_observer_gets_changes_of_the_prefix_cache(client: InprocClient) -> None:
    updates: list[CacheUpdate] = []
    client.watch_cache(updates.append)
    await client.add(make_request([*range(9)], 1, "r"))
    await read(client, "r")
    assert [(update.cleared, len(update.stored)) for update in updates] == [
        (True, 0),
        (False, 2 * CACHE_HASH_LENGTH),
    ]


class Gate:
    """Holds the engine before a step until it is opened."""

    def __init__(self, engine: FakeEngine) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        self._real = engine.runner.launch
        engine.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: Batch) -> Any:
        self.reached.set()
        assert self.open.wait(60)
        return self._real(batch)


async def read(client: InprocClient, request_id: str) -> tuple[list[int], Delta]:
    """All tokens of a stream and its last delta."""
    tokens: list[int] = []
    async for delta in client.stream(request_id):
        tokens += delta.token_ids
    return tokens, delta


# ---- streams ----


@pytest.mark.parametrize("depth", [1, 2])
async def test_two_thousand_concurrent_requests_get_their_own_tokens(depth: int) -> None:
    engine = FakeEngine(num_blocks=600, max_num_seqs=64, max_num_batched_tokens=256, pipeline_depth=depth)
    client = InprocClient(engine.core, engine.facts)
    prompts = [[i % 40, i // 40, *range(i % 7)] for i in range(2000)]

    async def one(index: int) -> list[int]:
        request = make_request(prompts[index], 1 + index % 5, f"r{index}")
        await client.add(request)
        return (await read(client, request.request_id))[0]

    answers = await asyncio.gather(*(one(index) for index in range(2000)))
    assert answers == [expected_tokens(prompt, 1 + i % 5) for i, prompt in enumerate(prompts)]
    assert client._queues == {}
    assert (await client.stats()).kv.num_used == 0
    await client.close()


async def test_slow_reader_gets_merged_deltas(client: InprocClient) -> None:
    await client.add(make_request([1, 2, 3], 30, "slow"))
    await until_idle(client)
    deltas = [delta async for delta in client.stream("slow")]
    assert len(deltas) == 1
    assert deltas[0].token_ids == expected_tokens([1, 2, 3], 30)
    assert deltas[0].finish_reason == "length"
    assert deltas[0].record is not None
    assert deltas[0].record.num_output_tokens == 30


async def test_id_can_be_reused_after_its_request_ended(client: InprocClient) -> None:
    for _ in range(3):
        await client.add(make_request([1], 3, "again"))
        tokens, last = await read(client, "again")
        assert (tokens, last.finish_reason) == (expected_tokens([1], 3), "length")


async def test_id_in_use_is_rejected(client: InprocClient) -> None:
    await client.add(make_request([1], 20, "twice"))
    with pytest.raises(RequestError, match="'twice' is already in use"):
        await client.add(make_request([2], 20, "twice"))
    tokens, _ = await read(client, "twice")
    assert tokens == expected_tokens([1], 20)


async def test_streaming_an_unknown_request_is_rejected(client: InprocClient) -> None:
    with pytest.raises(RequestError, match="'nobody'"):
        client.stream("nobody")


async def test_full_queue_rejects_at_once(engine: FakeEngine, client: InprocClient) -> None:
    engine.core.max_queue = 2
    gate = Gate(engine)
    await client.add(make_request([1], 3, "running"))
    await until(gate.reached.is_set)
    adding = [asyncio.ensure_future(client.add(make_request([i], 3, f"q{i}"))) for i in range(11)]
    await asyncio.sleep(0)  # all calls are queued
    gate.open.set()
    results = await asyncio.gather(*adding, return_exceptions=True)
    # Seven can run beside the first, and two may wait.
    assert [type(result) for result in results] == [type(None)] * 9 + [QueueFullError] * 2
    for name in ("running", *(f"q{i}" for i in range(9))):
        assert (await read(client, name))[1].finish_reason == "length"
    await client.add(make_request([3], 3, "q9"))
    assert (await read(client, "q9"))[0] == expected_tokens([3], 3)


# ---- ending early ----


async def test_abort_frees_blocks_and_ends_the_stream(client: InprocClient) -> None:
    await client.add(make_request(list(range(40)), LONG, "long"))
    stream = client.stream("long")
    tokens = (await anext(stream)).token_ids
    assert await client.abort("long") > 0
    last = None
    async for last in stream:
        tokens += last.token_ids
    assert last is not None
    assert last.finish_reason == "abort"
    assert tokens == expected_tokens(list(range(40)), len(tokens))
    await until_idle(client)
    assert await client.abort("long") == 0
    assert await client.abort("nobody") == 0


async def test_leaving_the_loop_aborts(client: InprocClient) -> None:
    await client.add(make_request([1, 2], LONG, "left"))
    async for _ in client.stream("left"):
        break
    await until_idle(client)


async def test_id_of_an_abandoned_request_can_be_reused_at_once(client: InprocClient) -> None:
    """Late deltas of the first request, above all its end, do not reach the second."""
    for number in range(20):
        await client.add(make_request([1, 2], LONG, "again"))
        stream = client.stream("again")
        await anext(stream)
        await stream.aclose()
        await client.add(make_request([number, 7], 5, "again"))
        tokens, last = await read(client, "again")
        assert (tokens, last.finish_reason) == (expected_tokens([number, 7], 5), "length")


async def test_cancelled_reader_aborts_its_request(client: InprocClient) -> None:
    await client.add(make_request([1, 2], LONG, "cancelled"))
    reading = asyncio.ensure_future(read(client, "cancelled"))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until_idle(client)


async def test_unread_stream_aborts_when_closed(client: InprocClient) -> None:
    await client.add(make_request([1, 2], LONG, "unread"))
    stream = client.stream("unread")
    await stream.aclose()
    await until_idle(client)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_unread_stream_aborts_when_dropped(client: InprocClient) -> None:
    await client.add(make_request([1, 2], LONG, "dropped"))
    client.stream("dropped")
    gc.collect()
    await until_idle(client)


async def test_error_thrown_into_a_stream_aborts_its_request(client: InprocClient) -> None:
    await client.add(make_request([1, 2], LONG, "thrown"))
    stream = client.stream("thrown")
    with pytest.raises(KeyError):
        await stream.athrow(KeyError("x"))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await until_idle(client)


async def test_cancelled_add_leaves_nothing_behind(engine: FakeEngine, client: InprocClient) -> None:
    gate = Gate(engine)
    await client.add(make_request([1], 3, "first"))
    await until(gate.reached.is_set)
    adding = asyncio.ensure_future(client.add(make_request([2], LONG, "late")))
    await asyncio.sleep(0)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    gate.open.set()
    assert (await read(client, "first"))[0] == expected_tokens([1], 3)
    await until_idle(client)


# ---- the end of the engine ----


async def test_crashed_loop_ends_all_streams(engine: FakeEngine, client: InprocClient) -> None:
    for index in range(3):
        await client.add(make_request([index], LONG, f"r{index}"))
    readers = [asyncio.ensure_future(read(client, f"r{index}")) for index in range(3)]
    assert (await client.health()).healthy

    def die() -> list[Delta]:
        raise MemoryError("no more")

    engine.core.step = die  # type: ignore[method-assign]
    for error in await asyncio.gather(*readers, return_exceptions=True):
        assert isinstance(error, EngineDeadError)
        assert str(error) == "the engine stopped: MemoryError: no more"
    health = await client.health()
    assert not health.healthy
    assert health.error == "the engine stopped: MemoryError: no more"
    assert health.state == "dead"
    for ask in (client.stats(), client.abort("r0"), client.add(make_request([1]))):
        with pytest.raises(EngineError, match="MemoryError"):
            await ask


async def test_overlong_step_makes_the_engine_unhealthy(engine: FakeEngine, client: InprocClient) -> None:
    now = 0.0
    engine.core.clock = lambda: now
    gate = Gate(engine)
    await client.add(make_request([1], 3, "stuck"))
    await until(gate.reached.is_set)
    assert (await client.health()).healthy
    now = STALLED_AFTER + 1
    health = await client.health()
    assert not health.healthy
    assert health.seconds_since_step > STALLED_AFTER
    gate.open.set()
    await read(client, "stuck")
    now = 10 * STALLED_AFTER
    assert (await client.health()).healthy  # idle for however long


async def test_closing_ends_open_streams(client: InprocClient) -> None:
    await client.add(make_request([1, 2], LONG, "open"))
    await client.add(make_request([1, 2], 2, "done"))
    stream = client.stream("open")
    await anext(stream)
    done = client.stream("done")
    await until(lambda: client._queues["done"]._ended)
    await client.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        async for _ in stream:
            pass
    assert [delta.finish_reason async for delta in done] == ["length"]
    assert not (await client.health()).healthy
    with pytest.raises(EngineError, match="closed"):
        await client.add(make_request([1]))
    await client.close()


async def test_call_while_the_engine_stops_fails_instead_of_hanging(
    client: InprocClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may have read its queue for the last time just before the call was queued."""
    await client.close()
    client._error = None
    real = client._calls

    class Late:
        get_nowait = real.get_nowait

        def put(self, call: Any) -> None:
            real.put(call)
            client._error = "the engine was closed"

    with monkeypatch.context() as patch:
        patch.setattr(client, "_calls", Late())
        with pytest.raises(EngineError, match="closed"):
            await asyncio.wait_for(client.stats(), 60)


async def test_closing_can_wait_for_running_requests(engine: FakeEngine, client: InprocClient) -> None:
    gate = Gate(engine)
    await client.add(make_request([1], 30, "last"))
    closing = asyncio.ensure_future(client.close(drain=60))
    await asyncio.sleep(0)
    assert (await client.health()).state == "closing"
    with pytest.raises(EngineDeadError, match="closing"):
        await client.add(make_request([1], 3, "late"))
    gate.open.set()
    assert (await read(client, "last"))[0] == expected_tokens([1], 30)
    await closing


# ---- what it shows ----


async def test_describe_lists_what_a_request_waited_for(client: InprocClient) -> None:
    streams = []
    for index in range(9):  # one more than there are slots
        await client.add(make_request([index], LONG, f"r{index}"))
        streams.append(client.stream(f"r{index}"))
    state = await client.describe("r8")
    assert state is not None
    assert (state.status, state.num_waited_for) == ("waiting", 8)
    await client.abort("r3")
    await anext(streams[8])
    state = await client.describe("r8")
    assert state is not None
    assert (state.status, state.waited_for) == ("running", ("r3",))
    await client.abort("r8")
    state = await client.describe("r8")
    assert state is not None
    assert (state.status, state.record.finish_reason) == ("finished", "abort")
    assert await client.describe("nobody") is None
    for stream in streams:
        await stream.aclose()


def test_second_event_loop_can_use_the_client_after_the_first() -> None:
    engine = FakeEngine(num_blocks=8192)
    client = InprocClient(engine.core, engine.facts)

    async def leave_running() -> None:
        await client.add(make_request([1, 2], LONG, "left"))
        await anext(client.stream("left"))

    async def use() -> list[int]:
        await until_idle(client)
        await client.add(make_request([3], 5, "next"))
        tokens, _ = await read(client, "next")
        await client.close()
        return tokens

    asyncio.run(leave_running())
    assert asyncio.run(use()) == expected_tokens([3], 5)


async def test_statistics_are_current_while_a_prompt_is_computed(client: InprocClient) -> None:
    await client.add(make_request(list(range(20_000)), 1, "r"))
    answered = asyncio.create_task(read(client, "r"))
    steps = set()
    while not answered.done():
        stats = await client.stats()
        if (stats.num_running, stats.num_output_tokens) == (1, 0):
            steps.add(stats.num_steps)
    assert len(steps) >= 2
    await answered


async def test_failing_call_stops_neither_the_loop_nor_other_requests(
    engine: FakeEngine, client: InprocClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that leaves a stream waits for no reply, so it would not see the error."""
    failed = threading.Event()

    def abort(*_: Any) -> Any:
        failed.set()
        raise ValueError("broken on purpose")

    await client.add(make_request([1, 2], LONG, "left"))
    with monkeypatch.context() as patch:
        patch.setattr(engine.core, "abort", abort)
        await client.stream("left").aclose()
        assert await asyncio.to_thread(failed.wait, 60)
    await client.add(make_request([1, 2, 3], 5, "r"))
    assert (await read(client, "r"))[0] == expected_tokens([1, 2, 3], 5)
    await client.abort("left")
