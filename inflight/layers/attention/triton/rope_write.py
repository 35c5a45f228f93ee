"""Normalise and rotate heads, and write keys and values to the cache: one pass over the projected heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.attention.backend import AttentionLayer, LayerCache, halves
from inflight.layers.attention.triton.quantized import (
    encode,
    largest_magnitude,
    power_of_two,
    scale_exponents,
    store_scales,
)
from inflight.layers.triton.byte_codes import fp8_values
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait, launch_options


@dataclass(frozen=True, slots=True)
class HeadTile:
    """The heads and tokens that one program rotates. Both counts are powers of two."""

    tokens: int
    heads: int
    num_warps: int


FEW_TOKENS = HeadTile(tokens=1, heads=4, num_warps=1)
MANY_TOKENS = HeadTile(tokens=4, heads=8, num_warps=4)
MANY = 256  # tokens, from here on


def rope_write(
    qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim]
    positions: Tensor,  # [T] int32
    slot_mapping: Tensor,  # [T] int32; below 0: padding, nothing is written for this token
    layer: AttentionLayer,
    cache: LayerCache,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    pdl: bool = False,
    tile: HeadTile | None = None,
) -> None:
    """Normalise and rotate queries and keys in place, normalise values, and write keys and values to the cache.

    With a quantized cache, keys and values in `qkv` become what their codes stand for, so that it does not matter to
    other kernels where they read them. If `qkv` has only queries, nothing is written.
    """
    values, scales = halves(cache)
    cos_sin, q_norm, k_norm = layer.cos_sin, layer.q_norm, layer.k_norm
    num_heads, head_dim = layer.num_heads, layer.head_dim
    num_written = layer.num_kv_heads if qkv.shape[1] > num_heads * head_dim else 0
    num_tokens, rotary_dim = len(qkv), 0 if cos_sin is None else cos_sin.shape[1]
    tile = tile or (MANY_TOKENS if num_tokens >= MANY else FEW_TOKENS)
    head_tiles = triton.cdiv(num_heads, tile.heads) + 2 * triton.cdiv(num_written, tile.heads)
    grid = (head_tiles * triton.cdiv(num_tokens, tile.tokens),)
    rest = head_dim - rotary_dim
    _rope_write[grid](
        qkv, positions, slot_mapping, qkv if cos_sin is None else cos_sin, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, layer.v_norm, values,
        None if scales is None else scales.view(torch.int16), num_tokens, layer.eps, qkv.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_written, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=values.shape[3], BLOCK_STRIDE=values.stride(0),
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, TOKENS=tile.tokens,
        HEADS=tile.heads, DIM=triton.next_power_of_2(head_dim),
        HALF=triton.next_power_of_2(max(1, rotary_dim // 2)),
        REST=triton.next_power_of_2(rest) if rest else 0, PDL=pdl, num_warps=tile.num_warps,
        **launch_options(pdl),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["positions", "slot_mapping", "q_norm", "k_norm", "v_norm"],
)
def _rope_write(
    qkv, positions, slot_mapping, cos_sin, q_norm, k_norm, v_norm, cache, scales, num_tokens, eps,
    qkv_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_STRIDE: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    q_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    head_tile = tl.program_id(0) % (q_tiles + 2 * kv_tiles)
    token_tile = tl.program_id(0) // (q_tiles + 2 * kv_tiles)

    # Rows are (token, head) pairs, heads innermost.
    row = tl.arange(0, TOKENS * HEADS)
    token = token_tile * TOKENS + row // HEADS
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1)
    real = slot >= 0
    position = tl.load(positions + token, mask=real, other=0)
    token_heads = qkv + token.to(tl.int64) * qkv_stride
    # Where the token's features for KV head 0 lie: keys here, values `value_offset` further.
    cached = cache + (slot // BLOCK_SIZE).to(tl.int64) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * HEAD_DIM
    value_offset: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if scales is not None:
        # 16-bit integers, in pairs for key and value. A block has half as many of them as bytes.
        scales += (slot // BLOCK_SIZE).to(tl.int64) * (BLOCK_STRIDE // 2) + (slot % BLOCK_SIZE) * 2

    if head_tile < q_tiles:
        head = head_tile * HEADS + row % HEADS
        rotate_heads(
            token_heads + head * HEAD_DIM, cached, None, cos_sin + position * ROTARY_DIM, q_norm, eps,
            real & (head < NUM_HEADS), HEAD_DIM, ROTARY_DIM, Q_NORM, False, HALF, REST, PDL,
        )  # fmt: skip
    elif head_tile < q_tiles + kv_tiles:
        head = (head_tile - q_tiles) * HEADS + row % HEADS
        rotate_heads(
            token_heads + (NUM_HEADS + head) * HEAD_DIM, cached + head * (BLOCK_SIZE * HEAD_DIM),
            None if scales is None else scales + head * (BLOCK_SIZE * 2),
            cos_sin + position * ROTARY_DIM, k_norm, eps, real & (head < NUM_KV_HEADS), HEAD_DIM, ROTARY_DIM,
            K_NORM, True, HALF, REST, PDL,
        )  # fmt: skip
    else:
        head = (head_tile - q_tiles - kv_tiles) * HEADS + row % HEADS
        d = tl.arange(0, DIM)
        kept = (real & (head < NUM_KV_HEADS))[:, None] & (d < HEAD_DIM)[None, :]
        source = token_heads + (NUM_HEADS + NUM_KV_HEADS + head) * HEAD_DIM
        target = cached + value_offset + head * (BLOCK_SIZE * HEAD_DIM)
        launch_dependents_then_wait(PDL)
        if v_norm is None and scales is None:
            tl.store(
                target[:, None] + d[None, :], tl.load(source[:, None] + d[None, :], mask=kept), mask=kept
            )
        else:
            value = tl.load(source[:, None] + d[None, :], mask=kept, other=0.0).to(tl.float32)
            if v_norm is not None:
                factor = tl.rsqrt(tl.sum(value * value, 1) / HEAD_DIM + eps)
                value *= factor[:, None] * tl.load(v_norm + d, mask=d < HEAD_DIM, other=0.0)[None, :]
            if scales is None:
                tl.store(source[:, None] + d[None, :], value, mask=kept)
                tl.store(target[:, None] + d[None, :], value, mask=kept)
            else:
                exponent = scale_exponents(largest_magnitude(value), qkv.dtype.element_ty)
                store_scales(scales + head * (BLOCK_SIZE * 2) + 1, exponent, real & (head < NUM_KV_HEADS))
                _store_codes(
                    target[:, None] + d[None, :], source[:, None] + d[None, :], value, exponent, kept
                )


@triton.jit
def rotate_heads(
    heads,  # [R] pointers to heads in qkv
    cached,  # [R] pointers to the same heads' places in the cache, read if TO_CACHE
    scales,  # [R] pointers to their scales, or None: the cache is not quantized
    angles,  # [R] pointers to cosines, sines following
    norm,
    eps,
    kept,  # [R] whether the row exists
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    TO_CACHE: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate heads in place. A head is low | high | rest: low rotates with high, rest is only normalised."""
    half: tl.constexpr = ROTARY_DIM // 2
    i = tl.arange(0, HALF)
    rotated = kept[:, None] & (i < half)[None, :]
    cos = tl.load(angles[:, None] + i[None, :], mask=rotated, other=0.0)
    sin = tl.load(angles[:, None] + half + i[None, :], mask=rotated, other=0.0)
    launch_dependents_then_wait(PDL)
    low = tl.load(heads[:, None] + i[None, :], mask=rotated, other=0.0).to(tl.float32)
    high = tl.load(heads[:, None] + half + i[None, :], mask=rotated, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        low *= tl.load(norm + i, mask=i < half, other=0.0)[None, :]
        high *= tl.load(norm + half + i, mask=i < half, other=0.0)[None, :]
        if REST > 0:
            j = tl.arange(0, REST)
            still = kept[:, None] & (j < HEAD_DIM - ROTARY_DIM)[None, :]
            rest = tl.load(heads[:, None] + ROTARY_DIM + j[None, :], mask=still, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low *= factor
        high *= factor
        if REST > 0:
            rest *= (
                factor * tl.load(norm + ROTARY_DIM + j, mask=j < HEAD_DIM - ROTARY_DIM, other=0.0)[None, :]
            )
            if scales is None:
                tl.store(heads[:, None] + ROTARY_DIM + j[None, :], rest, mask=still)
            if TO_CACHE and scales is None:
                tl.store(cached[:, None] + ROTARY_DIM + j[None, :], rest, mask=still)
    elif REST > 0 and TO_CACHE:
        j = tl.arange(0, REST)
        still = kept[:, None] & (j < HEAD_DIM - ROTARY_DIM)[None, :]
        rest = tl.load(heads[:, None] + ROTARY_DIM + j[None, :], mask=still)
        if scales is None:
            tl.store(cached[:, None] + ROTARY_DIM + j[None, :], rest, mask=still)
    new_low = low * cos - high * sin
    new_high = high * cos + low * sin
    if scales is None:
        tl.store(heads[:, None] + i[None, :], new_low, mask=rotated)
        tl.store(heads[:, None] + half + i[None, :], new_high, mask=rotated)
        if TO_CACHE:
            tl.store(cached[:, None] + i[None, :], new_low, mask=rotated)
            tl.store(cached[:, None] + half + i[None, :], new_high, mask=rotated)
    else:
        largest = tl.maximum(largest_magnitude(new_low), largest_magnitude(new_high))
        if REST > 0:
            rest = tl.where(still, rest.to(tl.float32), 0.0)
            largest = tl.maximum(largest, largest_magnitude(rest))
        exponent = scale_exponents(largest, heads.dtype.element_ty)
        store_scales(scales, exponent, kept)
        low_at, high_at = i[None, :], half + i[None, :]
        _store_codes(cached[:, None] + low_at, heads[:, None] + low_at, new_low, exponent, rotated)
        _store_codes(cached[:, None] + high_at, heads[:, None] + high_at, new_high, exponent, rotated)
        if REST > 0:
            rest_at = ROTARY_DIM + j[None, :]
            _store_codes(cached[:, None] + rest_at, heads[:, None] + rest_at, rest, exponent, still)


@triton.jit
def _store_codes(cached, heads, x, exponent, kept):
    """Store the codes of x [R, D] for scales of these exponents [R] to the cache, and what they stand for to heads."""
    codes = encode(x * power_of_two(-exponent)[:, None])
    tl.store(cached, codes, mask=kept)
    tl.store(heads, fp8_values(codes, tl.float32) * power_of_two(exponent)[:, None], mask=kept)
