"""Memory that kernels leave partial results in, from one launch to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Workspace:
    """One for all layers and kernels of a step: each launch is done with it before the next begins."""

    outs: Tensor  # [max_slots, num_heads, head_dim] float32
    lses: Tensor  # [max_slots, num_heads] float32, base 2
    counters: Tensor  # [max_counters, num_kv_heads] int32: parts that are stored; 0 between launches

    @staticmethod
    def allocate(
        max_slots: int,
        max_counters: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> Workspace:
        return Workspace(
            outs=torch.empty(max_slots, num_heads, head_dim, dtype=torch.float32, device=device),
            lses=torch.empty(max_slots, num_heads, dtype=torch.float32, device=device),
            counters=torch.zeros(max_counters, num_kv_heads, dtype=torch.int32, device=device),
        )
