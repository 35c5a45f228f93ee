from __future__ import annotations

import asyncio

import pytest

from inflight.engine.client import DeltaQueue
from inflight.errors import EngineDeadError
from inflight.events import Delta, PositionLogprobs, TokenLogprob, pack_logprobs


def position(token_id: int) -> PositionLogprobs:
    return pack_logprobs([TokenLogprob(token_id, -1.0, 1)])


async def test_delta_waits_for_its_reader() -> None:
    queue = DeltaQueue()
    queue.put(Delta("r", [1]))
    assert (await queue.take()).token_ids == [1]


async def test_reader_waits_for_a_delta() -> None:
    queue = DeltaQueue()
    taking = asyncio.ensure_future(queue.take())
    await asyncio.sleep(0)
    assert not taking.done()
    queue.put(Delta("r", [1]))
    assert (await taking).token_ids == [1]


async def test_unread_deltas_are_merged() -> None:
    queue = DeltaQueue()
    queue.put(Delta("r", [1], [position(1)], prompt_logprobs=[None, position(9)]))
    queue.put(Delta("r", [2], [position(2)]))
    queue.put(Delta("r", [3, 4], [position(3), position(4)]))
    queue.put(Delta("r", [], finish_reason="stop", stop_token_id=4))
    delta = await queue.take()
    assert delta.token_ids == [1, 2, 3, 4]
    assert delta.logprobs == [position(i) for i in (1, 2, 3, 4)]
    assert delta.prompt_logprobs == [None, position(9)]
    assert (delta.finish_reason, delta.stop_token_id) == ("stop", 4)


async def test_read_deltas_are_not_repeated() -> None:
    queue = DeltaQueue()
    queue.put(Delta("r", [1]))
    first = await queue.take()
    queue.put(Delta("r", [2]))
    assert (await queue.take()).token_ids == [2]
    assert first.token_ids == [1]


async def test_finished_output_ignores_later_deltas() -> None:
    """The engine may die before a slow reader has taken the end of its answer."""
    queue = DeltaQueue()
    queue.put(Delta("r", [1], finish_reason="length"))
    queue.put(Delta("r", [], finish_reason="error", error="the engine stopped"))
    delta = await queue.take()
    assert (delta.token_ids, delta.finish_reason, delta.error) == ([1], "length", None)


async def test_cancelled_reader_loses_nothing() -> None:
    queue = DeltaQueue()
    taking = asyncio.ensure_future(queue.take())
    await asyncio.sleep(0)
    queue.put(Delta("r", [1]))
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    queue.put(Delta("r", [2], finish_reason="length"))
    assert (await queue.take()).token_ids == [1, 2]


async def test_failed_queue_yields_pending_delta_then_error() -> None:
    queue = DeltaQueue()
    queue.put(Delta("r", [1]))
    queue.fail(EngineDeadError("gone"))
    queue.put(Delta("r", [2]))
    assert (await queue.take()).token_ids == [1]
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="gone"):
            await queue.take()


async def test_finished_output_does_not_fail() -> None:
    queue = DeltaQueue()
    queue.put(Delta("r", [1], finish_reason="length"))
    queue.fail(EngineDeadError("gone"))
    assert (await queue.take()).finish_reason == "length"
