"""How long kernels take on a device, and what it could do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

CACHE_BYTES = 256 << 20  # inputs of this size in all, used in turn, come from memory and not from a cache
MEASURED = 2e-3  # seconds, of each of the runs that the median is taken of
RUNS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What simple code reaches on this device, in units of 1e12 a second; nothing where it was not measured."""

    read: float | None  # bytes
    copy: float | None  # bytes read plus bytes written
    matmul: float | None  # floating-point operations, bfloat16


def num_copies(num_bytes: int, most: int = 32) -> int:
    """Copies of inputs of this size that overflow the caches."""
    return min(most, -(-CACHE_BYTES // max(1, num_bytes)))


def seconds_of(calls: Sequence[Call], device: torch.device) -> float:
    """Median time of one call. They run one after the other inside a captured graph; in the interpreter one runs."""
    start = time.perf_counter()
    calls[0]()
    if device.type != "cuda":
        return time.perf_counter() - start
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = min(_replay(graph, 1) for _ in range(3))
    replays = max(1, int(MEASURED / once))
    return statistics.median(_replay(graph, replays) for _ in range(RUNS)) / len(calls)


def _replay(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Seconds of one replay."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


def measure_ceilings(device: torch.device) -> Ceilings:
    if device.type != "cuda":
        return Ceilings(None, None, None)
    source = torch.randn(1 << 30, device=device)  # 4 GiB
    read = source.nbytes / seconds_of([lambda: source.sum()], device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds_of([lambda: target.copy_(source)], device)
    size = 8192
    left, right = torch.randn(2, size, size, device=device).bfloat16().unbind()
    matmul = 2 * size**3 / seconds_of([lambda: left @ right], device)
    return Ceilings(read / 1e12, copy / 1e12, matmul / 1e12)
