"""Captured steps: one CUDA graph per shape, all in one memory pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

logger = logging.getLogger(__name__)

ShapeT = TypeVar("ShapeT", bound=Hashable)
ResultT = TypeVar("ResultT")
PartT = TypeVar("PartT")


class StepGraphs(Generic[ShapeT, ResultT]):
    """Runs `compute(shape)`, by replay.

    `compute` must enqueue the same kernels on the same memory whenever it is given the same shape. The first shape is
    run before it is recorded, so that what libraries keep for a CUDA stream does not come from the graphs' memory, and
    doing so must do no harm. With the others, new kernels are compiled and loaded while they are recorded, which a
    relaxed capture allows. What `compute` returns stays where the graph wrote it, and the next step of any shape
    overwrites it.
    """

    def __init__(self, compute: Callable[[ShapeT], ResultT]) -> None:
        self._compute = compute
        self._graphs: dict[ShapeT, tuple[torch.cuda.CUDAGraph, ResultT]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._cuda_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def beside(self, compute: Callable[[ShapeT], PartT]) -> StepGraphs[ShapeT, PartT]:
        """Graphs of something else in the same memory, which are never replayed at the same time."""
        graphs = StepGraphs(compute)
        graphs._pool, graphs._cuda_stream = self._pool, self._cuda_stream
        return graphs

    def run(self, shape: ShapeT) -> ResultT:
        self.prepare(shape)
        graph, result = self._graphs[shape]
        graph.replay()
        return result

    def prepare(self, shape: ShapeT) -> None:
        """Make sure that the next step of this shape need only be replayed."""
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
    """The same without graphs: every kernel is launched by itself, at every step."""

    def __init__(self, compute: Callable[[ShapeT], ResultT]) -> None:
        self.run = self.prepare = compute

    def beside(self, compute: Callable[[ShapeT], PartT]) -> EagerSteps[ShapeT, PartT]:
        return EagerSteps(compute)

    def clear(self) -> None:
        """Nothing is kept."""
