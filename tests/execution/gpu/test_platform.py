"""The CUDA platform's memory accounting, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.config import EngineConfig
from inflight.execution.gpu import platform as cuda
from inflight.kv.budget import CONTEXT_MEMORY, PEER_MEMORY

GIB = 1 << 30


@pytest.mark.parametrize(
    ("collective", "outside"), [(None, CONTEXT_MEMORY), ("sums", PEER_MEMORY + CONTEXT_MEMORY)]
)
def test_blocks_of_a_shared_gpu_are_counted_from_the_memory_of_this_process(
    monkeypatch: pytest.MonkeyPatch, collective: str | None, outside: int
) -> None:
    monkeypatch.setattr(cuda, "step_memory", lambda _: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 * GIB)
    platform = object.__new__(cuda.CudaPlatform)
    platform.device = torch.device("cuda", 0)
    decoder: Any = SimpleNamespace(
        shard=SimpleNamespace(collective=collective),
        kv_shape=lambda _: SimpleNamespace(bytes_per_block=1 << 20),
    )
    config = EngineConfig.create(model="none", gpu_memory_utilization=0.25)
    assert platform.num_blocks(config, decoder, 64) == (35 * GIB - 3 * GIB - outside - 2 * GIB) >> 20
