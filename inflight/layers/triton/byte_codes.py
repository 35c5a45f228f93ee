"""Products with 8-bit weights: fp8, fp8 in bytes for chips without it, and int8.

Codes are multiplied as they are, with inputs that are quantized, too, or converted in registers to the type of the
inputs, exactly. The sum of each group of features is scaled before it is added, so that long rows keep their precision;
sums of int8 products are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.linear_parts import dot, load_features, wait_for_products
from inflight.layers.triton.quantized_inputs import quantized

MAX_INT8_FEATURES = (1 << 31) // (128 * 127)  # for which a sum of int8 products is sure to fit 32 bits
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_DEQUANTIZED = 256  # columns of rows with one scale that a program dequantizes
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
# Four bytes of int8 to bfloat16. A byte plus 128 in the mantissa of 2^23 is 2^23 + 128 + byte.
_INT8_TO_BF16 = tl.constexpr(
    """
    {
    .reg .b32 u, f0, f1, f2, f3, less;
    mov.b32 less, 0xCB000080;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 f0, u, 0x4B000000, 0x7440;
    prmt.b32 f1, u, 0x4B000000, 0x7441;
    prmt.b32 f2, u, 0x4B000000, 0x7442;
    prmt.b32 f3, u, 0x4B000000, 0x7443;
    add.f32 f0, f0, less;
    add.f32 f1, f1, less;
    add.f32 f2, f2, less;
    add.f32 f3, f3, less;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
    }
    """
)


@triton.jit
def dot_codes(a, b, acc):
    """Return acc + a @ b for int8, as int32, or fp8. The tensor cores keep few bits of sums of fp8, so they add at most
    128 products before the sum is added in float32."""
    if a.dtype == tl.int8:
        return tl.dot(a, b, acc, out_dtype=tl.int32)
    elif _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        most: tl.constexpr = min(128, a.shape[1])
        return tl.dot(a, b, acc, max_num_imprecise_acc=most)


@triton.jit
def products(a, b):
    """Return a @ b for int8 or fp8, as float32."""
    if a.dtype == tl.int8:
        return dot_codes(a, b, tl.zeros([a.shape[0], b.shape[1]], tl.int32)).to(tl.float32)
    else:
        return dot_codes(a, b, tl.zeros([a.shape[0], b.shape[1]], tl.float32))


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
def converted(codes, dtype: tl.constexpr):
    """Return the numbers that bytes stand for: int8, or fp8 as uint8."""
    if codes.dtype != tl.int8:
        return fp8_values(codes, dtype)
    elif dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _INT8_TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        return codes.to(tl.float32).to(dtype)


@triton.jit
def less_zeros(weights, zeros):
    """Return weights [BLOCK_N, n] less the zero points [BLOCK_N]: small integers, so that the difference is exact."""
    if _INTERPRETED:
        return (weights.to(tl.float32) - zeros.to(tl.float32)[:, None]).to(weights.dtype)
    return weights - zeros[:, None].to(weights.dtype)


@triton.jit
def multiply_bytes(
    x, rows, row, norm, scales, zeros, first, end, token, num_tokens, num_rows, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, QUANTIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply all tokens, BLOCK_K features at a time. With QUANTIZE, these features of each token are quantized, too,
    else weights are converted."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    num_groups = tl.cdiv(K, GROUP) if GROUP != 0 else 1
    zero = 0 if rows.dtype.element_ty.is_int() else 0.0
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        inside = start + k < end
        pointers = rows[:, None] + (start + k)[None, :]
        features, step_squares = load_features(x, norm, start + k, end, m, num_tokens, K)
        if norm is not None:
            squares += step_squares
        place = row * num_groups
        if GROUP != 0:
            place += start // GROUP
        codes = tl.load(pointers, mask=inside[None, :], other=zero, eviction_policy="evict_first")
        if QUANTIZE:
            values, x_scale = quantized(features, 0, codes.dtype)
            part = products(codes, values) * x_scale[None, :]
        else:
            weights = converted(codes, x.dtype.element_ty)
            if zeros is not None:
                weights = less_zeros(weights, tl.load(zeros + place))
            part = dot(weights, features, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
        if GROUP != 0:
            part *= tl.load(scales + place)[:, None]
        acc += part
        if GROUP == 0 and not QUANTIZE:
            wait_for_products(start)
    if GROUP == 0:
        acc *= tl.load(scales + row)[:, None]
    return acc, tl.sum(squares, 0)


@triton.jit
def multiply_byte_pairs(
    x_rows, x_scales, x_row, weight, scales, zeros, expert, row, k, num_rows, is_live, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, WEIGHTS_LEFT: tl.constexpr, PRECISION: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Multiply pairs: see `multiply_plain_pairs`. With QUANTIZE, inputs are quantized and have scales, or they are
    quantized here, BLOCK_K features at a time; else weights are converted."""
    rows = weight + (expert * num_rows + row) * K
    num_groups = tl.cdiv(K, GROUP) if GROUP != 0 else 1
    place = expert * num_groups * num_rows + row
    x_scale_rows = x_scales
    if x_scales is not None:
        x_scale_rows = x_scales + x_row * num_groups
    k = tl.arange(0, BLOCK_K)
    ROWS: tl.constexpr = BLOCK_N if WEIGHTS_LEFT else BLOCK_M
    COLUMNS: tl.constexpr = BLOCK_M if WEIGHTS_LEFT else BLOCK_N
    K_AXIS: tl.constexpr = 0 if WEIGHTS_LEFT else 1  # of features
    # Sums that are scaled once, at the end.
    WHOLE: tl.constexpr = GROUP == 0 and x_scales is not None
    INTEGERS: tl.constexpr = weight.dtype.element_ty.is_int()
    acc = tl.zeros([ROWS, COLUMNS], tl.int32 if WHOLE and INTEGERS else tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k < (BLOCK_K if EVEN_K else K - start)
        w = tl.load(rows[:, None] + (start + k)[None, :], mask=inside[None, :], other=0 if INTEGERS else 0.0)
        mask = tl.expand_dims(inside, 1 - K_AXIS) & tl.expand_dims(is_live, K_AXIS)
        places = tl.expand_dims(x_rows, K_AXIS) + tl.expand_dims(start + k, 1 - K_AXIS)
        features = tl.load(places, mask=mask, other=0.0)
        group_place = place
        if GROUP != 0:
            group_place += start // GROUP * num_rows
        if WHOLE:
            a = w if WEIGHTS_LEFT else features
            b = features if WEIGHTS_LEFT else tl.trans(w)
            if INTEGERS:
                acc = dot_codes(a, b, acc)
            else:  # which is added in float32 anyway: see `dot_codes`
                acc += products(a, b)
        else:
            if QUANTIZE:
                if x_scales is None:
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
                numbers = converted(w, features.dtype)
                if zeros is not None:
                    numbers = less_zeros(numbers, tl.load(zeros + group_place))
                if WEIGHTS_LEFT:
                    part = dot(numbers, features, empty, PRECISION)
                else:
                    part = dot(features, tl.trans(numbers), empty, PRECISION)
            if GROUP != 0:
                part *= tl.expand_dims(tl.load(scales + group_place), 1 - K_AXIS)
            acc += part
    if GROUP == 0:
        acc = acc.to(tl.float32) * tl.expand_dims(tl.load(scales + place), 1 - K_AXIS)
    if WHOLE:
        acc *= tl.expand_dims(tl.load(x_scale_rows, mask=is_live, other=0.0), K_AXIS)
    return acc


@triton.jit
def _dequantize_bytes_kernel(
    codes, scales, zeros, out, num_rows, K, num_groups, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < K)[None, :]
    places = row[:, None] * K + column[None, :]
    values = converted(tl.load(codes + places, mask=mask, other=0), tl.float32)
    place = row * num_groups
    if num_groups != 1:
        place += tl.program_id(1)
    if zeros is not None:
        values -= tl.load(zeros + place, mask=row < num_rows, other=0).to(tl.float32)[:, None]
    values *= tl.load(scales + place, mask=row < num_rows, other=0.0)[:, None]
    tl.store(out + places, values.to(out.dtype.element_ty), mask=mask)


def dequantize_bytes(
    codes: Tensor,  # [N, K]
    scales: Tensor,  # [N, groups], contiguous, as zero points are
    zeros: Tensor | None,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return weights [N, K] that are converted, not multiplied as they are."""
    num_rows, num_columns = codes.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=codes.device)
    block = group or _DEQUANTIZED
    rows = max(1, 4096 // block)
    _dequantize_bytes_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, block))](
        codes, scales, zeros, out, num_rows, num_columns, scales.shape[1], ROWS=rows, BLOCK=block, num_warps=4
    )  # fmt: skip
    return out
