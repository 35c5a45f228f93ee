"""Attention of encoders on a GPU: a program for each tile of queries of each head, longest sequences first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inflight.layers.attention.backend import SequenceLayer, Sequences
from inflight.layers.attention.triton.plan import SEQUENCE_FIELDS, plan_sequences
from inflight.layers.attention.triton.rope_write import MANY_TOKENS, rotate_heads
from inflight.layers.attention.triton.softmax import (
    Items,
    finish,
    load_rows,
    store_rows,
    take_tile,
    tile_constants,
)
from inflight.layers.attention.triton.tuning import SequenceTuning
from inflight.layers.triton_utils.padding import padded_empty
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait, launch_options


@dataclass(frozen=True, slots=True)
class PlannedSequences(Sequences):
    """The sequences of a captured step, whose work was planned in advance (`plan_sequences`)."""

    items: Items


class TritonSequenceAttention:
    """Implements `SequenceAttention`."""

    def __init__(self, tuning: SequenceTuning) -> None:
        self.tuning = tuning
        self._known: tuple[Sequences, Items] | None = None

    def attend(self, qkv: Tensor, layer: SequenceLayer, sequences: Sequences, positions: Tensor) -> Tensor:
        """Rotate in place and attend. Rows of the result that belong to no sequence are undefined."""
        tuning, items = self.tuning, self._items(sequences, qkv.device)
        if layer.cos_sin is not None:
            rotate(qkv, positions, layer.cos_sin, layer.num_heads, layer.head_dim, tuning.pdl)
        out = padded_empty(len(qkv), layer.num_heads * layer.head_dim, qkv.dtype, qkv.device)
        if items.programs > 0:
            sequence_attention(qkv, items, layer, tuning, out)
        return out

    def _items(self, sequences: Sequences, device: torch.device) -> Items:
        """Return the work items, planned once for all layers of a step."""
        if isinstance(sequences, PlannedSequences):
            return sequences.items
        if self._known is None or self._known[0] is not sequences:
            assert sequences.lengths is not None
            lengths = np.array(sequences.lengths, dtype=np.int32)
            table = torch.from_numpy(plan_sequences(lengths, self.tuning.tile.rows))
            count = torch.tensor([len(table)], dtype=torch.int32)
            table, count = (_upload(values, device) for values in (table, count))
            self._known = sequences, Items(table, count, programs=len(table))
        return self._known[1]


def _upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def sequence_attention(
    qkv: Tensor,  # [T, 3 * num_heads * head_dim], queries and keys ready
    items: Items,  # of SEQUENCE_FIELDS fields: see plan.py
    layer: SequenceLayer,
    tuning: SequenceTuning,
    out: Tensor,  # [T, num_heads * head_dim]
) -> None:
    """Attend for every tile of positions that has an item; other rows of `out` are left as they are."""
    tile, dim = tuning.tile, triton.next_power_of_2(layer.head_dim)
    tiles = None
    if tuning.descriptors:
        tiles = TensorDescriptor(qkv, list(qkv.shape), list(qkv.stride()), [tile.keys, dim])
    _sequences[(layer.num_heads, items.programs)](
        qkv, tiles, items.table, items.count, out, layer.scale * math.log2(math.e), layer.window or 0,
        qkv.stride(0), NUM_HEADS=layer.num_heads, HEAD_DIM=layer.head_dim, WINDOW=layer.window is not None,
        MASK_ALL=tuning.mask_all or layer.window is not None, FIELDS=SEQUENCE_FIELDS,
        **tile_constants(qkv, layer.head_dim, tile, tuning.pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["items", "num_items"])
def _sequences(
    qkv,
    tiles,  # descriptor of qkv, or None
    items,
    num_items,
    out,
    scale,
    window,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    MASK_ALL: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    first = tl.load(item)  # token of the sequence
    length = tl.load(item + 1)
    position = tl.load(item + 2)  # of the tile's first query
    is_item = tl.program_id(1) < tl.load(num_items)
    launch_dependents_then_wait(PDL)
    if not is_item:
        return

    query_positions = position + tl.arange(0, ROWS)
    token = first + tl.minimum(query_positions, length - 1)  # rows past the last position repeat it
    q = load_rows(qkv + token.to(tl.int64) * qkv_stride + head * HEAD_DIM, HEAD_DIM, DIM)
    begin, end = 0, length
    if WINDOW:
        begin = tl.maximum(0, position - window)
        end = tl.minimum(length, position + ROWS + window)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    width: tl.constexpr = NUM_HEADS * HEAD_DIM
    key_column = width + head * HEAD_DIM
    n = tl.arange(0, BLOCK_N)
    masked_from = begin if MASK_ALL else begin + (end - begin) // BLOCK_N * BLOCK_N
    if not MASK_ALL:
        for start in tl.range(begin, masked_from, BLOCK_N):
            if tiles is not None:
                k = tiles.load([first + start, key_column])
                v = tiles.load([first + start, key_column + width])
            else:
                k_at = qkv + (first + start + n).to(tl.int64) * qkv_stride + key_column
                k = load_rows(k_at, HEAD_DIM, DIM)
                v = load_rows(k_at + width, HEAD_DIM, DIM)
            acc, row_max, row_sum = take_tile(q, k, v, None, acc, row_max, row_sum, scale, False, PRECISION)
    # Positions past the end are clamped, so neither a neighbour nor uninitialised memory can reach a result.
    for start in tl.range(masked_from, end, BLOCK_N, num_stages=None if MASK_ALL else 1):
        key = start + n
        k_at = qkv + (first + tl.minimum(key, end - 1)).to(tl.int64) * qkv_stride + key_column
        k = load_rows(k_at, HEAD_DIM, DIM)
        v = load_rows(k_at + width, HEAD_DIM, DIM)
        seen = (key < end)[None, :]
        if WINDOW:
            seen = seen & (tl.abs(key[None, :] - query_positions[:, None]) <= window)
        acc, row_max, row_sum = take_tile(q, k, v, seen, acc, row_max, row_sum, scale, True, PRECISION)
    result, _ = finish(acc, row_max, row_sum)
    out_rows = out + token.to(tl.int64) * width + head * HEAD_DIM
    store_rows(out_rows, result, query_positions < length, HEAD_DIM, DIM)


def rotate(
    qkv: Tensor,  # [T, 3 * num_heads * head_dim]
    positions: Tensor,  # [T]
    cos_sin: Tensor,  # [max_position, rotary_dim] float32
    num_heads: int,
    head_dim: int,
    pdl: bool = False,
) -> None:
    """Rotate queries and keys in place."""
    num_tokens, rotary_dim, tile = len(qkv), cos_sin.shape[1], MANY_TOKENS
    if num_tokens == 0:
        return
    _rotate[(triton.cdiv(2 * num_heads, tile.heads), triton.cdiv(num_tokens, tile.tokens))](
        qkv, positions, cos_sin, num_tokens, qkv.stride(0), NUM_HEADS=2 * num_heads, HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim, TOKENS=tile.tokens, HEADS=tile.heads,
        HALF=triton.next_power_of_2(rotary_dim // 2), PDL=pdl, num_warps=tile.num_warps,
        **launch_options(pdl),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions"])
def _rotate(
    qkv,
    positions,
    cos_sin,
    num_tokens,
    qkv_stride,
    NUM_HEADS: tl.constexpr,  # of queries and keys
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(1) * TOKENS + row // HEADS
    head = tl.program_id(0) * HEADS + row % HEADS
    kept = (token < num_tokens) & (head < NUM_HEADS)
    position = tl.load(positions + token, mask=kept, other=0)
    heads = qkv + token.to(tl.int64) * qkv_stride + head * HEAD_DIM
    angles = cos_sin + position.to(tl.int64) * ROTARY_DIM
    rotate_heads(
        heads, heads, None, angles, cos_sin, 0.0, kept, HEAD_DIM, ROTARY_DIM, False, False, HALF, 0, PDL
    )
