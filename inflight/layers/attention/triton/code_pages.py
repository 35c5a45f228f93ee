"""Attention of a few query rows over a paged cache of fp8 codes, with as few instructions per code as possible.

A decode reads a byte per feature, so the conversion of codes and the arrangement of operands decide its speed, not the
memory. Three choices keep both small:

- *Keys times queries.* Scores are computed as [keys, rows] and results as [features, rows]: the tensor cores' long side
  then holds keys or features, and their short side of 8 the few rows.
- *Values as 16-bit words.* Products over keys need pairs of neighbouring keys in a register, but the codes of a key's
  features are neighbours in memory, and only elements of 16 bits can be transposed on their way from shared memory. So
  a word holds the codes of two features; it is split into the even and the odd ones in registers, and these have an
  accumulator each.
- *float16.* Hopper converts two codes to float16 in one instruction, and no other type is as cheap. Nothing is lost: a
  code is exact, queries are scaled by a power of two, and weights are relative to the largest product of a weight and
  its value's scale, so that they are at most 1 whatever the scales are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.layers.attention.triton.quantized import (
    code_values,
    largest_magnitude,
    log2_of_power,
    power_of_two,
    split_scales,
    word_values,
)
from inflight.layers.attention.triton.softmax import tanh

_MOST_PIECES = 8


@triton.jit
def half_queries(q):
    """Return queries [M, DIM] times a power of two as float16, and its inverse."""
    if q.dtype == tl.float16:
        return q, 1.0
    wide = q.to(tl.float32)
    exponent = (tl.max(largest_magnitude(wide), 0) >> 23) - (127 + 14)  # the largest becomes 2^14 to 2^15
    exponent = tl.maximum(exponent, -126)
    return (wide * power_of_two(-exponent)).to(tl.float16), power_of_two(exponent)


@triton.jit
def code_blocks(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, is_item=None):
    """Load the blocks [BLOCK_N] of the tile of positions from `start` on, or the last one for those past the end, if it
    is an item. Each of the blocks is loaded once, where few make a tile, and not once for each position."""
    n = tl.arange(0, BLOCK_N)
    last_block = tl.maximum(end - 1, 0) // BLOCK_SIZE
    piece: tl.constexpr = _piece(BLOCK_SIZE, BLOCK_N)
    other: tl.constexpr = None if is_item is None else 0
    if piece == 1:
        is_read = None if is_item is None else n < tl.where(is_item, BLOCK_N, 0)
        return tl.load(table + tl.minimum((start + n) // BLOCK_SIZE, last_block), mask=is_read, other=other)
    blocks = tl.zeros([BLOCK_N], tl.int32)
    for i in tl.static_range(BLOCK_N // piece):
        block = tl.load(
            table + tl.minimum((start + i * piece) // BLOCK_SIZE, last_block), mask=is_item, other=other
        )
        blocks = tl.where(n // piece == i, block, blocks)
    return blocks


@triton.constexpr_function
def _piece(block_size: int, keys: int) -> int:
    """Return how many neighbouring keys of a tile are known to be in one block."""
    piece = min(block_size, keys)
    return piece if block_size & (block_size - 1) == 0 and keys // piece <= _MOST_PIECES else 1


@triton.jit
def first_code_blocks(table, begin, end, is_item, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the blocks of the first tile that `take_code_pages` reads, if it is an item."""
    piece: tl.constexpr = _piece(BLOCK_SIZE, BLOCK_N)
    return code_blocks(table, begin // piece * piece, end, BLOCK_SIZE, BLOCK_N, is_item)


@triton.jit
def take_code_pages(
    q,  # [M, DIM]
    keys,  # pointer to this head's codes of keys in block 0; those of its values lie `value_offset` further
    scales,  # pointer to this head's scales in block 0
    table,  # pointer to the request's block ids
    blocks,  # [BLOCK_N] the first of them, see `first_code_blocks`
    begin,
    end,
    scale,
    value_offset: tl.constexpr,
    block_stride: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):
    """Attend to cached keys at positions [begin, end), all of which every row sees -> acc [M, DIM], row_max, row_sum.

    Items begin at a block, or a whole number of tiles further; only a window may begin anywhere, and then the positions
    before it are masked. Unwritten positions are not loaded: they could be NaN.
    """
    M: tl.constexpr = q.shape[0]
    queries, factor = half_queries(q)
    queries = tl.trans(queries)
    scale *= factor
    n = tl.arange(0, BLOCK_N)
    feature = tl.arange(0, DIM)
    word = tl.arange(0, DIM // 2)
    values = (keys + value_offset).to(tl.pointer_type(tl.uint16))
    even = tl.zeros([DIM // 2, M], tl.float32)
    odd = tl.zeros([DIM // 2, M], tl.float32)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    piece: tl.constexpr = _piece(BLOCK_SIZE, BLOCK_N)
    for start in tl.range(begin // piece * piece, end, BLOCK_N):
        place = n % piece if piece == BLOCK_SIZE else (start + n) % BLOCK_SIZE
        seen = n < end - start
        if WINDOW:
            seen = seen & (n >= begin - start)
        block = blocks.to(tl.int64)
        k_seen, v_seen = seen[:, None], seen[None, :]
        if DIM != HEAD_DIM:
            k_seen = k_seen & (feature < HEAD_DIM)[None, :]
            v_seen = v_seen & (word < HEAD_DIM // 2)[:, None]
        k_at = place[:, None] * HEAD_DIM + feature[None, :]
        v_at = place[None, :] * (HEAD_DIM // 2) + word[:, None]
        k = tl.load((keys + block * block_stride)[:, None] + k_at, mask=k_seen, other=0)
        v = tl.load((values + block * (block_stride // 2))[None, :] + v_at, mask=v_seen, other=0)
        words = tl.load(scales + block * (block_stride // 4) + place, mask=seen, other=0)
        blocks = code_blocks(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)

        k_scale, v_scale = split_scales(words)
        scores = tl.dot(code_values(k), queries)  # [BLOCK_N, M]
        # A value's scale is part of its weight from here on. If a key is not seen, that scale is 0.
        if CAP > 0.0:
            scores = tanh(scores * (k_scale * (scale / CAP))[:, None]) * CAP + log2_of_power(v_scale)[:, None]
        else:
            scores = scores * (k_scale * scale)[:, None] + log2_of_power(v_scale)[:, None]
        new_row_max = tl.maximum(row_max, tl.max(scores, 0))
        shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        weights = tl.exp2(scores - shift[None, :])
        rescale = tl.exp2(row_max - shift)
        inverse = (0x7F000000 - (words & -65536)).to(tl.float32, bitcast=True)  # 1 / v_scale
        row_sum = row_sum * rescale + tl.sum(weights * inverse[:, None], 0)
        row_max = new_row_max
        half_weights = weights.to(tl.float16)
        v_even, v_odd = word_values(v)
        even = tl.dot(v_even, half_weights, even * rescale[None, :])
        odd = tl.dot(v_odd, half_weights, odd * rescale[None, :])
    acc = tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2)), [M, DIM])
    return acc, row_max, row_sum
