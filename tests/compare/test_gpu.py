from __future__ import annotations

import ctypes
from typing import Any

import pytest

from inflight.compare import gpu, measure
from tests.helpers import FakeEngine, make_request


class Driver:
    """Answers like the driver's library: busy, then idle, then an error that counts for nothing."""

    def __init__(self) -> None:
        self.answers = [(0, 80), (0, 40), (7, 99)]
        self.asked = 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:  # noqa: N802, ARG002
        status, busy = self.answers[min(self.asked, 2)]
        rates._obj.gpu = busy
        self.asked += 1
        return status


def test_without_a_gpu_nothing_is_known() -> None:
    with gpu.GpuMonitor(None) as monitor:
        pass
    assert monitor.utilization is None


def test_readings_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    monkeypatch.setattr(gpu, "_open", lambda library, device: ctypes.c_void_p())  # noqa: ARG005
    monkeypatch.setattr(gpu, "INTERVAL", 0.001)
    monkeypatch.setattr(gpu, "MIN_READINGS", 2)
    with gpu.GpuMonitor(0) as monitor:
        while driver.asked < 3:
            pass
    assert monitor.utilization == pytest.approx(0.6)
    monkeypatch.setattr(gpu, "MIN_READINGS", 3)
    assert monitor.utilization is None, "two readings of a short run say nothing"


def test_a_short_run_is_as_busy_as_its_steps_say() -> None:
    engine = FakeEngine()
    recorder = measure.StepWatch(origin=engine.core.clock())
    engine.core.observers.append(recorder)
    engine.add(make_request([1, 2], 5))
    engine.run()
    share = measure._busy_share(recorder)
    busy = sum(record.finished_at - record.began_at for record in engine.records)
    assert 0 < share < 1
    assert share == pytest.approx(busy / (engine.records[-1].finished_at - recorder.origin))


def test_a_missing_driver_is_told_and_costs_only_the_figure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with gpu.GpuMonitor(0) as monitor:
        pass
    assert monitor.utilization is None
    assert "GPU utilisation is not known" in caplog.text
