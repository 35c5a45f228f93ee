"""One token of each of some rows, planned on the device: its position depends on what the step has sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.attention.triton.backend import TableInputs, TritonInputs
from inflight.layers.attention.triton.plan import DECODE_FIELDS
from inflight.layers.attention.triton.softmax import AttentionWorkspace, Items
from inflight.layers.attention.triton.tuning import Tuning

MOST_SPLITS, SPLIT_PROGRAMS = 8, 64  # of an entry, and the programs up to which entries are split
MIN_SPLIT, WHOLE_KEYS = 512, 64  # keys of a split, at least, and their divisor


@dataclass(frozen=True, slots=True)
class SingleTokens:
    """Plans attention for some rows, one token each."""

    tunings: Mapping[
        int, Tuning
    ]  # of the block tables that layers have, by number; none of them has a window
    block_tables: Tensor  # [num_tables, max_rows, max_blocks] int32
    block_size: int
    workspace: AttentionWorkspace

    def plan(self, rows: Tensor, positions: Tensor) -> TritonInputs:
        """Enqueue the plan for a token at each position of rows [R] int32; negative rows are padding."""
        capacity, device = len(rows), rows.device
        num_splits = min(MOST_SPLITS, max(1, SPLIT_PROGRAMS // capacity))
        items = torch.empty(capacity * num_splits, DECODE_FIELDS, dtype=torch.int32, device=device)
        count = torch.zeros(1, dtype=torch.int32, device=device)
        work = Items(items, count, capacity * num_splits)
        planned: list[TableInputs | None] = [None] * len(self.block_tables)
        for table, tuning in self.tunings.items():
            tables, slots = self.block_tables[table], torch.empty(capacity, dtype=torch.int32, device=device)
            planned[table] = TableInputs(tuning, slots, tables, work, None, None, None)
            _plan_singles[(1,)](
            rows, positions, tables, tables.stride(0), slots, items, count, capacity,
            BLOCK_SIZE=self.block_size, FIELDS=DECODE_FIELDS, SPLITS=num_splits, MIN_SPLIT=MIN_SPLIT,
            TILE=WHOLE_KEYS, SIZE=triton.next_power_of_2(capacity), num_warps=4,
        )  # fmt: skip
        return TritonInputs(positions, rows, tuple(planned), False, self.workspace)


@triton.jit(do_not_specialize=["capacity"])
def _plan_singles(
    rows, positions, tables, table_stride, slots, items, count, capacity,
    BLOCK_SIZE: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
    TILE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write decode items (see plan.py) for rows [capacity], each with its own number of splits, and where keys go."""
    entry = tl.arange(0, SIZE)
    row = tl.load(rows + entry, mask=entry < capacity, other=-1)
    there = row >= 0
    position = tl.load(positions + entry, mask=there, other=0)
    block_id = tl.load(tables + row.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=there, other=0)
    slot = tl.where(there, block_id * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots + entry, slot, mask=entry < capacity)
    context_len = position + 1
    most = tl.minimum(SPLITS, (context_len + MIN_SPLIT - 1) // MIN_SPLIT)
    size = ((context_len + most - 1) // most + TILE - 1) // TILE * TILE
    num_splits = tl.where(there, (context_len + size - 1) // size, 0)
    first = tl.cumsum(num_splits, 0) - num_splits
    tl.store(count, tl.sum(num_splits, 0))
    for split in tl.static_range(SPLITS):
        item = items + (first + split) * FIELDS
        exists = split < num_splits
        begin = split * size
        tl.store(item, entry, mask=exists)
        tl.store(item + 1, row, mask=exists)
        tl.store(item + 2, begin, mask=exists)
        tl.store(item + 3, tl.minimum(begin + size, context_len), mask=exists)
        tl.store(item + 4, context_len, mask=exists)
        tl.store(item + 5, tl.where(num_splits > 1, entry * SPLITS, 0), mask=exists)
        tl.store(item + 6, entry * 0 + split, mask=exists)
        tl.store(item + 7, num_splits, mask=exists)
        tl.store(item + 8, num_splits, mask=exists)
