"""Products with quantized weights, and the conversions around them.

`multiply_fp8` and `multiply_int4` multiply a tile of weights with all tokens of a step, as `multiply_tensor_cores` in
`linear_parts.py` does. Codes are multiplied as they are, or converted in registers to the type of the inputs, exactly.
The sum of each group of features is scaled before it is added, so that long rows keep their precision.

4-bit codes are packed so that no lane has to be shuffled. Byte b of a row holds two columns that are one group apart:

    column = b // GROUP * 2 * GROUP + b % GROUP  (low nibble),  column + GROUP  (high nibble)

A missing last group has scale 0. `quantize_rows` quantizes inputs to fp8 with one scale for each token, or for each
group of features of a token, and applies the norm before; `dequantize` writes weights as plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.linear_parts import dot
from inflight.triton_utils.padding import padded_empty
from inflight.triton_utils.pdl import launch_dependents_then_wait, launch_options

# How kernels name the codes: plain numbers, fp8, fp8 as bytes that are converted, packed 4-bit integers, and MXFP4.
PLAIN, FP8, FP8_BYTES, INT4, MXFP4 = 0, 1, 2, 3, 4
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_FP8_MAX = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-10)  # the smallest maximum of a token

# Four bytes to four low and four high nibbles, less 8, as bfloat16. A nibble in the mantissa of 128.0 is 128 + nibble.
_NIBBLES_TO_BF16 = tl.constexpr(
    """
    {
    .reg .b32 t0, t1, s0, s1, mask, base, one, less;
    mov.b32 mask, 0x000F000F;
    mov.b32 base, 0x43004300;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC308C308;
    prmt.b32 t0, $4, 0, 0x4140;
    prmt.b32 t1, $4, 0, 0x4342;
    shr.b32 s0, t0, 4;
    shr.b32 s1, t1, 4;
    lop3.b32 t0, t0, mask, base, 0xEA;
    lop3.b32 t1, t1, mask, base, 0xEA;
    lop3.b32 s0, s0, mask, base, 0xEA;
    lop3.b32 s1, s1, mask, base, 0xEA;
    fma.rn.bf16x2 $0, t0, one, less;
    fma.rn.bf16x2 $1, t1, one, less;
    fma.rn.bf16x2 $2, s0, one, less;
    fma.rn.bf16x2 $3, s1, one, less;
    }
    """
)
# Four bytes of fp8 to bfloat16. Its bits in the middle of a bfloat16 are the same number times 2^-120.
_FP8_TO_BF16 = tl.constexpr(
    """
    {
    .reg .b32 t0, t1, s0, s1, sign, rest, factor, zero;
    mov.b32 sign, 0x80008000;
    mov.b32 rest, 0x07F007F0;
    mov.b32 factor, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    prmt.b32 t0, $2, 0, 0x1404;
    prmt.b32 t1, $2, 0, 0x3424;
    shr.b32 s0, t0, 4;
    shr.b32 s1, t1, 4;
    and.b32 t0, t0, sign;
    and.b32 t1, t1, sign;
    lop3.b32 s0, s0, rest, t0, 0xEA;
    lop3.b32 s1, s1, rest, t1, 0xEA;
    fma.rn.bf16x2 $0, s0, factor, zero;
    fma.rn.bf16x2 $1, s1, factor, zero;
    }
    """
)


@triton.jit
def dot_fp8(a, b, acc):
    """Return acc + a @ b for fp8. The tensor cores keep few bits of such sums, so they add at most 128 products before
    the sum is added in float32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, max_num_imprecise_acc=128)


@triton.jit
def nibbles(packed, dtype: tl.constexpr):
    """Return the low and the high nibbles of uint8, less 8."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            _NIBBLES_TO_BF16,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 15).to(tl.int32) - 8).to(tl.float32).to(dtype)
        high = ((packed >> 4).to(tl.int32) - 8).to(tl.float32).to(dtype)
    return low, high


@triton.jit
def fp8_values(codes, dtype: tl.constexpr):
    """Return the numbers that uint8 fp8 codes stand for. Chips without fp8 can do this, too."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _FP8_TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    wide = codes.to(tl.int32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)  # of a float32, times 2^-120
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)


