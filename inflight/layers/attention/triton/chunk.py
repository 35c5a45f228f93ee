"""Attention of prompt chunks: cached keys through the block table, the chunk's own keys from the projection.

A layer without its own keys finds those of the chunk in the cache, too.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inflight.layers.attention.backend import AttentionLayer, LayerCache, halves
from inflight.layers.attention.triton.plan import CHUNK_FIELDS
from inflight.layers.attention.triton.softmax import (
    AttentionWorkspace,
    Items,
    add_sink,
    arrive,
    finish,
    first_blocks,
    load_rows,
    load_sinks,
    merge,
    paged_constants,
    store_partial,
    store_rows,
    take_pages,
    take_tile,
)
from inflight.layers.attention.triton.tuning import AttentionTile
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait


def chunk_attention(
    qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim], queries and keys ready, or queries only
    cache: LayerCache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables: Tensor,  # [max_rows, max_blocks] int32
    work: Items,  # of CHUNK_FIELDS fields: see plan.py
    workspace: AttentionWorkspace,
    layer: AttentionLayer,
    tile: AttentionTile,
    descriptors: bool,
    pdl: bool,
    out: Tensor,  # [T, num_heads * head_dim], written where an item says so
) -> None:
    """Attend for every tile of positions that has items; other rows of `out` are left as they are."""
    descriptor = None
    blocks, scales = halves(cache)
    descriptors = descriptors and layer.has_kv
    if descriptors:
        block = [tile.keys, triton.next_power_of_2(layer.head_dim)]
        descriptor = TensorDescriptor(qkv, list(qkv.shape), list(qkv.stride()), block)
    _chunk[(layer.num_kv_heads, work.programs)](
        qkv, descriptor, blocks, scales, block_tables, work.table, work.count, workspace.outs, workspace.lses,
        workspace.counters, layer.sinks, out, layer.scale * math.log2(math.e), layer.window or 0, qkv.stride(0),
        block_tables.stride(0), DESCRIPTORS=descriptors, ALL_CACHED=not layer.has_kv, FIELDS=CHUNK_FIELDS,
        **paged_constants(qkv, blocks, layer, tile, pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["items", "num_items"])
def _chunk(
    qkv, descriptor, cache, scales, tables, items, num_items, partial_outs, partial_lses, counters, sinks, out, scale,
    window, qkv_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr, ALL_CACHED: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    token = tl.load(item)  # of the tile's first query
    num_positions = tl.load(item + 1)
    position = tl.load(item + 2)  # of the tile's first query
    num_cached = tl.load(item + 3)  # keys before the chunk
    table_row = tl.load(item + 4)
    begin = tl.load(item + 5)
    end = tl.load(item + 6)
    first_partial = tl.load(item + 7)
    split = tl.load(item + 8)
    num_splits = tl.load(item + 9)
    counter = tl.load(item + 10)
    is_item = tl.program_id(1) < tl.load(num_items)
    if WINDOW:
        begin = tl.maximum(begin, position - window + 1)
    table = tables + table_row.to(tl.int64) * table_stride
    blocks = first_blocks(table, begin, tl.minimum(end, num_cached), is_item, BLOCK_SIZE, BLOCK_N)
    launch_dependents_then_wait(PDL)
    if not is_item:
        return

    # Rows are (position, head) pairs, heads innermost; rows past the last position repeat it.
    row = tl.arange(0, ROWS)
    kept = row // GROUP < num_positions
    offset = tl.minimum(row // GROUP, num_positions - 1)
    query_head = head * GROUP + row % GROUP
    query_positions = position + offset  # [ROWS]
    q = load_rows(qkv + (token + offset).to(tl.int64) * qkv_stride + query_head * HEAD_DIM, HEAD_DIM, DIM)
    lowest = query_positions - window + 1

    value_offset: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if scales is not None:
        scales += head * BLOCK_SIZE
    acc, row_max, row_sum = take_pages(
        q, tl.zeros([ROWS, DIM], tl.float32), tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32), cache + head * (BLOCK_SIZE * HEAD_DIM), scales, table, blocks, begin,
        tl.minimum(end, num_cached), lowest, scale, value_offset, BLOCK_STRIDE, HEAD_DIM, DIM,
        BLOCK_SIZE, BLOCK_N, WINDOW, WINDOW, PRECISION, CAP,
    )  # fmt: skip
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    if ALL_CACHED:
        begin = tl.maximum(begin, num_cached)
        blocks = first_blocks(table, begin, end, True, BLOCK_SIZE, BLOCK_N)
        acc, row_max, row_sum = take_pages(
            q, acc, row_max, row_sum, cache + head * (BLOCK_SIZE * HEAD_DIM), scales, table, blocks, begin, end,
            lowest, scale, value_offset, BLOCK_STRIDE, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, WINDOW, True, PRECISION,
            CAP, query_positions,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = _take_own(
            q, acc, row_max, row_sum, qkv, descriptor, token - position, (num_heads + head) * HEAD_DIM,
            tl.maximum(begin, num_cached), end, position, query_positions, lowest, scale, qkv_stride,
            NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, DIM, BLOCK_N, WINDOW, DESCRIPTORS, PRECISION, CAP,
        )  # fmt: skip
    sink = load_sinks(sinks, query_head) if SINKS else None
    if SINKS:  # part of the only split, or added when splits are merged
        alone = tl.where(num_splits == 1, sink, float("-inf"))
        acc, row_max, row_sum = add_sink(acc, row_max, row_sum, alone)
    result, lse = finish(acc, row_max, row_sum)

    out_rows = out + ((token + offset).to(tl.int64) * num_heads + query_head) * HEAD_DIM
    if num_splits == 1:
        store_rows(out_rows, result, kept, HEAD_DIM, DIM)
    else:
        # A split has a partial for each position of a whole tile.
        positions_per_tile: tl.constexpr = ROWS // GROUP
        index = (first_partial + offset) * num_heads + query_head
        stride: tl.constexpr = positions_per_tile * num_heads
        store_partial(partial_outs, partial_lses, index + split * stride, result, lse, kept, HEAD_DIM, DIM)
        if arrive(counters + counter * NUM_KV_HEADS + head, num_splits):
            merged = merge(
                partial_outs, partial_lses, index, stride, num_splits, kept, sink, ROWS, 1, HEAD_DIM, DIM,
                SINKS,
            )  # fmt: skip
            store_rows(out_rows, merged, kept, HEAD_DIM, DIM)


@triton.jit
def _take_own(
    q,  # [M, DIM]
    acc,
    row_max,
    row_sum,
    qkv,
    descriptor,  # descriptor of qkv, read if DESCRIPTORS
    first_token,  # where the request's position 0 would be
    key_column,  # of this head's keys in qkv; its values lie `value_offset` further
    begin,
    end,
    position,  # of the tile's first query: keys up to it are seen by all rows
    query_positions,  # [M] positions of the queries
    lowest,  # [M] first position that each row sees, read if WINDOW
    scale,
    qkv_stride,
    value_offset: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):
    """Add the chunk's own keys at positions [begin, end): those below the diagonal without a mask, then the others."""
    n = tl.arange(0, BLOCK_N)
    masked_from = begin
    if not WINDOW:
        masked_from += tl.maximum(tl.minimum(position + 1, end) - begin, 0) // BLOCK_N * BLOCK_N
        for start in tl.range(begin, masked_from, BLOCK_N):
            if DESCRIPTORS:
                k = descriptor.load([first_token + start, key_column])
                v = descriptor.load([first_token + start, key_column + value_offset])
            else:
                k_at = qkv + (first_token + start + n).to(tl.int64) * qkv_stride + key_column
                k = load_rows(k_at, HEAD_DIM, DIM)
                v = load_rows(k_at + value_offset, HEAD_DIM, DIM)
            acc, row_max, row_sum = take_tile(
                q, k, v, None, acc, row_max, row_sum, scale, False, PRECISION, CAP
            )
    for start in tl.range(masked_from, end, BLOCK_N):
        key = start + n
        k_at = qkv + (first_token + tl.minimum(key, end - 1)).to(tl.int64) * qkv_stride + key_column
        k = load_rows(k_at, HEAD_DIM, DIM)
        v = load_rows(k_at + value_offset, HEAD_DIM, DIM)
        seen = (key < end)[None, :] & (key[None, :] <= query_positions[:, None])
        if WINDOW:
            seen = seen & (key[None, :] >= lowest[:, None])
        acc, row_max, row_sum = take_tile(q, k, v, seen, acc, row_max, row_sum, scale, True, PRECISION, CAP)
    return acc, row_max, row_sum
