"""The device of the GPU runners: lost devices, events, copies to the host, and CUDA graphs of steps.

In tests the device may be a CPU, where there is nothing to wait for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

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


def to_host(tensor: Tensor, missing: int | None = None) -> Tensor:
    """Start a copy to host memory and return it. Elements are `missing`, if that is given, until they arrive."""
    on_gpu = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
    if missing is not None:
        host.fill_(missing)
    return host.copy_(tensor, non_blocking=on_gpu)


logger = logging.getLogger(__name__)

ShapeT = TypeVar("ShapeT", bound=Hashable)
ResultT = TypeVar("ResultT")
OtherT = TypeVar("OtherT", bound=Hashable)
PartT = TypeVar("PartT")


class StepGraphs(Generic[ShapeT, ResultT]):
    """Runs `compute(shape)` by replaying its graph.

    `compute` must enqueue the same kernels on the same memory for the same shape. The first shape is run once before it
    is captured, which must be harmless, so that library workspaces of the CUDA stream are not allocated from the
    graphs' pool. For other shapes, kernels are compiled and loaded during capture, which the relaxed mode allows. The
    result of `compute` stays in the graph's memory, and the next step of any shape overwrites it.
    """

    def __init__(self, compute: Callable[[ShapeT], ResultT]) -> None:
        self._compute = compute
        self._graphs: dict[ShapeT, tuple[torch.cuda.CUDAGraph, ResultT]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._cuda_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def in_same_pool(self, compute: Callable[[OtherT], PartT]) -> StepGraphs[OtherT, PartT]:
        """Return graphs of another function in the same pool; the two are never replayed at the same time."""
        graphs = StepGraphs(compute)
        graphs._pool, graphs._cuda_stream = self._pool, self._cuda_stream
        return graphs

    def run(self, shape: ShapeT) -> ResultT:
        self.prepare(shape)
        graph, result = self._graphs[shape]
        graph.replay()
        return result

    def prepare(self, shape: ShapeT) -> None:
        """Capture this shape unless it already is."""
        if shape in self._graphs:
            return
        start = time.perf_counter()
        if not self._graphs:
            self._cuda_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._cuda_stream):
                self._compute(shape)
            torch.cuda.current_stream().wait_stream(self._cuda_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._cuda_stream, capture_error_mode="relaxed"):
            result = self._compute(shape)
        self._graphs[shape] = graph, result
        logger.debug("captured %s in %.3f s", shape, time.perf_counter() - start)

    def clear(self) -> None:
        self._graphs.clear()


class EagerSteps(Generic[ShapeT, ResultT]):
    """The same without graphs: every step launches each kernel by itself."""

    def __init__(self, compute: Callable[[ShapeT], ResultT]) -> None:
        self.run = self.prepare = compute

    def in_same_pool(self, compute: Callable[[OtherT], PartT]) -> EagerSteps[OtherT, PartT]:
        return EagerSteps(compute)

    def clear(self) -> None:
        """Do nothing: there are no graphs."""
