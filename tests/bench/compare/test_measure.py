"""Figures of a run built by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.bench.compare import measure
from inflight.bench.compare.measure import compute_figures
from inflight.request import RequestOrigin
from inflight.timeline.chunks import RecordedTimes
from tests.bench.compare import hand_made
from tests.support.requests import FakeEngine, make_request


def test_figures_of_a_hand_made_run_are_exact() -> None:
    figures = compute_figures(hand_made.run())
    assert figures.total_time == 6.0
    assert figures.num_output_tokens == 8
    assert figures.tokens_per_second == pytest.approx(8 / 6)
    assert figures.mean_ttft == pytest.approx((1 + 1 + 3.5 + 4) / 4)
    assert figures.p99_ttft == pytest.approx(3.5 + 0.97 * 0.5)  # between the two largest, 3.5 and 4
    assert figures.p50_latency == pytest.approx(3.5)  # of 2, 3, 4 and 4.5
    assert figures.p99_latency == pytest.approx(4 + 0.97 * 0.5)
    assert figures.num_steps == 6
    assert figures.slot_use == pytest.approx(8 / 12)
    assert figures.kv_waste == pytest.approx((0 + 0.5 + 0.5 + 0.5 + 1 + 1) / 6)
    assert figures.gpu_utilization is None


def test_idle_step_lowers_slot_use() -> None:
    run = hand_made.run()
    run.recording.steps.append(hand_made.step(6, []))
    assert compute_figures(run).slot_use == pytest.approx(8 / 14)


def test_busy_share_is_the_time_spent_in_steps() -> None:
    steps = [
        replace(
            hand_made.step(number, []), times=RecordedTimes(number, number, number, number + 0.4, number + 1)
        )
        for number in range(3)
    ]
    recording = measure.Recording(steps, [0.0, 1.0, 2.0], [0.4, 1.4, 2.4], [])
    assert measure.busy_share(recording) == pytest.approx(3 * 0.4 / 2.4)


def test_steps_begin_where_the_last_one_ended_or_after_a_pause() -> None:
    engine = FakeEngine()
    engine.core.record()
    origin = engine.core.clock()
    for _ in range(2):
        engine.add(make_request([1, 2], 3, origin=RequestOrigin("A")))
        engine.run()
        for _ in range(10_000):  # the clock goes on
            engine.core.clock()
    recording = measure.Recording.read(engine.core, "static", origin)
    assert len(recording.steps) == 6
    gaps = [begin - end for end, begin in zip(recording.ends, recording.begins[1:], strict=False)]
    assert gaps[:2] + gaps[3:] == [0.0] * 4
    assert gaps[2] == pytest.approx(0.01, abs=1e-4)
