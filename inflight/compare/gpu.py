"""How busy a GPU is, read from the driver's own library: no package needed."""

from __future__ import annotations

import ctypes
import logging
from threading import Event, Thread

logger = logging.getLogger(__name__)

INTERVAL = 0.1  # seconds between readings; the driver itself averages over about as long
MIN_READINGS = 20  # that say something: in fewer, the ends of a run count for as much as its middle


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # per cent


class GpuMonitor:
    """Averages the utilisation of a CUDA device over a `with` block. Device None: there is nothing to watch."""

    def __init__(self, device: int | None) -> None:
        self._device = device
        self._readings: list[int] = []
        self._stop = Event()
        self._thread: Thread | None = None

    @property
    def utilization(self) -> float | None:
        """Share of the time in which the GPU computed, or None where it is not known: too short a time, too."""
        enough = len(self._readings) >= MIN_READINGS
        return sum(self._readings) / len(self._readings) / 100 if enough else None

    def __enter__(self) -> GpuMonitor:
        if self._device is not None:
            try:
                library = ctypes.CDLL("libnvidia-ml.so.1")
                handle = _open(library, self._device)
            except OSError as error:
                logger.warning("GPU utilisation is not known: %s", error)
                return self
            self._thread = Thread(target=self._read, args=(library, handle), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _read(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        rates = _Utilization()
        while not self._stop.wait(INTERVAL):
            if library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0:
                self._readings.append(int(rates.gpu))


def _open(library: ctypes.CDLL, device: int) -> ctypes.c_void_p:
    """The driver's handle of torch's device: by its name, since the two may count devices differently."""
    import torch

    handle = ctypes.c_void_p()
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    status = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
    if status:
        raise OSError(f"the driver's library answers with error {status}")
    return handle
