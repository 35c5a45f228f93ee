"""Attention of single query tokens over paged keys, split over keys inside one launch.

In a step of decodes alone the kernel takes heads as they were projected: every program readies its queries, and the one
with an entry's last keys readies the new key, puts it into the cache with its value, and starts from them.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from inflight.attention.layer import AttentionLayer
from inflight.attention.triton.heads import load_turn, load_turned
from inflight.attention.triton.plan import DECODE_FIELDS
from inflight.attention.triton.tiles import (
    arrive,
    finish,
    first_blocks,
    load_rows,
    merge,
    store_partial,
    store_rows,
    take_pages,
)
from inflight.attention.triton.tuning import Tile
from inflight.attention.triton.workspace import Workspace
from inflight.early import begin_early, launch_options

MERGED_VALUES = 8192  # values that a merging program holds at once


def decode_attention(
    qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    cache: Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_tables: Tensor,  # [max_rows, max_blocks] int32
    items: Tensor,  # int32, max_items * DECODE_FIELDS values: see plan.py
    num_items: Tensor,  # [1] int32
    workspace: Workspace,
    layer: AttentionLayer,
    tile: Tile,
    early: bool,
    out: Tensor,  # [T, num_heads * head_dim], written where an item says so
    new_slots: Tensor | None = None,  # [T] int32
) -> None:
    """Attend for every entry that has items; rows of `out` without items are left as they are.

    With `new_slots`, qkv is as projected, and the entries' new keys and values are written to those slots. Without,
    queries are ready and the cache is complete.
    """
    group = layer.num_heads // layer.num_kv_heads
    dim, padded_group = triton.next_power_of_2(layer.head_dim), triton.next_power_of_2(group)
    # Heads vary fastest: programs that run together then read neighbouring memory, and share block ids.
    grid = (layer.num_kv_heads, items.numel() // DECODE_FIELDS)
    _decode[grid](
        qkv,
        cache,
        block_tables,
        items,
        num_items,
        workspace.outs,
        workspace.lses,
        workspace.counters,
        out,
        items if new_slots is None else new_slots,
        layer.cos_sin,
        qkv if layer.q_norm is None else layer.q_norm,
        qkv if layer.k_norm is None else layer.k_norm,
        layer.eps,
        layer.scale * math.log2(math.e),
        layer.window or 0,
        qkv.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=group,
        HEAD_DIM=layer.head_dim,
        ROTARY_DIM=layer.cos_sin.shape[1],
        Q_NORM=layer.q_norm is not None,
        K_NORM=layer.k_norm is not None,
        FUSED=new_slots is not None,
        BLOCK_SIZE=cache.shape[3],
        WINDOW=layer.window is not None,
        FIELDS=DECODE_FIELDS,
        ROWS=tile.rows,
        PADDED_GROUP=padded_group,
        DIM=dim,
        BLOCK_N=tile.keys,
        PARTS=max(1, min(32, MERGED_VALUES // (padded_group * dim))),
        PRECISION="ieee" if qkv.element_size() == 4 else None,
        EARLY=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(early),
    )


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["items", "num_items", "new_slots", "q_norm", "k_norm"],
)
def _decode(
    qkv,
    cache,
    tables,
    items,
    num_items,
    partial_outs,
    partial_lses,
    counters,
    out,
    new_slots,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    scale,
    window,
    qkv_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    FUSED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    head = tl.program_id(0)
    # All of the item at once, before it is known to be real: nothing waits twice for memory.
    item = items + tl.program_id(1) * FIELDS
    entry = tl.load(item)
    table_row = tl.load(item + 1)
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    context_len = tl.load(item + 4)
    first_slot = tl.load(item + 5)
    part = tl.load(item + 6)
    parts = tl.load(item + 7)
    own_parts = tl.load(item + 8)
    is_item = tl.program_id(1) < tl.load(num_items)
    if not is_item:
        begin_early(EARLY)
        return

    if WINDOW:
        begin = tl.maximum(begin, context_len - window)
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    block_stride: tl.constexpr = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    keys = cache + head * (BLOCK_SIZE * HEAD_DIM)
    row = tl.arange(0, ROWS)  # the group's queries; rows past the group repeat its last one
    projected = qkv + entry.to(tl.int64) * qkv_stride
    queries = projected + (head * GROUP + tl.minimum(row, GROUP - 1)) * HEAD_DIM
    table = tables + table_row.to(tl.int64) * table_stride
    if FUSED:
        num_after = context_len - end  # 0: the new key belongs to this program
        end = tl.minimum(end, context_len - 1)
        slot = tl.load(new_slots + entry)
        angles = cos_sin + (context_len - 1) * ROTARY_DIM + tl.arange(0, 1)
        q_along, q_across = load_turn(angles, q_norm, HEAD_DIM, ROTARY_DIM, DIM, Q_NORM)
        k_along, k_across = load_turn(angles, k_norm, HEAD_DIM, ROTARY_DIM, DIM, K_NORM)
    begin_early(EARLY)
    # Asked for ahead of heads: these are waited for where they are turned, pages only where they are used.
    blocks = first_blocks(table, begin, end, BLOCK_SIZE, BLOCK_N)
    if FUSED:
        q = load_turned(queries, q_along, q_across, eps, HEAD_DIM, ROTARY_DIM, DIM, Q_NORM)
        acc, peak, total = _take_new(
            q,
            projected + (num_heads + head) * HEAD_DIM,
            k_along,
            k_across,
            keys + (slot // BLOCK_SIZE).to(tl.int64) * block_stride + slot % BLOCK_SIZE * HEAD_DIM,
            num_after,
            eps,
            scale,
            NUM_KV_HEADS * HEAD_DIM,
            block_stride // 2,
            HEAD_DIM,
            ROTARY_DIM,
            DIM,
            K_NORM,
        )
    else:
        q = load_rows(queries, HEAD_DIM, DIM)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    acc, peak, total = take_pages(
        q,
        acc,
        peak,
        total,
        keys,
        table,
        blocks,
        begin,
        end,
        None,
        scale,
        block_stride // 2,
        block_stride,
        HEAD_DIM,
        DIM,
        BLOCK_SIZE,
        BLOCK_N,
        False,
        True,
        PRECISION,
    )
    result, lse = finish(acc, peak, total)

    out_row = out + (entry.to(tl.int64) * num_heads + head * GROUP) * HEAD_DIM
    if parts == 1:
        store_rows(out_row + row * HEAD_DIM, result, row < GROUP, HEAD_DIM, DIM)
    else:
        index = (first_slot + part) * num_heads + head * GROUP + row
        store_partial(partial_outs, partial_lses, index, result, lse, row < GROUP, HEAD_DIM, DIM)
        if arrive(counters + entry * NUM_KV_HEADS + head, own_parts):
            g = tl.arange(0, PADDED_GROUP)
            merged = merge(
                partial_outs,
                partial_lses,
                first_slot * num_heads + head * GROUP + g,
                num_heads,
                parts,
                g < GROUP,
                PADDED_GROUP,
                PARTS,
                HEAD_DIM,
                DIM,
            )
            store_rows(out_row + g * HEAD_DIM, merged, g < GROUP, HEAD_DIM, DIM)


@triton.jit
def _take_new(
    q,  # [M, DIM]
    projected,  # pointer to the new key as projected; its value lies `projected_offset` further
    along,  # [1, DIM] what the key is turned by
    across,
    place,  # pointer to where the key belongs in the cache; its value belongs `cached_offset` further
    num_after,  # keys after this program's own: the new one is the last
    eps,
    scale,
    projected_offset: tl.constexpr,
    cached_offset: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """A softmax that has seen the new key, which is put into the cache; or nothing, where it is not the program's."""
    only = tl.arange(0, 1)  # a block of one row
    k = load_turned(projected + only, along, across, eps, HEAD_DIM, ROTARY_DIM, DIM, NORM)  # [1, DIM]
    v = load_rows(projected + projected_offset + only, HEAD_DIM, DIM)  # [1, DIM]
    store_rows(place + only, k, only == num_after, HEAD_DIM, DIM)
    store_rows(place + cached_offset + only, v, only == num_after, HEAD_DIM, DIM)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale  # [M]
    is_own = num_after == 0
    acc = tl.where(is_own, v.to(tl.float32), tl.zeros(q.shape, tl.float32))
    peak = tl.where(is_own, score, float("-inf"))
    total = tl.where(is_own, 1.0, tl.zeros_like(score))
    return acc, peak, total
