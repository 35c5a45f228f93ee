"""Device helpers of the GPU runners. In tests the device may be a CPU, where there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from inflight.errors import DeviceLostError


@contextmanager
def watched(device: torch.device) -> Iterator[None]:
    """Turn an error that leaves the device unusable into DeviceLostError.

    After some errors (an illegal access, an ECC error) every later call fails too, until the process ends.
    """
    if device.type == "cuda":
        # The current device is per thread, and defaults to the first.
        torch.cuda.set_device(device)
    try:
        yield
    except RuntimeError as error:
        try:
            wait_for(device)
        except RuntimeError:
            raise DeviceLostError(f"the GPU is lost: {str(error).splitlines()[0]}") from error
        raise


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def event_on(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes with the work enqueued so far; None where there is nothing to wait for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy to host memory and return it."""
    on_gpu = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
    return host.copy_(tensor, non_blocking=on_gpu)
