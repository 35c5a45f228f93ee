"""How the use of experts reaches recordings and statistics: rarely, and without waiting for the device."""

from __future__ import annotations

import pytest

from inflight.engine.stats import EXPERTS_EVERY, ExpertLoads
from inflight.events import ExpertUsage
from inflight.router.replica import summed
from inflight.timeline import recorder as recorder_module
from inflight.timeline.chunks import TimelineQuery
from inflight.timeline.steps import read_chunks, recorded_steps
from tests.support.requests import FakeEngine, make_request


class ScriptedCounts:
    """Implements `ExpertCounts`. Remembers whether each call waited."""

    def __init__(self, *readings: list[list[int]] | None) -> None:
        self._readings = list(readings)
        self.waited: list[bool] = []

    def read(self, wait: bool) -> list[list[int]] | None:
        self.waited.append(wait)
        return self._readings.pop(0)


def test_busy_engine_reads_once_a_second_without_waiting() -> None:
    counts = ScriptedCounts(None, [[4, 0], [1, 3]], [[6, 2], [5, 3]])
    loads = ExpertLoads(counts)
    for tick in range(25):
        loads.update(tick * EXPERTS_EVERY / 10, is_idle=False)
    assert counts.waited == [False] * 3
    usage = loads.take()
    assert usage == ExpertUsage(((2, 2), (4, 0)))
    assert usage.imbalances == (1.0, 2.0)
    assert loads.take() is None
    assert loads.stats is not None
    assert (loads.stats.tokens, loads.stats.imbalance, loads.stats.worst_imbalance) == ((11, 5), 1.5, 2.0)


def test_idle_engine_waits_for_the_last_tokens() -> None:
    counts = ScriptedCounts([[1, 1]], [[1, 5]], [[1, 5]])
    loads = ExpertLoads(counts)
    loads.update(0.0, is_idle=False)
    loads.update(0.1, is_idle=True)
    assert loads.take() == ExpertUsage(((0, 4),))
    loads.update(0.2, is_idle=True)
    assert loads.take() is None, "nothing has happened since"
    assert counts.waited == [False, True, True]


def test_layers_without_tokens_do_not_count_as_balanced() -> None:
    loads = ExpertLoads(ScriptedCounts([[3, 0, 0], [0, 0, 0]]))
    loads.update(0.0, is_idle=True)
    assert loads.stats is not None
    assert loads.stats.imbalance == 3.0


def test_models_without_experts_report_none() -> None:
    engine = FakeEngine()
    engine.add(make_request([1, 2], 3))
    engine.run()
    assert engine.core.stats().experts is None
    assert ExpertLoads(None).take() is None


def test_recorded_steps_have_the_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK", recorder_module.CHUNK._replace(steps=2))
    engine = FakeEngine()
    engine.core._expert_loads = ExpertLoads(ScriptedCounts([[4, 0]], [[6, 2]], [[6, 2]]))
    engine.core.record()
    engine.add(make_request([1, 2], 4))
    engine.run()
    steps = list(recorded_steps(read_chunks(engine.core.read_timeline, TimelineQuery(0.0))))
    assert [step.experts and step.experts.tokens for step in steps] == [((4, 0),), None, None, ((2, 2),)]


def test_replicas_add_up() -> None:
    stats = []
    for tokens in ([[2, 2]], [[9, 3]]):
        engine = FakeEngine()
        engine.core._expert_loads = ExpertLoads(ScriptedCounts(tokens))
        stats.append(engine.core.stats())
    experts = summed(stats).experts
    assert experts is not None
    assert (experts.tokens, experts.imbalance, experts.worst_imbalance) == ((11, 5), 1.25, 1.5)
