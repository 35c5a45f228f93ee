"""Attention over prefixes that several decode entries share: each prefix is read once for all of them."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from inflight.attention.backend import AttentionLayer
from inflight.attention.triton.plan import MEMBER_FIELDS, PREFIX_FIELDS
from inflight.attention.triton.softmax import finish, first_blocks, load_rows, store_partial, take_pages
from inflight.attention.triton.step import AttentionWorkspace, Items
from inflight.attention.triton.tuning import AttentionTile
from inflight.triton_utils.pdl import launch_dependents_then_wait, launch_options


def prefix_attention(
    qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim], queries ready
    cache: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables: Tensor,  # [max_rows, max_blocks] int32
    work: Items,  # of PREFIX_FIELDS fields: see plan.py
    members: Tensor,  # int32, max_members * MEMBER_FIELDS values: see plan.py
    workspace: AttentionWorkspace,
    layer: AttentionLayer,
    tile: AttentionTile,
    pdl: bool,
) -> None:
    """Write each member's partials to the workspace, where the decode kernel merges them with the entry's own."""
    _prefix[(layer.num_kv_heads, work.programs)](
        qkv,
        cache,
        block_tables,
        work.table,
        work.count,
        members,
        workspace.outs,
        workspace.lses,
        layer.scale * math.log2(math.e),
        layer.window or 0,
        qkv.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=layer.num_heads // layer.num_kv_heads,
        HEAD_DIM=layer.head_dim,
        BLOCK_SIZE=cache.shape[3],
        WINDOW=layer.window is not None,
        FIELDS=PREFIX_FIELDS,
        MEMBER_FIELDS=MEMBER_FIELDS,
        ROWS=tile.rows,
        DIM=triton.next_power_of_2(layer.head_dim),
        BLOCK_N=tile.keys,
        PRECISION="ieee" if qkv.element_size() == 4 else None,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["items", "num_items", "members"],
)
def _prefix(
    qkv,
    cache,
    tables,
    items,
    num_items,
    members,
    partial_outs,
    partial_lses,
    scale,
    window,
    qkv_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FIELDS: tl.constexpr,
    MEMBER_FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    block_stride: tl.constexpr = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
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
            q,
            tl.zeros([ROWS, DIM], tl.float32),
            tl.full([ROWS], float("-inf"), tl.float32),
            tl.zeros([ROWS], tl.float32),
            cache + head * (BLOCK_SIZE * HEAD_DIM),
            table,
            blocks,
            begin,
            end,
            lowest,
            scale,
            block_stride // 2,
            block_stride,
            HEAD_DIM,
            DIM,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            WINDOW,
            PRECISION,
        )
        result, lse = finish(acc, row_max, row_sum)
        index = (first_partial + split) * (NUM_KV_HEADS * GROUP) + query_head
        kept = row // GROUP < num_members
        store_partial(partial_outs, partial_lses, index, result, lse, kept, HEAD_DIM, DIM)
