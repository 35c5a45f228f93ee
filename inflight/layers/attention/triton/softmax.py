"""Shared parts of the attention kernels: launches, online softmax over tiles of keys, paged keys, merging of partials.

Scores are in units of log2 (`scale` includes log2(e)), so that every exponential is one exp2. `row_max` is the highest
score that a query row has met, `row_sum` the sum of its weights relative to that, `acc` the weighted values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.attention.backend import AttentionLayer
from inflight.layers.attention.triton.quantized import split_scales
from inflight.layers.attention.triton.tuning import AttentionTile
from inflight.layers.triton.byte_codes import fp8_values
from inflight.layers.triton_utils.pdl import launch_options


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
class WorkspaceNeed:
    """How much of a workspace the layers with heads of one shape use."""

    max_partials: int
    max_counters: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Partial results of queries whose keys are split. One serves all layers and kernels of a step: each launch is
    done with it before the next begins. A layer reads it in the shapes below, with the number and size of its heads."""

    outs: Tensor  # [max_partials, num_heads, head_dim] float32
    lses: Tensor  # [max_partials, num_heads] float32, base 2
    counters: Tensor  # [max_counters, num_kv_heads] int32: splits stored so far; 0 between launches

    @staticmethod
    def allocate(needs: Sequence[WorkspaceNeed], device: torch.device) -> AttentionWorkspace:
        """Return one that is large enough for each of these needs."""
        num_outs = max((need.max_partials * need.num_heads * need.head_dim for need in needs), default=0)
        num_lses = max((need.max_partials * need.num_heads for need in needs), default=0)
        num_counters = max((need.max_counters * need.num_kv_heads for need in needs), default=0)
        return AttentionWorkspace(
            outs=torch.empty(num_outs, dtype=torch.float32, device=device),
            lses=torch.empty(num_lses, dtype=torch.float32, device=device),
            counters=torch.zeros(num_counters, dtype=torch.int32, device=device),
        )


def paged_constants(
    qkv: Tensor, blocks: Tensor, layer: AttentionLayer, tile: AttentionTile, pdl: bool
) -> dict[str, Any]:
    """Return the compile-time arguments that kernels over paged keys have in common. `blocks` are values or codes."""
    return {
        "NUM_KV_HEADS": layer.num_kv_heads,
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "HEAD_DIM": layer.head_dim,
        "BLOCK_SIZE": blocks.shape[3],
        "BLOCK_STRIDE": blocks.stride(0),
        "WINDOW": layer.window is not None,
        "SINKS": layer.sinks is not None,
        "CAP": 0.0 if layer.softcap is None else layer.softcap * math.log2(math.e),
        **tile_constants(qkv, layer.head_dim, tile, pdl),
    }


def tile_constants(qkv: Tensor, head_dim: int, tile: AttentionTile, pdl: bool) -> dict[str, Any]:
    """Return the compile-time arguments that depend on the tile."""
    return {
        "ROWS": tile.rows,
        "DIM": triton.next_power_of_2(head_dim),
        "BLOCK_N": tile.keys,
        "PRECISION": "ieee" if qkv.element_size() == 4 else None,
        "PDL": pdl,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **({} if tile.registers is None else {"maxnreg": tile.registers}),
        **launch_options(pdl),
    }


