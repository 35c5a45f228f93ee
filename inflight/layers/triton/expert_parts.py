"""Shared parts of `pair_experts` and `grouped_experts`: gates, and products with quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.elementwise import activate
from inflight.layers.triton.linear_parts import dot
from inflight.layers.triton.mxfp4 import mxfp4_values
from inflight.layers.triton.quantized import (
    PLAIN,
    converted,
    dot_codes,
    int4_product,
    int4_values,
    less_zeros,
    products,
    quantized,
)

CLAMPED = 6  # the activation of gpt-oss, beside those of `elementwise.ACTIVATIONS`


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix of each expert. Gate and up are one matrix in which row 2i is the gate of output i, and row 2i + 1 its
    up."""

    weight: Tensor  # [E, N, K]; of MXFP4 words [E, N, 32 * tiles], of int4 [E, N, words]
    bias: Tensor | None = None  # [E, N]
    kind: int = PLAIN  # see `quantized.py`
    group: int = 0  # columns that share a scale; 0: all
    scales: Tensor | None = None  # [E, groups, N] float32; of int4 int32, of MXFP4 [E, tiles, N] int32
    zeros: Tensor | None = None  # [E, groups, N] int8


@dataclass(frozen=True, slots=True)
class Gate:
    activation: int
    limit: float = 0.0


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION == 6:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * activate(1.702 * gate, 1) / 1.702
    return activate(gate, ACTIVATION) * up


@triton.jit
def multiply_byte_pairs(
    x_rows, x_scale_rows, rows, scales, zeros, place, stride, is_live, K,
    CODES: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WEIGHTS_LEFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs with a tile of 8-bit weights, BLOCK_K features at a time: [BLOCK_N, BLOCK_M] with
    WEIGHTS_LEFT, else its transpose.

    `x_rows` [BLOCK_M] and `rows` [BLOCK_N] are pointers. Scales and zero points of the first group are at `place`
    [BLOCK_N], those of the next one `stride` further. Inputs are quantized and have scales (`x_scale_rows`), or they
    are quantized here, BLOCK_K features at a time, or the weights are converted instead.
    """
    k = tl.arange(0, BLOCK_K)
    ROWS: tl.constexpr = BLOCK_N if WEIGHTS_LEFT else BLOCK_M
    COLUMNS: tl.constexpr = BLOCK_M if WEIGHTS_LEFT else BLOCK_N
    K_AXIS: tl.constexpr = 0 if WEIGHTS_LEFT else 1  # of features
    # Sums that are scaled once, at the end.
    WHOLE: tl.constexpr = GROUP == 0 and x_scale_rows is not None
    acc = tl.zeros([ROWS, COLUMNS], tl.int32 if WHOLE and CODES == 5 else tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k < (BLOCK_K if EVEN_K else K - start)
        w = tl.load(
            rows[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0 if CODES == 1 else 0
        )
        live = tl.expand_dims(inside, 1 - K_AXIS) & tl.expand_dims(is_live, K_AXIS)
        places = tl.expand_dims(x_rows, K_AXIS) + tl.expand_dims(start + k, 1 - K_AXIS)
        features = tl.load(places, mask=live, other=0.0)
        at = place
        if GROUP != 0:
            at += start // GROUP * stride
        if WHOLE:
            a = w if WEIGHTS_LEFT else features
            b = features if WEIGHTS_LEFT else tl.trans(w)
            if CODES == 5:
                acc = dot_codes(a, b, acc)
            else:  # which is added in float32 anyway: see `dot_codes`
                acc += products(a, b)
        else:
            if CODES == 1 or CODES == 5:
                if x_scale_rows is None:
                    codes, x_scale = quantized(features, K_AXIS, w.dtype)
                else:
                    codes = features
                    x_scale = tl.load(x_scale_rows + start // GROUP, mask=is_live, other=0.0)
                if WEIGHTS_LEFT:
                    part = products(w, codes)
                else:
                    part = products(codes, tl.trans(w))
                part *= tl.expand_dims(x_scale, K_AXIS)
            else:
                empty = tl.zeros([ROWS, COLUMNS], tl.float32)
                numbers = converted(w, CODES, features.dtype)
                if zeros is not None:
                    numbers = less_zeros(numbers, tl.load(zeros + at))
                if WEIGHTS_LEFT:
                    part = dot(numbers, features, empty, PRECISION)
                else:
                    part = dot(features, tl.trans(numbers), empty, PRECISION)
            if GROUP != 0:
                part *= tl.expand_dims(tl.load(scales + at), 1 - K_AXIS)
            acc += part
    if GROUP == 0:
        acc = acc.to(tl.float32) * tl.expand_dims(tl.load(scales + place), 1 - K_AXIS)
    if WHOLE:
        acc *= tl.expand_dims(tl.load(x_scale_rows, mask=is_live, other=0.0), K_AXIS)
    return acc


@triton.jit
def multiply_int4_pairs(
    x_rows, rows, scale_rows, stride, is_live, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs with rows of 4-bit weights, group by group: [BLOCK_N, BLOCK_M]. Pointers are as for
    `multiply_byte_pairs`; scales of the next group are `stride` further."""
    k = tl.arange(0, GROUP)
    word = tl.arange(0, GROUP // 4)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in tl.range(0, tl.cdiv(K, GROUP), num_stages=STAGES):
        words = tl.load(rows[:, None] + (group * (GROUP // 4) + word)[None, :])
        scale = tl.load(scale_rows + group * stride)
        column = group * GROUP + k
        live = (column < K)[:, None] & is_live[None, :]
        features = tl.load(x_rows[None, :] + column[:, None], mask=live, other=0.0)
        weights = int4_values(words, scale, GROUP, False, x_rows.dtype.element_ty)
        acc += int4_product(weights, features, scale, PRECISION)
    return acc


@triton.jit
def multiply_mxfp4(
    x_rows, rows, scale_rows, stride, is_live, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a block of pairs with rows of MXFP4 weights, four groups at a time: [BLOCK_N, BLOCK_M]. Pointers are as
    for `multiply_byte_pairs`; scales of the next tile are `stride` further.

    The four groups are one product, which the tensor cores of Hopper multiply while the next weights are converted.
    """
    k = tl.arange(0, 128)
    j = tl.arange(0, 32)
    num_tiles = tl.cdiv(K, 128)
    tl.assume(
        num_tiles > 0
    )  # else the sum might come from before the loop, and products would wait for each other
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        words = tl.load(rows[:, None] + (tile * 32 + j)[None, :])
        scales = tl.load(scale_rows + tile * stride)[:, None]
        weights = mxfp4_values(words, scales, x_rows.dtype.element_ty)
        live = (k < K - tile * 128)[:, None] & is_live[None, :]
        features = tl.load(x_rows[None, :] + (tile * 128 + k)[:, None], mask=live, other=0.0)
        halves = tl.join(tl.join(weights[0], weights[1]), tl.join(weights[2], weights[3]))
        whole = tl.reshape(tl.permute(halves, (0, 3, 2, 1)), [BLOCK_N, 128])
        acc = dot(whole, features, acc, PRECISION)
    return acc
