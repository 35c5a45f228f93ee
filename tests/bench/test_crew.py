"""One load from several processes."""

from __future__ import annotations

import asyncio
import sys

import pytest

from inflight.bench import crew
from inflight.bench.connection import Target
from inflight.bench.serve import LoadPlan, Measured
from inflight.errors import EngineError
from tests.bench.fake import Exchange, jobs, serving, token, usage

NOWHERE = Target("127.0.0.1", 1, "/")


@pytest.mark.parametrize(
    ("num_jobs", "num_processes", "concurrency", "shares"),
    [(10, 3, None, [None] * 3), (10, 3, 8, [3, 3, 2]), (10, 4, 2, [1, 1]), (2, 4, None, [None] * 2)],
)
def test_shares(num_jobs: int, num_processes: int, concurrency: int | None, shares: list[int | None]) -> None:
    parts = crew.split(LoadPlan(NOWHERE, jobs(num_jobs), concurrency, 3.0), num_processes)
    assert [part.concurrency for part in parts] == shares
    assert sorted(job.index for part in parts for job in part.jobs) == list(range(num_jobs))
    assert {part.timeout for part in parts} == {3.0}


def test_joining_keeps_the_order() -> None:
    parts = [Measured([], [0.1], 0.5), Measured([], [0.2, 0.3], 0.7)]
    joined = crew.join(parts)
    assert (joined.loop_lags, joined.cpu_share) == ([0.1, 0.2, 0.3], 0.7)


async def test_every_request_is_sent_once() -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.stream(token("a"), token("b", "length"), usage(1, 2))

    async with serving(answer) as fake:
        plan = LoadPlan(fake.target, jobs(9))
        measured = await asyncio.to_thread(crew.measure_with, 2, plan)
    assert [record.index for record in measured.records] == list(range(9))
    assert sorted(exchange.body["prompt"][0] for exchange in fake.seen) == list(range(9))
    assert {(record.error, record.num_tokens) for record in measured.records} == {(None, 2)}
    assert all(record.lag is not None and record.sent <= record.first for record in measured.records)


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(EngineError, match="ended early"):
        crew.measure_with(2, LoadPlan(NOWHERE, jobs(4)))