@triton.jit
def _features(x, norm, k, last, m, num_tokens, K):
    """Return features k of all tokens [BLOCK_K, BLOCK_M], scaled by the norm's weights, and their squares before."""
    inside = k < last
    live = inside[:, None] & (m < num_tokens)[None, :]
    features = tl.load(x + m[None, :] * K + k[:, None], mask=live, other=0.0)
    squares = tl.zeros([1, 1], tl.float32)
    if norm is not None:
        wide = features.to(tl.float32)
        squares = wide * wide
        norm_weight = tl.load(norm + k, mask=inside, other=0.0)
        features = (wide * norm_weight[:, None]).to(features.dtype)
    return features, squares


@triton.jit
def _quantized(features):
    """Return features [BLOCK_K, BLOCK_M] as fp8 with one scale for each token, and the scales."""
    wide = features.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), _LEAST) / _FP8_MAX
    return (wide * (1.0 / scale)[None, :]).to(tl.float8e4nv), scale


@triton.jit
def multiply_fp8(
    x, rows, row, norm, scales, first, last, num_tokens, K,
    GROUP: tl.constexpr, PRODUCTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply all tokens with fp8 weights, BLOCK_K features at a time. With PRODUCTS in fp8, these features of each
    token are quantized, too; otherwise weights are uint8 and converted."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    num_groups = tl.cdiv(K, GROUP) if GROUP != 0 else 1
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        inside = start + k < last
        pointers = rows[:, None] + (start + k)[None, :]
        features, own = _features(x, norm, start + k, last, m, num_tokens, K)
        if norm is not None:
            squares += own
        if PRODUCTS:
            codes = tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            values, x_scale = _quantized(features)
            part = dot_fp8(codes, values, tl.zeros([BLOCK_N, BLOCK_M], tl.float32)) * x_scale[None, :]
        else:
            codes = tl.load(pointers, mask=inside[None, :], other=0, eviction_policy="evict_first")
            weights = fp8_values(codes, x.dtype.element_ty)
            part = dot(weights, features, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
        if GROUP != 0:
            part *= tl.load(scales + row * num_groups + start // GROUP)[:, None]
        acc += part
    if GROUP == 0:
        acc *= tl.load(scales + row)[:, None]
    return acc, tl.sum(squares, 0)


@triton.jit
def multiply_int4(
    x, rows, row, norm, scales, zeros, first, last, num_tokens, K,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply all tokens with 4-bit weights, two groups at a time."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, GROUP)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([GROUP, BLOCK_M], tl.float32)
    num_groups = tl.cdiv(K, 2 * GROUP) * 2
    for start in tl.range(first, last, 2 * GROUP, num_stages=STAGES):
        packed = tl.load(rows[:, None] + (start // 2 + k)[None, :], eviction_policy="evict_first")
        low, high = nibbles(packed, x.dtype.element_ty)
        place = row * num_groups + start // GROUP
        features, own = _features(x, norm, start + k, last, m, num_tokens, K)
        acc += _group_product(low, features, scales, zeros, place, PRECISION)
        if norm is not None:
            squares += own
        features, own = _features(x, norm, start + GROUP + k, last, m, num_tokens, K)
        acc += _group_product(high, features, scales, zeros, place + 1, PRECISION)
        if norm is not None:
            squares += own
    return acc, tl.sum(squares, 0)


@triton.jit
def _group_product(weights, features, scales, zeros, place, PRECISION: tl.constexpr):
    """Return the product over one group, whose scales and zero points are at `place` [BLOCK_N]."""
    if zeros is not None:  # small integers, so that the difference is exact
        zero = tl.load(zeros + place)[:, None]
        if _INTERPRETED:
            weights = (weights.to(tl.float32) - zero).to(weights.dtype)
        else:
            weights -= zero.to(weights.dtype)
    empty = tl.zeros([weights.shape[0], features.shape[1]], tl.float32)
    return dot(weights, features, empty, PRECISION) * tl.load(scales + place)[:, None]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weights [N, K] as kernels read them; plain ones if `kind` is 0."""

    codes: Tensor  # [N, K], or [N, bytes] of 4-bit codes
    kind: int = 0
    group: int = 0  # columns that share a scale; 0: all
    scales: Tensor | None = None  # [N, groups] float32; of 4-bit codes an even number of groups
    zeros: Tensor | None = None  # the same, less 8


@dataclass(frozen=True, slots=True)
class QuantizedInputs:
    """Inputs as `quantize_rows` returns them."""

    codes: Tensor  # [T, K] fp8
    scales: Tensor  # [T, groups] float32
    dtype: torch.dtype  # of the inputs, and of products


def as_quantized(weight: Tensor | QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(weight) if isinstance(weight, Tensor) else weight


# ---- inputs ----


@triton.jit
def _quantize_rows_kernel(
    x, norm, codes, scales, num_features, eps, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = column < num_features
    weight = norm
    if norm is not None:
        weight = tl.load(norm + column, mask=live, other=0.0)
    launch_dependents_then_wait(PDL)
    values = tl.load(x + row * num_features + column, mask=live, other=0.0).to(tl.float32)
    if norm is not None:
        values *= tl.rsqrt(tl.sum(values * values, 0) / num_features + eps) * weight
    if GROUP == 0:
        scale = tl.maximum(tl.max(tl.abs(values), 0), _LEAST) / _FP8_MAX
        tl.store(scales + row, scale)
        scaled = values / scale
    else:
        groups = tl.reshape(values, [BLOCK // GROUP, GROUP])
        scale = tl.maximum(tl.max(tl.abs(groups), 1), _LEAST) / _FP8_MAX
        group = tl.arange(0, BLOCK // GROUP)
        num_groups = tl.cdiv(num_features, GROUP)
        tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)
        scaled = tl.reshape(groups / scale[:, None], [BLOCK])
    tl.store(codes + row * num_features + column, scaled.to(tl.float8e4nv), mask=live)


def quantize_rows(
    x: Tensor,  # [T, K]
    norm: Tensor | None = None,  # [K] float32
    eps: float = 0.0,
    group: int = 0,
    pdl: bool = False,
) -> QuantizedInputs:
    """Quantize rms_norm(x), or x without a norm."""
    num_tokens, num_features = x.shape
    codes = padded_empty(num_tokens, num_features, torch.float8_e4m3fn, x.device)
    num_groups = -(-num_features // group) if group else 1
    scales = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    if num_tokens:
        block = triton.next_power_of_2(num_features)
        _quantize_rows_kernel[(num_tokens,)](
            x,
            norm,
            codes,
            scales,
            num_features,
            eps,
            GROUP=group,
            BLOCK=block,
            PDL=pdl,
            num_warps=max(1, min(16, block // 512)),
            **launch_options(pdl),
        )
    return QuantizedInputs(codes, scales, x.dtype)


# ---- weights ----


def pack_int4(codes: Tensor, group: int) -> Tensor:
    """[N, K] uint8 -> [N, bytes] uint8, in the order that `multiply_int4` reads."""
    num_rows, num_columns = codes.shape
    missing = -num_columns % (2 * group)
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    pairs = codes.view(num_rows, -1, 2, group)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


@triton.jit
def _dequantize_int4_kernel(
    packed, scales, zeros, out, num_rows, K, num_pairs, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = (row < num_rows)[:, None]
    pair = tl.program_id(1)
    k = tl.arange(0, GROUP)
    codes = tl.load(packed + (row * num_pairs + pair)[:, None] * GROUP + k[None, :], mask=live, other=0)
    low, high = nibbles(codes, out.dtype.element_ty)
    low, high = low.to(tl.float32), high.to(tl.float32)
    place = (row * num_pairs + pair) * 2
    if zeros is not None:
        low -= tl.load(zeros + place, mask=row < num_rows, other=0.0)[:, None]
        high -= tl.load(zeros + place + 1, mask=row < num_rows, other=0.0)[:, None]
    low *= tl.load(scales + place, mask=row < num_rows, other=0.0)[:, None]
    high *= tl.load(scales + place + 1, mask=row < num_rows, other=0.0)[:, None]
    column = (pair * 2 * GROUP + k)[None, :]
    start = out + row[:, None] * K + column
    tl.store(start, low.to(out.dtype.element_ty), mask=live & (column < K))
    tl.store(start + GROUP, high.to(out.dtype.element_ty), mask=live & (column + GROUP < K))


def dequantize_int4(weight: QuantizedWeight, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Return weights [N, K]."""
    codes, group = weight.codes, weight.group
    num_rows, num_bytes = codes.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=codes.device)
    num_pairs, rows = num_bytes // group, max(1, 4096 // group)
    _dequantize_int4_kernel[(triton.cdiv(num_rows, rows), num_pairs)](
        codes,
        weight.scales,
        weight.zeros,
        out,
        num_rows,
        num_columns,
        num_pairs,
        GROUP=group,
        ROWS=rows,
        num_warps=4,
    )
    return out
