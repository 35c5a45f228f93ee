"""Experts of few tokens: pair by pair, so that only the weights of the chosen experts are read.

    pair_gate_up     pair by pair: activate(gate) * up
    pair_down        token by token: residual + weighted sum over its experts, and half of the next norm

The time is that of reading the weights, so memory must never be idle. `pair_gate_up` waits for the choice of experts
before it lets `pair_down` start, which therefore knows whose weights it needs: its programs load all of them while
the last programs of `pair_gate_up` are still running, and wait only then. Sums are float32, always in the same order.

Rows of MXFP4 and fp8 can be shared by the warps of a program (`PairTile.split`), so that all their weights are in
flight at once: see `shared_rows.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.byte_codes import converted
from inflight.layers.triton.expert_parts import PLAIN_CODES, Gate, gated
from inflight.layers.triton.held import HeldWeights
from inflight.layers.triton.linear_parts import NextNorm, allocate_next_norm
from inflight.layers.triton.routing import Chosen
from inflight.layers.triton.shared_rows import load_first, multiply_rows, row_places
from inflight.layers.triton.tuning import PairTile
from inflight.layers.triton_utils.padding import padded_empty
from inflight.layers.triton_utils.pdl import (
    launch_dependents,
    launch_options,
    wait,
    wait_then_launch_dependents,
)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _wide(values):
    """Return values as float32: those of bfloat16 with one instruction each."""
    if values.dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=f,=f,r",
            [values],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return values.to(tl.float32)


@triton.jit
def _load_bytes(
    rows, scales, zeros, place, stride, exists, step, K,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return one step of 8-bit weights: codes [S, N, chunks, 16], and scales and zero points of the chunks if weights
    are in groups. A chunk is what a thread loads at once.

    `rows` [S, N] are pointers, and `exists` [S] says which are read. Scales of the first group are at `place` [S, N],
    those of the next one `stride` further.
    """
    first = step * BLOCK_K + tl.arange(0, BLOCK_K // 16) * 16
    k = first[:, None] + tl.arange(0, 16)[None, :]
    codes = tl.load(
        rows[:, :, None, None] + k[None, None, :, :],
        mask=exists[:, None, None, None] & (k < K)[None, None, :, :],
        other=0 if rows.dtype.element_ty.is_int() else 0.0,
        eviction_policy="evict_first",
    )
    scale = codes
    zero = codes
    if GROUP != 0 or zeros is not None:
        inside = exists[:, None, None] & (first < K)[None, None, :]
        group = first // GROUP if GROUP != 0 else tl.zeros_like(first)
        places = place[:, :, None] + group[None, None, :] * stride
        if GROUP != 0:
            scale = tl.load(scales + places, mask=inside, other=0.0)
        if zeros is not None:
            zero = tl.load(zeros + places, mask=inside, other=0)
    return codes, scale, zero


@triton.jit
def _byte_products(
    part, x, x_rows, exists, step, K, GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Return the products of what `_load_bytes` returned with features, whose rows start at `x_rows` [S], summed over
    each chunk: [S, N, chunks] float32."""
    codes, scale, zero = part
    S: tl.constexpr = codes.shape[0]
    N: tl.constexpr = codes.shape[1]
    if codes.dtype == tl.float8e4nv:
        numbers = codes.to(tl.float32)
    else:
        numbers = _wide(converted(codes, x.dtype.element_ty))
    if ZEROS:
        numbers -= zero[:, :, :, None].to(tl.float32)
    # A thread loads only 8 features of 16 bits at once.
    halves = tl.split(tl.permute(tl.reshape(numbers, [S, N, BLOCK_K // 16, 2, 8]), (0, 1, 2, 4, 3)))
    k = step * BLOCK_K + tl.arange(0, BLOCK_K // 16)[:, None] * 16 + tl.arange(0, 8)[None, :]
    products = tl.zeros([S, N, BLOCK_K // 16, 8], tl.float32)
    for half in tl.static_range(2):
        columns = k + 8 * half
        inside = exists[:, None, None] & (columns < K)[None, :, :]
        features = _wide(tl.load(x + x_rows[:, None, None] + columns[None, :, :], mask=inside, other=0.0))
        products += halves[half] * features[:, None, :, :]
    total = tl.sum(products, 3)
    if GROUP != 0:
        total *= scale
    return total


@triton.jit
def _load_first_bytes(
    rows, scales, zeros, place, stride, exists, K,
    AHEAD: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the first AHEAD steps of 8-bit weights, for `_byte_sums`."""
    parts = ()
    for step in tl.static_range(AHEAD):
        parts += (_load_bytes(rows, scales, zeros, place, stride, exists, step, K, GROUP, BLOCK_K),)  # type: ignore[assignment]
    return parts


@triton.jit
def _byte_sums(
    parts, rows, scales, zeros, place, stride, exists, x, x_rows, K,
    AHEAD: tl.constexpr, ALL_AHEAD: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the products of 8-bit rows, whose first steps are in `parts`, with features: [S, N] float32."""
    ZEROS: tl.constexpr = zeros is not None
    sums = tl.zeros([rows.shape[0], rows.shape[1], BLOCK_K // 16], tl.float32)
    for step in tl.static_range(AHEAD):
        sums += _byte_products(parts[step], x, x_rows, exists, step, K, GROUP, ZEROS, BLOCK_K)
    if not ALL_AHEAD:
        for step in tl.range(AHEAD, tl.cdiv(K, BLOCK_K)):
            part = _load_bytes(rows, scales, zeros, place, stride, exists, step, K, GROUP, BLOCK_K)
            sums += _byte_products(part, x, x_rows, exists, step, K, GROUP, ZEROS, BLOCK_K)
    return tl.sum(sums, 2)


@triton.jit
def _multiply_plain_rows(
    x, weight, rows, token, k, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr
):  # fmt: skip
    """Return the products of plain rows and of those after them with one token: gate and up [BLOCK_N]."""
    gate = tl.zeros([BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        inside = k < (BLOCK_K if EVEN_K else K - start)
        pointers = weight + rows[:, None] * K + (start + k)[None, :]
        first = tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        second = tl.load(pointers + K, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        features = tl.load(x + token * K + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += tl.sum(first.to(tl.float32) * features, 1)
        up += tl.sum(second.to(tl.float32) * features, 1)
    return gate, up


@triton.jit
def _load_rows(
    weight, scales, zeros, expert, first_row, exists, part, num_rows, K,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Return (the first steps of ROWS rows of experts [S], pointers to all of them, places of their scales), for
    `_multiply_loaded`. `part` is which part of the features each of the S slots has, if they are shared."""
    row = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
    scale_at = expert
    parts = ()
    if SPLIT != 0:
        pointers, scale_at = row_places(weight, scales, expert, first_row, num_rows, K, ROWS, CODES, GROUP)
        parts = load_first(pointers, scale_at, exists, part, num_rows, K, AHEAD, SPLIT, CODES, GROUP)
    elif CODES == PLAIN_CODES:
        k = tl.arange(0, BLOCK_K)
        pointers = weight + (expert[:, None, None] * num_rows + row[None, :, None]) * K + k[None, None, :]
        for step in tl.static_range(AHEAD):
            inside = exists[:, None, None] & (step * BLOCK_K + k < K)[None, None, :]
            loaded = tl.load(pointers + step * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
            parts += (loaded,)  # type: ignore[assignment]
    else:
        num_groups = tl.cdiv(K, GROUP) if GROUP != 0 else 1
        pointers = weight + (expert[:, None] * num_rows + row[None, :]) * K
        scale_at = expert[:, None] * (num_groups * num_rows) + row[None, :]
        parts = _load_first_bytes(
            pointers, scales, zeros, scale_at, num_rows, exists, K, AHEAD, GROUP, BLOCK_K
        )
    return parts, pointers, scale_at


@triton.jit
def _multiply_loaded(
    loaded, scales, zeros, x, x_row, exists, part, num_rows, K,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, ALL_AHEAD: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of what `_load_rows` returned with rows `x_row` [S] of x: [S, ROWS] float32."""
    parts, pointers, scale_at = loaded
    if SPLIT != 0:
        return multiply_rows(
            parts, pointers, scale_at, x + x_row * K, exists, part, num_rows, K, ROWS, STEPS, AHEAD, SPLIT, CODES,
            GROUP, PRECISION,
        )  # fmt: skip
    elif CODES == PLAIN_CODES:
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros([x_row.shape[0], ROWS], tl.float32)
        for step in tl.static_range(AHEAD):
            inside = exists[:, None] & (step * BLOCK_K + k < K)[None, :]
            features = tl.load(x + x_row[:, None] * K + (step * BLOCK_K + k)[None, :], mask=inside, other=0.0)
            acc += tl.sum(parts[step].to(tl.float32) * features.to(tl.float32)[:, None, :], 2)
        if not ALL_AHEAD:
            for start in tl.range(AHEAD * BLOCK_K, K, BLOCK_K):
                inside = exists[:, None] & (start + k < K)[None, :]
                features = tl.load(x + x_row[:, None] * K + (start + k)[None, :], mask=inside, other=0.0)
                w = tl.load(
                    pointers + start, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first"
                )
                acc += tl.sum(w.to(tl.float32) * features.to(tl.float32)[:, None, :], 2)
        return acc
    else:
        acc = _byte_sums(
            parts, pointers, scales, zeros, scale_at, num_rows, exists, x, x_row * K, K, AHEAD, ALL_AHEAD, GROUP,
            BLOCK_K,
        )  # fmt: skip
        if GROUP == 0:
            acc *= tl.load(scales + scale_at)
        return acc


@triton.jit
def _gate_up_kernel(
    x,  # [T, K]
    factors,  # [T] float32, or None: the half of the norm that is left to do
    weight,  # [E, 2 * inner, K], gate and up rows alternate
    scales,  # of quantized weights, and their zero points: see `held.py`
    zeros,
    bias,  # [E, 2 * inner], or None
    ids,  # [T, TOP_K] int32
    out,  # [T * TOP_K, inner]
    inner,
    K,
    num_experts,
    LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    AHEAD: tl.constexpr,  # steps of k whose 8-bit weights are loaded at once
    ALL_AHEAD: tl.constexpr,  # whether these are all
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,  # warps that share the features of quantized rows, with tensor cores; 0: another way
    STEPS: tl.constexpr,  # of each of these
):
    if SPLIT == 0:
        num_tiles = tl.cdiv(inner, BLOCK_N)
        pair, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    else:
        tile, pair = tl.program_id(0), tl.program_id(1)
    token = (pair // TOP_K).to(tl.int64)
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), inner - 1)
    k = tl.arange(0, BLOCK_K)
    wait_then_launch_dependents(PDL)
    expert = tl.load(ids + pair)
    if expert < num_experts:
        rows = expert.to(tl.int64) * (2 * inner) + 2 * n
        if CODES == PLAIN_CODES:
            gate, up = _multiply_plain_rows(x, weight, rows, token, k, K, BLOCK_N, BLOCK_K, EVEN_K)
        else:
            S: tl.constexpr = SPLIT if SPLIT != 0 else 1
            part = tl.arange(0, S)
            experts = tl.zeros([S], tl.int64) + expert
            exists = part >= 0 if SPLIT != 0 else experts < num_experts
            loaded = _load_rows(
                weight, scales, zeros, experts, tile * (2 * BLOCK_N), exists, part, 2 * inner, K,
                2 * BLOCK_N, BLOCK_K, AHEAD, CODES, GROUP, SPLIT,
            )  # fmt: skip
            x_row = tl.zeros([S], tl.int64) + token
            sums = _multiply_loaded(
                loaded, scales, zeros, x, x_row, exists, part, 2 * inner, K, 2 * BLOCK_N, BLOCK_K, AHEAD, ALL_AHEAD,
                CODES, GROUP, SPLIT, STEPS, PRECISION,
            )  # fmt: skip
            gate, up = tl.split(tl.reshape(tl.sum(sums, 0), [BLOCK_N, 2]))
        if factors is not None:
            factor = tl.load(factors + token)
            gate *= factor
            up *= factor
        if bias is not None:
            gate += tl.load(bias + rows).to(tl.float32)
            up += tl.load(bias + rows + 1).to(tl.float32)
        y = gated(gate, up, ACTIVATION, LIMIT)
        tl.store(out + pair.to(tl.int64) * inner + n, y.to(out.dtype.element_ty))


@triton.jit
def _down_kernel(
    x,  # [T * TOP_K, K]: what `pair_gate_up` returned
    weight,  # [E, num_out, K]
    scales,
    zeros,
    bias,  # [E, num_out], or None
    ids,  # [T, TOP_K] int32
    weights,  # [T, TOP_K] float32
    residual,  # [T, num_out], or None
    next_weight,  # [num_out] float32 of the norm that reads the result, or None
    out,  # [T, num_out]
    scaled,
    squares_left,
    num_tokens,
    num_out,
    K,
    num_experts,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # steps of k whose weights are loaded before x is there
    ALL_AHEAD: tl.constexpr,  # whether these are all
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,  # see `_gate_up_kernel`
    STEPS: tl.constexpr,
):
    if SPLIT == 0:
        num_tiles = tl.cdiv(num_out, BLOCK_N)
        token, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    else:
        tile, token = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < num_out
    row = tl.minimum(n, num_out - 1)
    S: tl.constexpr = SPLIT if SPLIT != 0 else 1
    slot = tl.arange(0, PADDED_K * S) // S
    part = tl.arange(0, PADDED_K * S) % S
    pair = token.to(tl.int64) * TOP_K + slot
    place = token.to(tl.int64) * num_out + n
    # All but x was written by kernels before the previous one, which let this one start only after their end.
    expert = tl.load(ids + pair, mask=slot < TOP_K, other=num_experts)
    exists = expert < num_experts
    expert = tl.where(exists, expert, 0).to(tl.int64)
    loaded = _load_rows(
        weight, scales, zeros, expert, tile * BLOCK_N, exists, part, num_out, K, BLOCK_N, BLOCK_K, AHEAD,
        CODES, GROUP, SPLIT,
    )  # fmt: skip
    factor = tl.load(weights + pair, mask=exists, other=0.0)
    before = residual
    if residual is not None:
        before = tl.load(residual + place, mask=mask, other=0.0)
    next_weights = next_weight
    if next_weight is not None:
        next_weights = tl.load(next_weight + row)
    wait(PDL)
    launch_dependents(PDL)
    acc = _multiply_loaded(
        loaded, scales, zeros, x, pair, exists, part, num_out, K, BLOCK_N, BLOCK_K, AHEAD, ALL_AHEAD, CODES, GROUP,
        SPLIT, STEPS, PRECISION,
    )  # fmt: skip
    if bias is not None:
        places = expert[:, None] * num_out + row[None, :]
        if SPLIT == 0:
            acc += tl.load(bias + places).to(tl.float32)
        else:  # each expert has one of its parts
            acc += tl.load(bias + places, mask=(exists & (part == 0))[:, None], other=0.0).to(tl.float32)
    total = tl.sum(acc * factor[:, None], 0)
    if residual is not None:
        total += before.to(tl.float32)
    values = total.to(out.dtype.element_ty)
    tl.store(out + place, values, mask=mask)
    if next_weight is not None:
        wide = values.to(tl.float32)
        tl.store(scaled + place, (wide * next_weights).to(values.dtype), mask=mask)
        tl.store(squares_left + tile * num_tokens + token, tl.sum(tl.where(mask, wide * wide, 0.0), 0))


def _grid(num_tiles: int, count: int, tile: PairTile) -> tuple[int, ...]:
    return (num_tiles, count) if tile.split else (num_tiles * count,)


def _constants(x: Tensor, matrices: HeldWeights, top_k: int, tile: PairTile, pdl: bool) -> dict[str, Any]:
    """Return what both kernels are compiled for."""
    num_features = x.shape[1]
    return {
        "TOP_K": top_k,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "AHEAD": tile.ahead,
        "ALL_AHEAD": tile.ahead * tile.block_k >= num_features,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "PDL": pdl,
        "CODES": matrices.pair_codes,
        "GROUP": matrices.group,
        "SPLIT": tile.split,
        "STEPS": triton.cdiv(num_features, 256 * tile.split) if tile.split else 0,
        "num_warps": tile.num_warps,
        **launch_options(pdl),
    }


def pair_gate_up(
    x: Tensor,  # [T, K]
    matrices: HeldWeights,
    chosen: Chosen,
    gate: Gate,
    tile: PairTile,
    pdl: bool = False,
) -> Tensor:
    """Return [T * top_k, inner]; rows of padding are undefined."""
    num_tokens, top_k = chosen.ids.shape
    num_experts, double, _ = matrices.codes.shape
    num_features, inner = x.shape[1], double // 2
    out = torch.empty(num_tokens * top_k, inner, dtype=x.dtype, device=x.device)
    if num_tokens:
        _gate_up_kernel[_grid(triton.cdiv(inner, tile.block_n), num_tokens * top_k, tile)](
            x,
            chosen.factors,
            matrices.codes,
            matrices.scales,
            matrices.zeros,
            matrices.bias,
            chosen.ids,
            out,
            inner,
            num_features,
            num_experts,
            LIMIT=gate.limit,
            ACTIVATION=gate.activation,
            EVEN_K=num_features % tile.block_k == 0,
            **_constants(x, matrices, top_k, tile, pdl),
        )
    return out


def pair_down(
    x: Tensor,
    matrices: HeldWeights,
    chosen: Chosen,
    tile: PairTile,
    residual: Tensor | None = None,
    next_norm: NextNorm | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return [T, num_out], in place of the residual if there is one. Must directly follow `pair_gate_up`."""
    num_tokens, top_k = chosen.ids.shape
    (num_experts, num_out, _), num_features = matrices.codes.shape, x.shape[1]
    out = residual
    if out is None:
        out = padded_empty(num_tokens, num_out, x.dtype, x.device)
    num_tiles = triton.cdiv(num_out, tile.block_n)
    next_weight, scaled, squares = allocate_next_norm(next_norm, out, num_tiles)
    if num_tokens:
        _down_kernel[_grid(num_tiles, num_tokens, tile)](
            x,
            matrices.codes,
            matrices.scales,
            matrices.zeros,
            matrices.bias,
            chosen.ids,
            chosen.weights,
            residual,
            next_weight,
            out,
            scaled,
            squares,
            num_tokens,
            num_out,
            num_features,
            num_experts,
            PADDED_K=triton.next_power_of_2(top_k),
            **_constants(x, matrices, top_k, tile, pdl),
        )
    return out
