"""Which other requests made one slow."""

from __future__ import annotations

from collections.abc import Callable

from inflight.timeline.neighbours import neighbours_of
from inflight.timeline.recorder import Recorder
from tests.support.requests import FakeEngine, make_request
from tests.timeline.cells import chunks_of


def neighbours(engine: FakeEngine, number: int) -> list[tuple[int, str]]:
    assert isinstance(engine.core.recorder, Recorder)
    chunks = chunks_of(engine.core.recorder)
    return [(each.info.number, each.why) for each in neighbours_of(number, chunks)]


def recorded(**options: int) -> FakeEngine:
    engine = FakeEngine(**options)  # type: ignore[arg-type]
    engine.core.record()
    return engine


def test_requests_that_ran_while_one_was_in_the_queue_are_named() -> None:
    engine = recorded(max_num_seqs=2, num_blocks=200)
    for index in range(2):
        engine.add(make_request([index, 1, 2], 10))
    engine.step()
    engine.step()
    late = engine.add(make_request([9, 9], 3))
    engine.run()
    assert sorted(neighbours(engine, late.record.number)) == [(0, "queue"), (1, "queue")]
    assert neighbours(engine, 0) == [], "nobody was in its way"


def test_prompt_in_the_steps_of_a_decode_is_named() -> None:
    engine = recorded(num_blocks=200)
    victim = engine.add(make_request([1, 2], 30))
    for _ in range(5):
        engine.step()
    engine.add(make_request(list(range(40)), 1))
    engine.core.clock = slow_clock(engine)
    engine.run()
    assert neighbours(engine, victim.record.number)[:1] == [(1, "prompt")]


def slow_clock(engine: FakeEngine) -> Callable[[], float]:
    """Return a clock by which the next step takes a second, and all others a microsecond."""
    clock, calls = engine.core.clock, iter(range(1_000_000))

    def slow() -> float:
        return clock() + (next(calls) >= 3)

    return slow
