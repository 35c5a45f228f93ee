"""Shared parts of `pair_experts` and `grouped_experts`: gates, and products with plain weights."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from inflight.layers.triton.elementwise import activate
from inflight.layers.triton.linear_parts import dot

CLAMPED = tl.constexpr(6)  # the activation of gpt-oss, beside those of `elementwise.ACTIVATIONS`
# How `pair_experts` names the weights: plain ones, 8-bit codes or MXFP4.
PLAIN_CODES = tl.constexpr(0)
BYTES = tl.constexpr(1)
MXFP4 = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class Gate:
    activation: int
    limit: float = 0.0


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION == CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * activate(1.702 * gate, 1) / 1.702
    return activate(gate, ACTIVATION) * up


@triton.jit
def multiply_plain_pairs(
    x_rows, x_scales, x_row, weight, scales, zeros, expert, row, k, num_rows, is_live, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, WEIGHTS_LEFT: tl.constexpr, PRECISION: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs with a tile of plain weights, BLOCK_K features at a time: [BLOCK_N, BLOCK_M] with
    WEIGHTS_LEFT, else its transpose.

    Functions with the same parameters multiply quantized weights. `x_rows` [BLOCK_M] are pointers to the features of
    the pairs, which are in rows `x_row` of the inputs, and `row` [BLOCK_N] the weight rows of the expert. `x_scales`
    are those of quantized inputs [rows, groups], or None. `k` is 0 to BLOCK_K - 1.
    """
    rows = weight + (expert * num_rows + row) * K
    if WEIGHTS_LEFT:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k < (BLOCK_K if EVEN_K else K - start)
        w = tl.load(rows[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0)
        if WEIGHTS_LEFT:
            mask = inside[:, None] & is_live[None, :]
            features = tl.load(x_rows[None, :] + (start + k)[:, None], mask=mask, other=0.0)
            acc = dot(w, features, acc, PRECISION)
        else:
            mask = inside[None, :] & is_live[:, None]
            features = tl.load(x_rows[:, None] + (start + k)[None, :], mask=mask, other=0.0)
            acc = dot(features, tl.trans(w), acc, PRECISION)
    return acc
