"""Weights asked for while the kernel before is still busy, so that they lie in the L2 cache when they are needed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.multiply import weight_rows
from inflight.layers.triton.tuning import Tile, num_multiprocessors

_FETCH_AHEAD = 4 << 20  # bytes in the L2 cache, of all programs together: about 1 us of memory bandwidth
# Lanes of one warp that ask for the same run of bytes ask once.
_FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")


def bytes_ahead(weight: Tensor, tile: Tile, num_tiles: int) -> int:
    """How much of each weight row to ask for ahead: a multiple of 16, none where rows are not aligned to that."""
    row_bytes = weight.shape[1] * weight.itemsize
    if row_bytes % 16 or weight.data_ptr() % 16:
        return 0
    programs = min(num_tiles * tile.split, 2 * num_multiprocessors(weight.device))
    return min(row_bytes, _FETCH_AHEAD // (programs * tile.block_n)) // 16 * 16


@triton.jit
def fetch_tile(
    weight,
    tile,
    num_out,
    K,
    first,
    last,
    ahead,
    GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LANES: tl.constexpr,
):
    """Ask for the first `ahead` bytes of the tile's part of each weight row, rows shared out between the warps."""
    num_bytes = tl.minimum(ahead, (last - first) * (weight.dtype.element_ty.primitive_bitwidth // 8))
    if num_bytes > 0:
        row = weight_rows(tl.arange(0, LANES) // (LANES // BLOCK_N), tile, num_out, GATE, BLOCK_N)
        _fetch_into_l2(weight + row.to(tl.int64) * K + first, num_bytes)


@triton.jit
def _fetch_into_l2(pointers, num_bytes):
    """Ask for `num_bytes` (a multiple of 16) from each of `pointers` (aligned to 16), without waiting."""
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [pointers.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1
    )
