"""Of others' requests, a reader gets the slots in use in each step and nothing else: whatever they were, it reads the
same bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from inflight.events import ExpertUsage
from inflight.request import RequestOrigin
from inflight.timeline.chunks import Chunk, PackedRuns, RecordedRequest, SlotRun, TimelineEvent, decode_chunk
from inflight.timeline.recorder import Recorder
from inflight.timeline.stream import ChunkConverter, TimelineStream
from tests.scheduling.test_machine import EngineMachine
from tests.timeline.cells import Replay, chunks_of

T = TypeVar("T")

ARRIVALS = 1_000_000  # numbers of disguised requests begin here


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def is_own(number: int) -> bool:
    return number % 2 == 0


def sees(info: RecordedRequest) -> bool:
    return is_own(info.number)


def disguised(chunks: Sequence[Chunk], rng: Random) -> list[list[Chunk]]:
    """Return, for each chunk, some with the same steps, own requests and numbers of slots in use.

    The requests of others are different ones, with other slots, lengths, cache hits, arrivals, ends and errors.
    """
    result, num_events = list[list[Chunk]](), 0
    for chunk in chunks:
        result.append([])
        if rng.random() < 0.3:  # something happened to others between two steps
            between = _without_steps(chunk, num_events, rng)
            num_events += len(between.events)
            result[-1].append(between)
        own = [run for run in chunk.runs() if is_own(run.request)]
        cells = _cells_of_others(chunk, own, rng)
        runs = PackedRuns(_mixed(own, cells, rng))
        infos = [info for info in chunk.requests if sees(info)]
        infos = _mixed(infos, [_request(cell.request, rng) for cell in cells], rng)
        events = [event for event in chunk.events if is_own(event.request)]
        events = _mixed(events, [_event(rng) for _ in range(rng.randrange(6))], rng)
        failed = {number: f"failed: {rng.random()}" for number in chunk.failed}
        result[-1].append(
            chunk._replace(
                run_data=runs.data,
                run_counts=runs.counts,
                requests=infos,
                events=events,
                first_event=num_events,
                failed=failed,
                experts={chunk.first_step: ExpertUsage(((rng.randrange(99), rng.randrange(99)),))},
            )
        )
        num_events += len(events)
    return result


def _mixed(own: Sequence[T], others: Sequence[T], rng: Random) -> list[T]:
    """Return both in a random order that keeps that of the own ones."""
    result = list(own)
    for item in others:
        result.insert(rng.randrange(len(result) + 1), item)
    return result


def _without_steps(chunk: Chunk, num_events: int, rng: Random) -> Chunk:
    events = [_event(rng) for _ in range(rng.randrange(1, 4))]
    infos = [_request(event.request, rng) for event in events]
    return chunk._replace(
        at=b"",
        columns=b"",
        run_data=b"",
        run_counts={},
        failed={},
        requests=infos,
        events=events,
        first_event=num_events,
    )


def _cells_of_others(chunk: Chunk, own: Sequence[SlotRun], rng: Random) -> list[SlotRun]:
    """Return as many runs of one step in each step as others have there, each of them anything."""
    counts = dict.fromkeys(range(chunk.first_step, chunk.end_step), 0)
    for run in chunk.runs():
        for step in range(run.first_step, run.first_step + run.num_steps):
            counts[step] += not is_own(run.request)
    cells = []
    for step, count in counts.items():
        taken = {run.slot for run in own if run.first_step <= step < run.first_step + run.num_steps}
        for slot in rng.sample([slot for slot in range(chunk.slots) if slot not in taken], count):
            values = (rng.randrange(3), step, 1, rng.randrange(99), rng.randrange(99), rng.randrange(3))
            cells.append(SlotRun(slot, _number(rng), *values, rng.choice([(), (), (2, 0), (1, 3)])))
    return cells


def _number(rng: Random) -> int:
    return ARRIVALS + 2 * rng.randrange(1000) + 1


def _request(number: int, rng: Random) -> RecordedRequest:
    origin = RequestOrigin(f"secret-{rng.random()}", 0, "other", "/v1/completions", "a secret")
    return RecordedRequest(
        number, origin.request_id, rng.randrange(99), rng.randrange(9), rng.random(), origin
    )


def _event(rng: Random) -> TimelineEvent:
    kind = rng.choice(["arrive", "admit", "preempt", "finish", "abort"])
    numbers = (_number(rng), rng.randrange(99), rng.randrange(9), rng.randrange(99))
    return TimelineEvent(kind, 100 * rng.random(), *numbers, rng.choice(["", "memory", "stop"]))


async def now(function: Callable[[], Any]) -> Any:
    return function()


def read(past: Sequence[Chunk], later: Sequence[Chunk]) -> list[bytes]:
    """Return what a viewer who opened the page in between is sent."""

    async def collect() -> list[bytes]:
        source, parts = Replay(past, later), list[bytes]()
        converter = ChunkConverter(source, sees, 0.0, now)
        went_on = False
        async for part in TimelineStream(source, converter, lambda: 0.0).chunks(0.0, 0.0):
            if part is not None:
                parts.append(part.data)
            elif went_on:
                break
            else:
                source.go_on()
                went_on = True
        return parts

    return asyncio.run(collect())


class WatchedMachine(EngineMachine):
    """The state machine of the scheduler's tests, watched by the owner of every other request."""

    recorder: Recorder | None = None
    live: list[bytes]

    @invariant()
    def record(self) -> None:
        if self.recorder is None:
            engine, self.live = self.engine, []
            self.recorder = Recorder(engine.scheduler.limits, engine.num_blocks, engine.block_size)
            engine.core.recorder = self.recorder
            self.recorder.watch(True)
        data = self.recorder.take()
        if data is not None:
            self.live.append(data)

    def teardown(self) -> None:
        super().teardown()
        if self.recorder is None:
            return
        self.record()
        live = [decode_chunk(data) for data in self.live]
        for chunks in (chunks_of(self.recorder), live):
            half = 1 + len(chunks) // 2
            expected = read(chunks[:half], chunks[half:])
            for seed in range(2):
                others = disguised(chunks, Random(seed))
                assert read([*chain(*others[:half])], [*chain(*others[half:])]) == expected


TestWatchedMachine = WatchedMachine.TestCase
TestWatchedMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
