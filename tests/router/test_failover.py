"""Engines that die under their streams: real processes over the fake runner, whose answers are known."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator

import pytest

from benchmarks.failover import cut
from inflight.config import ProcessConfig
from inflight.errors import EngineDeadError, EngineError
from inflight.events import Delta
from inflight.request import Request
from inflight.router.router import Router
from inflight.sampling_params import SamplingParams
from tests.engine.faulty import DIE, HANG, SLOW
from tests.router.replicas import answer, lose, processes, read, strike, until_all_run
from tests.support.fake_runner import expected_scores, expected_tokens, expected_vector
from tests.support.requests import make_request
from tests.support.waiting import until


async def open_streams(router: Router, count: int, length: int = 100) -> list[asyncio.Task[list[int]]]:
    """Slow answers, each with a token."""
    tasks = [asyncio.create_task(answer(router, [SLOW, index], length)) for index in range(count)]
    await until(
        lambda: all(routed.output_ids for routed in router._requests.values()) and bool(router._requests)
    )
    return tasks


async def last_of(stream: AsyncGenerator[Delta]) -> Delta:
    return [delta async for delta in stream][-1]


async def test_streams_outlive_engines_that_are_killed_one_after_the_other() -> None:
    async with processes(3) as router:
        tasks = await open_streams(router, 9)
        for name in ("0", "1", "2"):
            await lose(router, name)
            await until(
                lambda: all(
                    routed.replica is not None and routed.has_token_here
                    for routed in router._requests.values()
                )
            )
        answers = await asyncio.gather(*tasks)
        assert answers == [expected_tokens([SLOW, index], 100) for index in range(9)]
        records = [router._history.get(f"{name}") for name in router._history._records]
        assert sum(state.record.num_failovers for state in records if state is not None) > 0


async def test_streams_of_a_hanging_engine_continue_elsewhere() -> None:
    quick = ProcessConfig(heartbeat=0.05, silent_after=0.5)
    async with processes(2, quick) as router:
        tasks = await open_streams(router, 6)
        strike(router, "0", signal.SIGSTOP)
        answers = await asyncio.gather(*tasks)
        assert answers == [expected_tokens([SLOW, index], 100) for index in range(6)]


async def test_streams_of_an_unreachable_engine_continue_elsewhere() -> None:
    quick = ProcessConfig(heartbeat=0.05, silent_after=0.5)
    async with processes(2, quick) as router:
        tasks = await open_streams(router, 6)
        cut(router.replicas.find("0"))
        answers = await asyncio.gather(*tasks)
        assert answers == [expected_tokens([SLOW, index], 100) for index in range(6)]


async def test_with_one_replica_streams_wait_for_its_next_engine() -> None:
    async with processes(1) as router:
        tasks = await open_streams(router, 3)
        await lose(router, "0")
        with pytest.raises(EngineDeadError, match="no engine can take the request: replica 0 is restarting"):
            await answer(router, [1], 1)
        assert await asyncio.gather(*tasks) == [expected_tokens([SLOW, index], 100) for index in range(3)]


async def test_streams_end_with_one_error_when_no_engine_is_left() -> None:
    async with processes(2, ProcessConfig(heartbeat=0.05, max_restarts=0)) as router:
        tasks = await open_streams(router, 4)
        strike(router, "0")
        strike(router, "1")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDeadError}
        assert {str(result) for result in results} == {
            "no engine can take the request: replica 0 is dead, replica 1 is dead "
            "(the engine process of replica 1 ended by SIGKILL)"
        }
        health = await router.health()
        assert (health.healthy, health.state) == (False, "dead")
        with pytest.raises(EngineDeadError):
            await answer(router, [1], 1)


async def test_request_that_kills_engines_ends_alone_after_the_second() -> None:
    async with processes(3) as router:
        tasks = await open_streams(router, 6, 200)
        poison = asyncio.create_task(read(router, make_request([DIE, 1], 4)))
        newcomers = [asyncio.create_task(answer(router, [index], 5)) for index in range(3)]
        try:
            _, last = await poison
            message, code = last.error, last.error_code
        except EngineError as error:
            message, code = str(error), error.code
        assert message == "2 engines died while computing this request: it is not retried"
        assert code == "poison_request"
        assert await asyncio.gather(*newcomers) == [expected_tokens([index], 5) for index in range(3)]
        assert await asyncio.gather(*tasks) == [expected_tokens([SLOW, index], 200) for index in range(6)]
        await until_all_run(router)
        # On a busy machine an engine may be gone before it could say that it had the request, which then is innocent.
        assert (await router.health()).num_restarts in (2, 3)


async def test_scores_and_vectors_are_computed_again() -> None:
    async with processes(2) as router:
        prompt = [SLOW, *range(40)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        requests = [
            Request.create("score", prompt, params, 0, task="prompt_logprobs"),
            Request.create("pool", prompt, SamplingParams(temperature=0), 0, task="pool"),
        ]
        blockers = await open_streams(router, 2, 3000)
        for name in ("0", "1"):
            strike(router, name, signal.SIGSTOP)  # their requests stay there
        reading = [asyncio.create_task(read(router, request)) for request in requests]
        names = [request.request_id for request in requests]
        await until(
            lambda: all(name in router._requests and router._requests[name].replica for name in names)
        )
        for name in ("0", "1"):
            strike(router, name)
        (_, scored), (_, pooled) = await asyncio.gather(*reading)
        assert scored.prompt_logprobs == expected_scores(prompt)
        assert memoryview(pooled.vector or b"").cast("f").tolist() == expected_vector(prompt)
        for task in blockers:
            task.cancel()
        await asyncio.gather(*blockers, return_exceptions=True)


async def test_record_of_a_request_spans_its_engines() -> None:
    async with processes(2) as router:
        await router.add(request := make_request([SLOW, 7], 100))
        stream = router.stream(request.request_id)
        await anext(stream)
        first = router._requests[request.request_id].replica
        assert first is not None
        strike(router, first.replica_id)
        record = (await last_of(stream)).record
        assert record is not None
        assert record.finished_at is not None
        assert record.first_token_at is not None
        assert record.admitted_at is not None
        assert (record.num_failovers, record.num_output_tokens) == (1, 100)
        assert record.engine_id == {"0": "1", "1": "0"}[first.replica_id]
        assert record.arrived_at <= record.admitted_at <= record.first_token_at <= record.finished_at
        assert record.breakdown.total == pytest.approx(record.finished_at - record.arrived_at, abs=1e-3)
        assert 0 < record.breakdown.lost < record.breakdown.total
        state = await router.describe(request.request_id)
        assert state is not None
        assert state.record == record


async def test_abort_takes_effect_even_if_the_engine_dies() -> None:
    async with processes(1) as router:
        await router.add(request := make_request([SLOW, 7], 1000))
        stream = router.stream(request.request_id)
        await anext(stream)
        waiting = asyncio.create_task(last_of(stream))
        await lose(router, "0")
        state = await router.describe(request.request_id)
        assert state is not None
        assert state.status == "waiting"
        assert await router.abort(request.request_id, "stop") == 0
        last = await waiting
        assert last.finish_reason == "stop"
        assert last.record is not None


async def test_prompt_that_hangs_engines_ends_too() -> None:
    quick = ProcessConfig(heartbeat=0.05, stalled_after=0.3, kill_stalled_after=0.5)
    async with processes(2, quick) as router:
        _, last = await read(router, make_request([HANG, 1], 4))
        assert last.error_code == "poison_request"
        await until_all_run(router)
        assert await answer(router, [1, 2], 6) == expected_tokens([1, 2], 6)
