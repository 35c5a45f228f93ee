"""One step as the attention kernels read it: work items and workspace, all on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Items:
    """A plan (`plan.py`) on the device, as a captured graph needs it: capacity for many items, and their number.

    A program without an item costs about a microsecond, and if one fills a multiprocessor they run one after another:
    the capacity should not be much larger than needed.
    """

    table: Tensor  # int32, rows of the kernel's fields, flat or not
    count: Tensor  # [1] int32: the number of rows in use
    # Per KV head. Programs of the prefix kernel take items in turn; other kernels have one program per row.
    programs: int


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Partial results of queries whose keys are split. One serves all layers and kernels of a step: each launch is
    done with it before the next begins."""

    outs: Tensor  # [max_partials, num_heads, head_dim] float32
    lses: Tensor  # [max_partials, num_heads] float32, base 2
    counters: Tensor  # [max_counters, num_kv_heads] int32: splits stored so far; 0 between launches

    @staticmethod
    def allocate(
        max_partials: int,
        max_counters: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> AttentionWorkspace:
        return AttentionWorkspace(
            outs=torch.empty(max_partials, num_heads, head_dim, dtype=torch.float32, device=device),
            lses=torch.empty(max_partials, num_heads, dtype=torch.float32, device=device),
            counters=torch.zeros(max_counters, num_kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class TritonStep:
    """One step in device memory. Kernels whose items are None are not launched; all contents may change between replays
    of a graph."""

    positions: Tensor  # [T] int32; any valid position for padding
    # [T] int32, where each token's KV goes: block_id * block_size + offset; below 0: padding
    slot_mapping: Tensor
    block_tables: Tensor  # [max_rows, max_blocks] int32
    decodes: Items  # DecodePlan.items
    short_context: bool  # DecodeWork.short_context
    prefixes: Items | None  # PrefixPlan.items
    members: Tensor | None  # PrefixPlan.members(), int32, max_members rows; with prefixes only
    chunks: Items | None  # ChunkPlan.items
    workspace: AttentionWorkspace
