from __future__ import annotations

import ctypes
from typing import Any

import pytest

from inflight.compare import gpu


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
    with gpu.GpuMonitor(0) as monitor:
        while driver.asked < 3:
            pass
    assert monitor.utilization == pytest.approx(0.6)


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
