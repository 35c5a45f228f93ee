"""Figures of a run built by hand, and GPU utilisation with a fake driver."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from inflight.compare import measure
from inflight.compare.measure import compute_figures
from tests.compare import hand_made
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
    run.steps.append(hand_made.step(6, []))
    assert compute_figures(run).slot_use == pytest.approx(8 / 14)


class FakeDriver:
    """Answers like NVML: busy, then idle, then an error, which must not count as a reading."""

    def __init__(self) -> None:
        self.answers = [(0, 80), (0, 40), (7, 99)]
        self.num_calls = 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:  # noqa: N802, ARG002
        status, busy = self.answers[min(self.num_calls, 2)]
        rates._obj.gpu = busy
        self.num_calls += 1
        return status


def test_utilization_is_none_without_a_gpu() -> None:
    with measure.GpuMonitor(None) as monitor:
        pass
    assert monitor.utilization is None


def test_gpu_readings_are_averaged_if_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    monkeypatch.setattr(measure, "_open_device", lambda library, device: ctypes.c_void_p())  # noqa: ARG005
    monkeypatch.setattr(measure, "GPU_INTERVAL", 0.001)
    monkeypatch.setattr(measure, "MIN_GPU_READINGS", 2)
    with measure.GpuMonitor(0) as monitor:
        while driver.num_calls < 3:
            pass
    assert monitor.utilization == pytest.approx(0.6)
    monkeypatch.setattr(measure, "MIN_GPU_READINGS", 3)
    assert monitor.utilization is None, "the two readings of a short run are too few"


def test_busy_share_is_the_time_spent_in_steps() -> None:
    engine = FakeEngine()
    recorder = measure.StepRecorder(origin=engine.core.clock())
    engine.core.observers.append(recorder)
    engine.add(make_request([1, 2], 5))
    engine.run()
    share = measure._busy_share(recorder)
    busy = sum(record.finished_at - record.device_began_at for record in engine.records)
    assert 0 < share < 1
    assert share == pytest.approx(busy / (engine.records[-1].finished_at - recorder.origin))


def test_missing_driver_is_logged_and_costs_only_the_utilization(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with measure.GpuMonitor(0) as monitor:
        pass
    assert monitor.utilization is None
    assert "GPU utilisation is not available" in caplog.text
