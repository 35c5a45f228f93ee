"""Commands of an engine: reset the prefix cache, sleep, wake up."""

from __future__ import annotations

import pytest

from inflight.engine.client import ResetPrefixCache, Sleep, WakeUp
from inflight.engine.stats import STEP_SIZES
from inflight.errors import EngineAsleepError, EngineError
from tests.support.fake_runner import FakeRunner
from tests.support.requests import FakeEngine, make_request

PROMPT = list(range(1, 13))


class FakeSleepSupport:
    """Records its calls."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.calls: list[str] = []

    def check(self) -> None:
        self.calls.append("check")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> FakeRunner:
        self.calls.append("wake")
        return FakeRunner(self._engine.num_blocks, self._engine.layout)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.core._sleep_support = FakeSleepSupport(engine)
    return engine


def run(engine: FakeEngine) -> list[int]:
    request = engine.add(make_request(PROMPT))
    engine.run()
    return engine.outputs[request.request_id]


def num_cached(engine: FakeEngine) -> int:
    request = engine.add(make_request(PROMPT))
    engine.run()
    return engine.finished[request.request_id].record.num_cached_tokens  # type: ignore[union-attr]


def test_woken_engine_has_the_same_outputs_and_an_empty_cache(engine: FakeEngine) -> None:
    before = run(engine)
    assert num_cached(engine) > 0
    runner = engine.core.runner
    engine.core.run_command(Sleep())
    assert engine.core.stats().is_sleeping
    assert engine.core.stats().kv.num_cached == 0
    engine.core.run_command(Sleep())  # again: nothing is left to do
    engine.core.run_command(WakeUp())
    engine.core.run_command(WakeUp())
    assert engine.core.runner is not runner
    assert not engine.core.stats().is_sleeping
    assert engine.core._sleep_support.calls == ["check", "sleep", "wake"]  # type: ignore[attr-defined]
    assert run(engine) == before


def test_sleeping_engine_rejects_requests_and_busy_engine_does_not_sleep(engine: FakeEngine) -> None:
    engine.core.run_command(Sleep())
    with pytest.raises(EngineAsleepError):
        engine.core.add(make_request(PROMPT))
    assert not engine.core.has_work
    engine.core.run_command(WakeUp())
    engine.add(make_request(PROMPT))
    with pytest.raises(EngineError, match="has requests"):
        engine.core.run_command(Sleep())
    engine.run()


def test_engine_that_cannot_sleep_says_so_and_continues() -> None:
    engine = FakeEngine()
    with pytest.raises(EngineError, match="cannot sleep"):
        engine.core.run_command(Sleep())
    assert run(engine)


def test_prefix_cache_can_be_reset(engine: FakeEngine) -> None:
    run(engine)
    assert num_cached(engine) > 0
    engine.core.run_command(ResetPrefixCache())
    assert num_cached(engine) == 0


def test_steps_are_counted_by_their_tokens(engine: FakeEngine) -> None:
    run(engine)  # 12 tokens, then three steps of one
    stats = engine.core.stats()
    assert dict(zip(STEP_SIZES, stats.step_sizes, strict=False)) | {16: 1, 1: 3} == {
        size: {16: 1, 1: 3}.get(size, 0) for size in STEP_SIZES
    }
    assert stats.num_step_tokens == 15
