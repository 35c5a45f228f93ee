"""Attention of single query tokens over paged keys, split over keys inside one launch.

A prefix that several decode entries share is read once for all of them, by a separate kernel. It writes partial
results, which the decode kernel merges with those of each entry's own keys.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.attention.backend import AttentionLayer, LayerCache, halves
from inflight.layers.attention.triton.code_pages import first_code_blocks, take_code_pages
from inflight.layers.attention.triton.plan import DECODE_FIELDS, MEMBER_FIELDS, PREFIX_FIELDS
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
)
from inflight.layers.attention.triton.tuning import AttentionTile
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait


def decode_attention(
    qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim], queries ready
    cache: LayerCache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables: Tensor,  # [max_rows, max_blocks] int32
    work: Items,  # of DECODE_FIELDS fields: see plan.py
    workspace: AttentionWorkspace,
    layer: AttentionLayer,
    tile: AttentionTile,
    pdl: bool,
    out: Tensor,  # [T, num_heads * head_dim], written where an item says so
) -> None:
    """Attend for every entry that has items; rows of `out` without items are left as they are."""
    blocks, scales = halves(cache)
    padded_group = triton.next_power_of_2(layer.num_heads // layer.num_kv_heads)
    merged_size = padded_group * triton.next_power_of_2(layer.head_dim)
    # Heads vary fastest, so that programs that run together read neighbouring memory and share block ids.
    grid = (layer.num_kv_heads, work.programs)
    _decode[grid](
        qkv, blocks, scales, block_tables, work.table, work.count, workspace.outs, workspace.lses, workspace.counters,
        layer.sinks, out, layer.scale * math.log2(math.e), layer.window or 0, qkv.stride(0), block_tables.stride(0),
        FIELDS=DECODE_FIELDS, PADDED_GROUP=padded_group,
        SPLITS_AT_ONCE=max(1, min(32, tile.merged // merged_size)), CODES=tile.codes and scales is not None,
        **paged_constants(qkv, blocks, layer, tile, pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["items", "num_items"])
def _decode(
    qkv, cache, scales, tables, items, num_items, partial_outs, partial_lses, counters, sinks, out, scale, window,
    qkv_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, PADDED_GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, CODES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # Load the whole item before it is known to exist, so that nothing waits twice for memory.
    item = items + tl.program_id(1) * FIELDS
    entry = tl.load(item)
    table_row = tl.load(item + 1)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    context_len = tl.load(item + 4)
    first_partial = tl.load(item + 5)
    split = tl.load(item + 6)
    num_splits = tl.load(item + 7)
    own_splits = tl.load(item + 8)
    is_item = tl.program_id(1) < tl.load(num_items)
    if WINDOW:
        begin = tl.maximum(begin, context_len - window)
    keys = cache + head * (BLOCK_SIZE * HEAD_DIM)
    if scales is not None:
        scales += head * BLOCK_SIZE
    table = tables + table_row.to(tl.int64) * table_stride
    value_offset: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if CODES:
        blocks = first_code_blocks(table, begin, end, is_item, BLOCK_SIZE, BLOCK_N)
    else:
        blocks = first_blocks(table, begin, end, is_item, BLOCK_SIZE, BLOCK_N)
    launch_dependents_then_wait(PDL)
    if not is_item:
        return

    row = tl.arange(0, ROWS)  # the group's queries; rows past the group repeat its last one
    query = entry.to(tl.int64) * qkv_stride + (head * GROUP + tl.minimum(row, GROUP - 1)) * HEAD_DIM
    q = load_rows(qkv + query, HEAD_DIM, DIM)
    if CODES:
        acc, row_max, row_sum = take_code_pages(
            q, keys, scales, table, blocks, begin, end, scale, value_offset, BLOCK_STRIDE, HEAD_DIM, DIM, BLOCK_SIZE,
            BLOCK_N, WINDOW, CAP,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = take_pages(
            q, tl.zeros([ROWS, DIM], tl.float32), tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32), keys, scales, table, blocks, begin, end, None, scale, value_offset,
            BLOCK_STRIDE, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, False, True, PRECISION, CAP,
        )  # fmt: skip
    if SINKS:  # part of the only split, or added when splits are merged
        sink = load_sinks(sinks, head * GROUP + tl.minimum(row, GROUP - 1))
        alone = tl.where(num_splits == 1, sink, float("-inf"))
        acc, row_max, row_sum = add_sink(acc, row_max, row_sum, alone)
    result, lse = finish(acc, row_max, row_sum)

    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    out_row = out + (entry.to(tl.int64) * num_heads + head * GROUP) * HEAD_DIM
    if num_splits == 1:
        store_rows(out_row + row * HEAD_DIM, result, row < GROUP, HEAD_DIM, DIM)
    else:
        index = (first_partial + split) * num_heads + head * GROUP + row
        store_partial(partial_outs, partial_lses, index, result, lse, row < GROUP, HEAD_DIM, DIM)
        if arrive(counters + entry * NUM_KV_HEADS + head, own_splits):
            g = tl.arange(0, PADDED_GROUP)
            sink_of_g = load_sinks(sinks, head * GROUP + tl.minimum(g, GROUP - 1)) if SINKS else None
            merged = merge(
                partial_outs, partial_lses, first_partial * num_heads + head * GROUP + g, num_heads,
                num_splits, g < GROUP, sink_of_g, PADDED_GROUP, SPLITS_AT_ONCE, HEAD_DIM, DIM, SINKS,
            )  # fmt: skip
            store_rows(out_row + g * HEAD_DIM, merged, g < GROUP, HEAD_DIM, DIM)


def prefix_attention(
    qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim], queries ready
    cache: LayerCache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables: Tensor,  # [max_rows, max_blocks] int32
    work: Items,  # of PREFIX_FIELDS fields: see plan.py
    members: Tensor,  # int32, max_members * MEMBER_FIELDS values: see plan.py
    workspace: AttentionWorkspace,
    layer: AttentionLayer,
    tile: AttentionTile,
    pdl: bool,
) -> None:
    """Write each member's partials to the workspace, where the decode kernel merges them with the entry's own."""
    blocks, scales = halves(cache)
    constants = paged_constants(qkv, blocks, layer, tile, pdl)
    del constants["SINKS"]  # added when the partials are merged
    _prefix[(layer.num_kv_heads, work.programs)](
        qkv, blocks, scales, block_tables, work.table, work.count, members, workspace.outs, workspace.lses,
        layer.scale * math.log2(math.e), layer.window or 0, qkv.stride(0), block_tables.stride(0),
        FIELDS=PREFIX_FIELDS, MEMBER_FIELDS=MEMBER_FIELDS, **constants,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["items", "num_items", "members"])
def _prefix(
    qkv, cache, scales, tables, items, num_items, members, partial_outs, partial_lses, scale, window, qkv_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FIELDS: tl.constexpr,
    MEMBER_FIELDS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    value_offset: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if scales is not None:
        scales += head * BLOCK_SIZE
    count = tl.load(num_items)
    launch_dependents_then_wait(PDL)
    for number in tl.range(tl.program_id(1), count, tl.num_programs(1), num_stages=1):
        item = items + number * FIELDS
        first_member = tl.load(item)
        num_members = tl.load(item + 1)
        table_row = tl.load(item + 2)
        begin = tl.load(item + 3)
        end = tl.load(item + 4)
        split = tl.load(item + 5)

        # Rows are (member, head) pairs, heads innermost; rows past the last member repeat it.
        row = tl.arange(0, ROWS)
        member = members + (first_member + tl.minimum(row // GROUP, num_members - 1)) * MEMBER_FIELDS
        entry = tl.load(member)
        lowest = tl.load(member + 1) - window  # of what the row sees, if there is a window
        first_partial = tl.load(member + 2)
        query_head = head * GROUP + row % GROUP
        q = load_rows(qkv + entry.to(tl.int64) * qkv_stride + query_head * HEAD_DIM, HEAD_DIM, DIM)
        if WINDOW:
            begin = tl.maximum(begin, tl.min(lowest, 0))
        table = tables + table_row.to(tl.int64) * table_stride
        blocks = first_blocks(table, begin, end, True, BLOCK_SIZE, BLOCK_N)
        acc, row_max, row_sum = take_pages(
            q, tl.zeros([ROWS, DIM], tl.float32), tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32), cache + head * (BLOCK_SIZE * HEAD_DIM), scales, table, blocks, begin,
            end, lowest, scale, value_offset, BLOCK_STRIDE, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N, WINDOW,
            WINDOW, PRECISION, CAP,
        )  # fmt: skip
        result, lse = finish(acc, row_max, row_sum)
        index = (first_partial + split) * (NUM_KV_HEADS * GROUP) + query_head
        kept = row // GROUP < num_members
        store_partial(partial_outs, partial_lses, index, result, lse, kept, HEAD_DIM, DIM)
