"""Cached pages asked for while the projection ahead of attention still runs.

The projection of few tokens waits for memory more than it reads: the pages that decodes begin with can be in the L2
cache by the time they begin. The kernel between the two asks for them before it waits (`early.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from inflight.attention.triton.items import Items
from inflight.early import fetch_into_l2

LANES = 32  # of the warp that asks
FEWEST_RUNS = 2  # that a page is asked for in: so a program asks for LANES // FEWEST_RUNS pages at most


@dataclass(frozen=True, slots=True)
class Ahead:
    """What to ask for: of each decode item the pages of its first tile, `num_bytes` in all at most."""

    decodes: Items
    block_tables: Tensor  # [max_rows, max_blocks] int32
    tile_blocks: int  # pages that a tile of keys has at most
    num_bytes: int

    def pages_a_program(self, cache: Tensor, num_programs: int) -> int:
        """A power of two, rounded down; 0 where a page cannot be asked for in runs of 16 bytes."""
        page = cache[0].nbytes
        pages = min(self.num_bytes // page // num_programs, LANES // FEWEST_RUNS)
        return 0 if page % (16 * LANES) or not pages else 1 << pages.bit_length() - 1


@triton.jit
def pages_ahead(
    number,  # [n] of the pages, among the first ones of all items
    tables,
    table_stride,
    items,
    num_items,
    FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """The blocks [n] that hold them; -1 where an item, or all of them, have no more."""
    index = number // TILE_BLOCKS
    real = index < tl.load(num_items)
    item = items + index * FIELDS
    table_row = tl.load(item + 1, mask=real, other=0)
    block = tl.load(item + 2, mask=real, other=0) // BLOCK_SIZE + number % TILE_BLOCKS
    real = real & (block * BLOCK_SIZE < tl.load(item + 3, mask=real, other=0))
    return tl.load(tables + table_row.to(tl.int64) * table_stride + block, mask=real, other=-1)


@triton.jit
def ask_ahead(
    cache,  # [num_blocks, PAGE values]
    tables,
    table_stride,
    items,
    num_items,
    FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,  # of this program
    LANES: tl.constexpr,
):
    """All of a program's pages at once: what they wait for, they wait for together."""
    RUNS: tl.constexpr = LANES // PAGES  # of a page
    lane = tl.arange(0, LANES)
    number = tl.program_id(0) + lane // RUNS * tl.num_programs(0)
    block = pages_ahead(number, tables, table_stride, items, num_items, FIELDS, BLOCK_SIZE, TILE_BLOCKS)
    there = tl.maximum(block, 0).to(tl.int64)
    run_bytes: tl.constexpr = PAGE // RUNS * (cache.dtype.element_ty.primitive_bitwidth // 8)
    fetch_into_l2(cache + there * PAGE + lane % RUNS * (PAGE // RUNS), tl.where(block >= 0, run_bytes, 0))
