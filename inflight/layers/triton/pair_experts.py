"""Experts of few tokens: pair by pair, so that only the weights of the chosen experts are read.

    pair_gate_up     pair by pair: activate(gate) * up
    pair_down        token by token: residual + weighted sum over its experts, and half of the next norm

The time is that of reading the weights, so memory must never be idle. `pair_gate_up` waits for the choice of experts
before it lets `pair_down` start, which therefore knows whose weights it needs: its programs load all of them while
the last programs of `pair_gate_up` are still running, and wait only then. Sums are float32, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.expert_parts import ExpertWeights, Gate, gated
from inflight.layers.triton.linear_parts import NextNorm, allocate_next_norm
from inflight.layers.triton.routing import Chosen
from inflight.layers.triton.tuning import PairTile
from inflight.triton_utils.padding import padded_empty
from inflight.triton_utils.pdl import (
    launch_dependents,
    launch_options,
    wait,
    wait_then_launch_dependents,
)


@triton.jit
def _gate_up_kernel(
    x,  # [T, K]
    factors,  # [T] float32, or None: the half of the norm that is left to do
    weight,  # [E, 2 * inner, K], gate and up rows alternate
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
    PDL: tl.constexpr,
):
    num_tiles = tl.cdiv(inner, BLOCK_N)
    pair, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    token = (pair // TOP_K).to(tl.int64)
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), inner - 1)
    k = tl.arange(0, BLOCK_K)
    wait_then_launch_dependents(PDL)
    expert = tl.load(ids + pair)
    if expert < num_experts:
        rows = expert.to(tl.int64) * (2 * inner) + 2 * n
        gate = tl.zeros([BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inside = k < (BLOCK_K if EVEN_K else K - start)
            at = weight + rows[:, None] * K + (start + k)[None, :]
            first = tl.load(at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            second = tl.load(at + K, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            features = tl.load(x + token * K + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
            gate += tl.sum(first.to(tl.float32) * features, 1)
            up += tl.sum(second.to(tl.float32) * features, 1)
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
    PDL: tl.constexpr,
):
    num_tiles = tl.cdiv(num_out, BLOCK_N)
    token, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < num_out
    row = tl.minimum(n, num_out - 1)
    k = tl.arange(0, BLOCK_K)
    slot = tl.arange(0, PADDED_K)
    pair = token.to(tl.int64) * TOP_K + slot
    place = token.to(tl.int64) * num_out + n
    # All but x was written by kernels before the previous one, which let this one start only after their end.
    expert = tl.load(ids + pair, mask=slot < TOP_K, other=num_experts)
    exists = expert < num_experts
    own = tl.where(exists, expert, 0).to(tl.int64)
    at = weight + (own[:, None, None] * num_out + row[None, :, None]) * K + k[None, None, :]
    parts = ()
    for step in tl.static_range(AHEAD):
        inside = exists[:, None, None] & (step * BLOCK_K + k < K)[None, None, :]
        parts += (tl.load(at + step * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first"),)  # type: ignore[assignment]
    factor = tl.load(weights + pair, mask=exists, other=0.0)
    before = residual
    if residual is not None:
        before = tl.load(residual + place, mask=live, other=0.0)
    next_weights = next_weight
    if next_weight is not None:
        next_weights = tl.load(next_weight + row)
    wait(PDL)
    launch_dependents(PDL)
    acc = tl.zeros([PADDED_K, BLOCK_N], tl.float32)
    for step in tl.static_range(AHEAD):
        inside = exists[:, None] & (step * BLOCK_K + k < K)[None, :]
        features = tl.load(x + pair[:, None] * K + (step * BLOCK_K + k)[None, :], mask=inside, other=0.0)
        acc += tl.sum(parts[step].to(tl.float32) * features.to(tl.float32)[:, None, :], 2)
    if not ALL_AHEAD:
        for start in tl.range(AHEAD * BLOCK_K, K, BLOCK_K):
            inside = exists[:, None] & (start + k < K)[None, :]
            features = tl.load(x + pair[:, None] * K + (start + k)[None, :], mask=inside, other=0.0)
            part = tl.load(at + start, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first")
            acc += tl.sum(part.to(tl.float32) * features.to(tl.float32)[:, None, :], 2)
    if bias is not None:
        acc += tl.load(bias + own[:, None] * num_out + row[None, :]).to(tl.float32)
    total = tl.sum(acc * factor[:, None], 0)
    if residual is not None:
        total += before.to(tl.float32)
    values = total.to(out.dtype.element_ty)
    tl.store(out + place, values, mask=live)
    if next_weight is not None:
        wide = values.to(tl.float32)
        tl.store(scaled + place, (wide * next_weights).to(values.dtype), mask=live)
        tl.store(squares_left + tile * num_tokens + token, tl.sum(tl.where(live, wide * wide, 0.0), 0))


def pair_gate_up(
    x: Tensor,  # [T, K]
    matrices: ExpertWeights,
    chosen: Chosen,
    gate: Gate,
    tile: PairTile,
    pdl: bool = False,
) -> Tensor:
    """Return [T * top_k, inner]; rows of padding are undefined."""
    num_tokens, top_k = chosen.ids.shape
    num_experts, double, num_features = matrices.weight.shape
    inner = double // 2
    out = torch.empty(num_tokens * top_k, inner, dtype=x.dtype, device=x.device)
    if num_tokens:
        _gate_up_kernel[(num_tokens * top_k * triton.cdiv(inner, tile.block_n),)](
            x,
            chosen.factors,
            matrices.weight,
            matrices.bias,
            chosen.ids,
            out,
            inner,
            num_features,
            num_experts,
            LIMIT=gate.limit,
            ACTIVATION=gate.activation,
            TOP_K=top_k,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            EVEN_K=num_features % tile.block_k == 0,
            PDL=pdl,
            num_warps=tile.num_warps,
            **launch_options(pdl),
        )
    return out


def pair_down(
    x: Tensor,
    matrices: ExpertWeights,
    chosen: Chosen,
    tile: PairTile,
    residual: Tensor | None = None,
    next_norm: NextNorm | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return [T, num_out], in place of the residual if there is one. Must directly follow `pair_gate_up`."""
    num_tokens, top_k = chosen.ids.shape
    num_experts, num_out, num_features = matrices.weight.shape
    out = residual
    if out is None:
        out = padded_empty(num_tokens, num_out, x.dtype, x.device)
    num_tiles = triton.cdiv(num_out, tile.block_n)
    next_weight, scaled, squares = allocate_next_norm(next_norm, out, num_tiles)
    if num_tokens:
        _down_kernel[(num_tokens * num_tiles,)](
            x,
            matrices.weight,
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
            TOP_K=top_k,
            PADDED_K=triton.next_power_of_2(top_k),
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            AHEAD=tile.ahead,
            ALL_AHEAD=tile.ahead * tile.block_k >= num_features,
            PDL=pdl,
            num_warps=tile.num_warps,
            **launch_options(pdl),
        )
    return out
