"""How much memory steps take, found by taking it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from inflight.execution.gpu.runner import GpuRunner

# What captured graphs hold besides their tensors, and what the allocator loses between them.
OVERHEAD = 256 << 20


def step_memory(make_runner: Callable[[], GpuRunner]) -> int:
    """Bytes that a runner needs besides weights and KV blocks: its rows, and its largest steps.

    `make_runner` makes one without graphs and with next to no blocks. The steps it rehearses compute nothing.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner = make_runner()
    for shape in runner.buckets.largest():
        runner.rehearse(shape)
    runner.rehearse_apart()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    runner.close()
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return peak - before + OVERHEAD