@triton.jit
def load_rows(pointers, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """pointers [N] to the first of HEAD_DIM features -> [N, DIM], zeros past HEAD_DIM."""
    d = tl.arange(0, DIM)
    if DIM == HEAD_DIM:
        rows = tl.load(pointers[:, None] + d[None, :])
    else:
        rows = tl.load(pointers[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0)
    return rows


@triton.jit
def store_rows(pointers, rows, kept, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """rows [N, DIM] to pointers [N], where kept [N]."""
    d = tl.arange(0, DIM)
    tl.store(pointers[:, None] + d[None, :], rows, mask=kept[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def take_tile(
    q,  # [M, DIM]
    k,  # [N, DIM]
    v,  # [N, DIM]
    seen,  # [M, N], read if MASKED
    acc,  # [M, DIM] float32
    row_max,  # [M] float32
    row_sum,  # [M] float32
    scale,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr = 0.0,
    k_scale=None,  # [N] float32, or None
    v_scale=None,
):
    """Add one tile of keys to the running softmax. With CAP, scores are limited to it smoothly."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
    if k_scale is not None:
        scores *= k_scale[None, :]
    if CAP > 0.0:
        scores = tanh(scores * (scale / CAP)) * CAP
        scale = 1.0
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    new_row_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet has no maximum: any finite value avoids inf - inf.
    shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max) if MASKED else new_row_max
    weights = tl.exp2(scores * scale - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    if v_scale is not None:
        if v.dtype == tl.float16:  # small weights have few bits in float16
            v *= v_scale.to(tl.float16)[:, None]
        else:
            weights *= v_scale[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_row_max, row_sum


@triton.jit
def tanh(x):
    small = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2 |x|) never overflows
    return tl.where(x >= 0, 1.0 - small, small - 1.0) / (1.0 + small)


@triton.jit
def page_pointers(base, blocks, positions, block_stride, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return pointers to one head's features of `positions` [N], which are in `blocks` [N]."""
    return base + blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def load_words(scales, blocks, positions, block_stride, BLOCK_SIZE: tl.constexpr):
    """Load the words with one head's scales of `positions` [N], which are in `blocks` [N]."""
    words_per_block: tl.constexpr = block_stride // 4  # a block's stride is in bytes
    return tl.load(page_pointers(scales, blocks, positions, words_per_block, 1, BLOCK_SIZE))


@triton.jit
def take_codes(
    q, k, v, words, seen, acc, row_max, row_sum, scale,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Add one tile of quantized keys to the running softmax: codes k and v [N, DIM], and words [N] with scales."""
    k_scale, v_scale = split_scales(words)
    k, v = fp8_values(k, q.dtype), fp8_values(v, q.dtype)
    return take_tile(q, k, v, seen, acc, row_max, row_sum, scale, MASKED, PRECISION, CAP, k_scale, v_scale)


@triton.jit
def first_blocks(table, begin, end, is_item, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the blocks [BLOCK_N] of the first tile of positions [begin, end), for `take_pages`, if it is an item."""
    position = tl.minimum(begin + tl.arange(0, BLOCK_N), tl.maximum(end - 1, 0))
    readable = (position >= 0) & (position < tl.where(is_item, end, 0))
    return tl.load(table + position // BLOCK_SIZE, mask=readable, other=0)


@triton.jit
def take_pages(
    q,  # [M, DIM]
    acc,
    row_max,
    row_sum,
    keys,  # pointer to this head's keys in block 0; its values lie `value_offset` further
    scales,  # pointer to this head's scales in block 0, or None: keys and values are not quantized
    table,  # pointer to the request's block ids
    blocks,  # [BLOCK_N] the first of them, see `first_blocks`
    begin,
    end,
    lowest,  # [M] first position that each row sees, read if WINDOW
    scale,
    value_offset: tl.constexpr,
    block_stride: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK_ALL: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    highest=None,  # [M] last position that each row sees, with MASK_ALL; None: all precede the queries
):
    """Add cached keys at positions [begin, end) to the running softmax.

    Positions past the end are clamped, not masked: only written slots are loaded, so nothing left over in an unused
    slot can reach a result. Block ids are loaded one tile ahead, so that no tile waits for them. With MASK_ALL one loop
    masks every tile; otherwise only a last, partly filled one is masked, after the loop.
    """
    n = tl.arange(0, BLOCK_N)
    last_key = tl.maximum(end - 1, 0)
    masked_from = begin if MASK_ALL else begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
    if not MASK_ALL:
        for start in tl.range(begin, masked_from, BLOCK_N):
            k_at = page_pointers(keys, blocks, start + n, block_stride, HEAD_DIM, BLOCK_SIZE)
            k = load_rows(k_at, HEAD_DIM, DIM)
            v = load_rows(k_at + value_offset, HEAD_DIM, DIM)
            if scales is not None:
                words = load_words(scales, blocks, start + n, block_stride, BLOCK_SIZE)
            blocks = tl.load(table + tl.minimum(start + BLOCK_N + n, last_key) // BLOCK_SIZE)
            if scales is None:
                acc, row_max, row_sum = take_tile(
                    q, k, v, None, acc, row_max, row_sum, scale, False, PRECISION, CAP
                )
            else:
                acc, row_max, row_sum = take_codes(
                    q, k, v, words, None, acc, row_max, row_sum, scale, False, PRECISION, CAP
                )
    for start in tl.range(masked_from, end, BLOCK_N, num_stages=None if MASK_ALL else 1):
        position = start + n
        readable = tl.minimum(position, last_key)
        k_at = page_pointers(keys, blocks, readable, block_stride, HEAD_DIM, BLOCK_SIZE)
        k = load_rows(k_at, HEAD_DIM, DIM)
        v = load_rows(k_at + value_offset, HEAD_DIM, DIM)
        if scales is not None:
            words = load_words(scales, blocks, readable, block_stride, BLOCK_SIZE)
        blocks = tl.load(table + tl.minimum(position + BLOCK_N, last_key) // BLOCK_SIZE)
        seen = (position < end)[None, :]
        if WINDOW:
            seen = seen & (position[None, :] >= lowest[:, None])
        if highest is not None:
            seen = seen & (position[None, :] <= highest[:, None])
        if scales is None:
            acc, row_max, row_sum = take_tile(
                q, k, v, seen, acc, row_max, row_sum, scale, True, PRECISION, CAP
            )
        else:
            acc, row_max, row_sum = take_codes(
                q, k, v, words, seen, acc, row_max, row_sum, scale, True, PRECISION, CAP
            )
    return acc, row_max, row_sum


@triton.jit
def load_sinks(sinks, heads):
    """Load the sinks of query heads [M], in units of log2."""
    return tl.load(sinks + heads) * 1.4426950408889634


@triton.jit
def add_sink(acc, row_max, row_sum, sink):
    """Add a term without a value to the softmax of each row: sink [M], or -inf for none."""
    new_row_max = tl.maximum(row_max, sink)
    shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    rescale = tl.exp2(row_max - shift)
    return acc * rescale[:, None], new_row_max, row_sum * rescale + tl.exp2(sink - shift)


@triton.jit
def finish(acc, row_max, row_sum):
    """Return output rows and their log-sum-exp (base 2); a row that saw nothing is zeros and -inf."""
    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse = tl.where(empty, float("-inf"), row_max + tl.log2(tl.where(empty, 1.0, row_sum)))
    return out, lse


@triton.jit
def store_partial(outs, lses, index, out, lse, kept, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Store the rows of a partial result at `index` [M] of the workspace: outs [., HEAD_DIM] and lses [.]."""
    store_rows(outs + index.to(tl.int64) * HEAD_DIM, out, kept, HEAD_DIM, DIM)
    tl.store(lses + index, lse, mask=kept)


@triton.jit
def arrive(counter, expected):
    """Announce that this program's partials are stored; return whether it is the last of `expected` programs.

    The barrier orders the stores of all threads before the atomic; its release, and the acquire in the last program,
    make them visible to all of that program's threads. The counter is reset to 0 for the next launch.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if is_last:
        tl.store(counter, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def merge(
    outs,
    lses,
    index,  # [M] places of the first partials in the workspace
    stride,  # from one partial of a row to its next
    num_splits,
    kept,  # [M]
    sink,  # [M], read if SINKS
    M: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,  # how many partials are loaded at once
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge all partials of each row, always in the same order, and its sink -> [M, DIM]."""
    p = tl.arange(0, SPLITS_AT_ONCE)
    d = tl.arange(0, DIM)
    row_max = tl.full([M], float("-inf"), tl.float32)
    row_sum = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DIM], tl.float32)
    for first in range(0, num_splits, SPLITS_AT_ONCE):
        there = (first + p < num_splits)[:, None] & kept[None, :]  # [SPLITS_AT_ONCE, M]
        partial = index[None, :] + (first + p)[:, None] * stride
        lse = tl.load(lses + partial, mask=there, other=float("-inf"), cache_modifier=".cg")
        out = tl.load(
            outs + partial.to(tl.int64)[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_row_max = tl.maximum(row_max, tl.max(lse, 0))
        shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        weights = tl.exp2(lse - shift[None, :])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        acc = acc * rescale[:, None] + tl.sum(out * weights[:, :, None], 0)
        row_max = new_row_max
    if SINKS:
        acc, row_max, row_sum = add_sink(acc, row_max, row_sum, sink)
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
