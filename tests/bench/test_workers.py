"""One load from several worker processes."""

from __future__ import annotations

import asyncio
import sys

import pytest

from inflight.bench.client import Target
from inflight.bench.load_generator import LoadPlan, LoadResult, join_results, measure_with_workers, split_plan
from inflight.errors import EngineError
from tests.bench.fake import Exchange, jobs, serving, token, usage

NOWHERE = Target("127.0.0.1", 1, "/")


@pytest.mark.parametrize(
    ("num_jobs", "num_workers", "concurrency", "shares"),
    [(10, 3, None, [None] * 3), (10, 3, 8, [3, 3, 2]), (10, 4, 2, [1, 1]), (2, 4, None, [None] * 2)],
)
def test_plan_is_split_evenly(
    num_jobs: int, num_workers: int, concurrency: int | None, shares: list[int | None]
) -> None:
    parts = split_plan(LoadPlan(NOWHERE, jobs(num_jobs), concurrency, 3.0), num_workers)
    assert [part.concurrency for part in parts] == shares
    assert sorted(job.index for part in parts for job in part.jobs) == list(range(num_jobs))
    assert {part.timeout for part in parts} == {3.0}


def test_joined_result_has_all_lags_and_the_highest_cpu_share() -> None:
    parts = [LoadResult([], [0.1], 0.5), LoadResult([], [0.2, 0.3], 0.7)]
    joined = join_results(parts)
    assert (joined.loop_lags, joined.cpu_share) == ([0.1, 0.2, 0.3], 0.7)


async def test_workers_send_every_request_once() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.stream(token("a"), token("b", "length"), usage(1, 2))

    async with serving(answer) as fake:
        plan = LoadPlan(fake.target, jobs(9))
        result = await asyncio.to_thread(measure_with_workers, 2, plan)
    assert [record.index for record in result.records] == list(range(9))
    assert sorted(exchange.body["prompt"][0] for exchange in fake.exchanges) == list(range(9))
    assert {(record.error, record.num_tokens) for record in result.records} == {(None, 2)}
    assert all(record.lag is not None and record.sent <= record.first for record in result.records)


def test_worker_that_exits_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(EngineError, match="exited early"):
        measure_with_workers(2, LoadPlan(NOWHERE, jobs(4)))
