"""Products with quantized weights, and the conversions around them.

`multiply_bytes` and `multiply_int4` multiply a tile of weights with all tokens of a step, as `multiply_tensor_cores` in
`linear_parts.py` does. Codes are multiplied as they are, or converted in registers to the type of the inputs, exactly.
The sum of each group of features is scaled before it is added, so that long rows keep their precision; sums of int8
products are exact.

4-bit codes are packed four to a 16-bit word, in the order in which the tensor cores hold their left operand: a thread's
codes of one row and group are adjacent, so it loads up to 16 bytes at once, and each step of the conversion gives two
numbers that belong into the same register. No lane is shuffled. In a group,

    code i of word (t, s, p) is column 32 s + 16 (i // 2) + 8 (i % 2) + 2 t + p,   0 <= t < 4, 0 <= p < 2

The scale of a group is a float32 with its zero point in the lowest eight bits, whose values are far below the precision
of products; one load gives both. `quantize_rows` quantizes inputs to fp8 or int8 with one scale for each token, or for
each group of features of a token, and applies the norm before; `dequantize` writes weights as plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from inflight.layers.triton.linear_parts import dot
from inflight.triton_utils.padding import padded_empty
from inflight.triton_utils.pdl import launch_dependents_then_wait, launch_options

# How kernels name the codes: plain numbers, fp8, fp8 as bytes that are converted, packed 4-bit integers, MXFP4, int8,
# and int8 that is converted.
PLAIN, FP8, FP8_BYTES, INT4, MXFP4, INT8, INT8_CONVERTED = 0, 1, 2, 3, 4, 5, 6
PRODUCTS = (FP8, INT8)  # those that are multiplied with inputs of the same kind
MAX_INT8_FEATURES = (1 << 31) // (128 * 127)  # for which a sum of int8 products is sure to fit 32 bits
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_FP8_MAX = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-10)  # the smallest maximum of a token
_LEAST_BITS = tl.constexpr(0x2EDBE6FF)  # the same as bits
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23
_DEQUANTIZED = 256  # columns of rows with one scale that a program dequantizes

# Two words, and 128 plus the zero point twice -> two bfloat16 of each of the four codes, less the zero point. A code in
# the mantissa of 128.0 is 128 + code; the difference is exact.
_WORDS_TO_BF16 = tl.constexpr(
    """
    {
    .reg .b32 t0, t1, t2, t3;
    shr.b32 t1, $4, 4;
    shr.b32 t2, $4, 8;
    shr.b32 t3, $4, 12;
    lop3.b32 t0, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t1, t1, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t2, t2, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t3, t3, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 $0, t0, $5;
    sub.bf16x2 $1, t1, $5;
    sub.bf16x2 $2, t2, $5;
    sub.bf16x2 $3, t3, $5;
    }
    """
)
# The same times a scale.
_WORDS_TO_SCALED_BF16 = tl.constexpr(
    """
    {
    .reg .b32 t0, t1, t2, t3;
    shr.b32 t1, $4, 4;
    shr.b32 t2, $4, 8;
    shr.b32 t3, $4, 12;
    lop3.b32 t0, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t1, t1, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t2, t2, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t3, t3, 0x000F000F, 0x43004300, 0xEA;
    sub.bf16x2 t0, t0, $5;
    sub.bf16x2 t1, t1, $5;
    sub.bf16x2 t2, t2, $5;
    sub.bf16x2 t3, t3, $5;
    mul.bf16x2 $0, t0, $6;
    mul.bf16x2 $1, t1, $6;
    mul.bf16x2 $2, t2, $6;
    mul.bf16x2 $3, t3, $6;
    }
    """
)
# Wait for all products of the tensor cores.
_WAIT = tl.constexpr("wgmma.wait_group.sync.aligned 0; mov.u32 $0, 0;")
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
def _int4_scale(words):
    """Return the scales of groups as float32."""
    return (words & -256).to(tl.float32, bitcast=True)


@triton.jit
def _int4_code(words, zero, scale, CODE: tl.constexpr, dtype: tl.constexpr):
    values = ((words >> (4 * CODE)) & 15).to(tl.float32) - zero.to(tl.float32)[:, None]
    if scale is not None:
        values *= scale[:, None]
    return values.to(dtype)


@triton.jit
def int4_values(words, scales, GROUP: tl.constexpr, SCALED: tl.constexpr, dtype: tl.constexpr):
    """Return the weights [BLOCK_N, GROUP] of one group, in the order of columns, from its words (int16 [BLOCK_N,
    GROUP // 4]) and scales (int32 [BLOCK_N]). They are multiplied by the scale only if SCALED."""
    BLOCK_N: tl.constexpr = words.shape[0]
    if dtype == tl.bfloat16 and not _INTERPRETED:
        zero = ((scales & 255) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
        if SCALED:
            rounded = ((scales + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]
            a, b, c, d = tl.inline_asm_elementwise(
                _WORDS_TO_SCALED_BF16,
                "=&r,=&r,=&r,=&r,r,r,r",
                [words, zero, rounded],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                _WORDS_TO_BF16,
                "=&r,=&r,=&r,=&r,r,r",
                [words, zero],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
    else:
        zero, scale = scales & 255, _int4_scale(scales) if SCALED else None
        a = _int4_code(words, zero, scale, 0, dtype)
        b = _int4_code(words, zero, scale, 1, dtype)
        c = _int4_code(words, zero, scale, 2, dtype)
        d = _int4_code(words, zero, scale, 3, dtype)
    codes = tl.join(tl.join(a, b), tl.join(c, d))  # [.., i % 2, i // 2]
    parts = tl.reshape(codes, [BLOCK_N, 4, GROUP // 32, 2, 2, 2])  # row, t, s, p, i % 2, i // 2
    return tl.reshape(tl.permute(parts, [0, 2, 5, 4, 1, 3]), [BLOCK_N, GROUP])


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
def converted(codes, CODES: tl.constexpr, dtype: tl.constexpr):
    """Return the numbers that bytes stand for: int8, or fp8 as uint8."""
    if CODES != 6:
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
def _features(x, norm, k, last, m, num_tokens, K, EVEN_K: tl.constexpr = False):
    """Return features k of tokens m [BLOCK_K, BLOCK_M], scaled by the norm's weights, and their squares before. With
    EVEN_K, all of the features exist."""
    inside = k < last
    if EVEN_K:
        live = (m < num_tokens)[None, :]
    else:
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
def _scales(wide, AXIS: tl.constexpr, dtype: tl.constexpr):
    """Return the scales with which the largest numbers along an axis become the largest codes."""
    if (
        dtype == tl.int8
    ):  # which has no NaN: compared as bits, that is the largest number, and makes a scale NaN
        bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)
        return tl.maximum(bits, _LEAST_BITS).to(tl.float32, bitcast=True) / 127.0
    else:
        return tl.maximum(tl.max(tl.abs(wide), AXIS), _LEAST) / _FP8_MAX


@triton.jit
def _codes(scaled, dtype: tl.constexpr):
    """Return the nearest codes. An integer that is added to 1.5 * 2^23 is in the low bits of the sum."""
    if dtype == tl.int8:
        return (scaled + _ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return scaled.to(dtype)


@triton.jit
def quantized(features, AXIS: tl.constexpr, dtype: tl.constexpr):
    """Return features, which are along an axis, as codes with one scale for each token, and the scales."""
    wide = features.to(tl.float32)
    scale = _scales(wide, AXIS, dtype)
    return _codes(wide * tl.expand_dims(1.0 / scale, AXIS), dtype), scale


@triton.jit
def multiply_bytes(
    x, rows, row, norm, scales, zeros, first, last, num_tokens, K,
    GROUP: tl.constexpr, CODES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply all tokens with 8-bit weights, BLOCK_K features at a time. These features of each token are quantized,
    too, or weights are converted."""
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
        place = row * num_groups
        if GROUP != 0:
            place += start // GROUP
        codes = tl.load(
            pointers, mask=inside[None, :], other=0.0 if CODES == 1 else 0, eviction_policy="evict_first"
        )
        if CODES == 1 or CODES == 5:
            values, x_scale = quantized(features, 0, codes.dtype)
            part = products(codes, values) * x_scale[None, :]
        else:
            weights = converted(codes, CODES, x.dtype.element_ty)
            if zeros is not None:
                weights = less_zeros(weights, tl.load(zeros + place))
            part = dot(weights, features, tl.zeros([BLOCK_N, BLOCK_M], tl.float32), PRECISION)
        if GROUP != 0:
            part *= tl.load(scales + place)[:, None]
        acc += part
        if GROUP == 0 and CODES != 1 and CODES != 5:
            _wait_for_products(start)
    if GROUP == 0:
        acc *= tl.load(scales + row)[:, None]
    return acc, tl.sum(squares, 0)


@triton.jit
def multiply_int4(
    x, rows, row, norm, scales, first, last, token, num_tokens, num_rows, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens from `token` on with 4-bit weights, group by group, and BLOCK_K features at a time. Sums of
    groups are scaled, or, if SCALED, the weights before, so that one sum goes through all groups."""
    m = token + tl.arange(0, BLOCK_M)
    k = tl.arange(0, GROUP)
    word = tl.arange(0, GROUP // 4)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([GROUP, BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        for part in tl.static_range(BLOCK_K // GROUP):
            group = start // GROUP + part
            pointers = rows[:, None] + (group * (GROUP // 4) + word)[None, :]
            if EVEN_K:
                words = tl.load(pointers, eviction_policy="evict_first")
                scale = tl.load(scales + group * num_rows + row)
            else:  # features past the last are 0, but their weights must be finite
                exists = tl.full([BLOCK_N], group * GROUP, tl.int32) < last
                words = tl.load(pointers, mask=exists[:, None], other=0, eviction_policy="evict_first")
                scale = tl.load(scales + group * num_rows + row, mask=exists, other=0)
            features, own = _features(x, norm, start + part * GROUP + k, last, m, num_tokens, K, EVEN_K)
            if norm is not None:
                squares += own
            weights = int4_values(words, scale, GROUP, SCALED, x.dtype.element_ty)
            if SCALED:
                acc = dot(weights, features, acc, PRECISION)
            else:
                acc += int4_product(weights, features, scale, PRECISION)
        if SCALED:
            _wait_for_products(start)
    return acc, tl.sum(squares, 0)


@triton.jit
def int4_product(weights, features, scales, PRECISION: tl.constexpr):
    """Return the product over one group, whose weights are not scaled."""
    empty = tl.zeros([weights.shape[0], features.shape[1]], tl.float32)
    return dot(weights, features, empty, PRECISION) * _int4_scale(scales)[:, None]


@triton.jit
def _wait_for_products(scalar):
    """Wait for the tensor cores at the end of an iteration, on Hopper. Its compiler (ptxas) does not allow products of
    numbers in registers to be in flight from one iteration to the next. If they are, it makes each product of 16
    features wait for the previous one, instead of converting weights meanwhile."""
    if not _INTERPRETED:
        if cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
            tl.inline_asm_elementwise(_WAIT, "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weights [N, K] as kernels read them; plain ones if `kind` is 0."""

    codes: Tensor  # [N, K], or [N, words] of 4-bit codes
    kind: int = 0
    group: int = 0  # columns that share a scale; 0: all
    scales: Tensor | None = (
        None  # [N, groups] float32; of 4-bit codes [groups, N] int32, with the zero points
    )
    zeros: Tensor | None = None  # [N, groups] int8


@dataclass(frozen=True, slots=True)
class QuantizedInputs:
    """Inputs as `quantize_rows` returns them."""

    codes: Tensor  # [T, K] fp8 or int8
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
    dtype: tl.constexpr = codes.dtype.element_ty
    if GROUP == 0:
        scale = _scales(values, 0, dtype)
        tl.store(scales + row, scale)
        scaled = values / scale
    else:
        groups = tl.reshape(values, [BLOCK // GROUP, GROUP])
        scale = _scales(groups, 1, dtype)
        group = tl.arange(0, BLOCK // GROUP)
        num_groups = tl.cdiv(num_features, GROUP)
        tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)
        scaled = tl.reshape(groups / scale[:, None], [BLOCK])
    tl.store(codes + row * num_features + column, _codes(scaled, dtype), mask=live)


def quantize_rows(
    x: Tensor,  # [T, K]
    norm: Tensor | None = None,  # [K] float32
    eps: float = 0.0,
    group: int = 0,
    pdl: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizedInputs:
    """Quantize rms_norm(x), or x without a norm, to fp8 or int8."""
    num_tokens, num_features = x.shape
    codes = padded_empty(num_tokens, num_features, dtype, x.device)
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
    """[N, K] uint8 -> words [N, words] int16, in the order that `multiply_int4` reads."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % group)).to(torch.int32)
    parts = codes.view(len(codes), -1, group // 32, 2, 2, 4, 2)  # row, group, s, i // 2, i % 2, t, p
    words = torch.zeros_like(parts[:, :, :, 0, 0])
    for code in range(4):
        words |= parts[:, :, :, code // 2, code % 2] << (4 * code)
    return words.transpose(2, 3).to(torch.int16).flatten(1)


def pack_int4_scales(scales: Tensor, zeros: Tensor | None, num_groups: int) -> Tensor:
    """[N, groups] float32 and uint8 -> [num_groups, N] int32. One scale of a whole row is repeated."""
    rounded = scales.float().contiguous().view(torch.int32) + 128 & -256
    words = rounded | (8 if zeros is None else zeros.to(torch.int32))
    return words.T.expand(num_groups, -1)


@triton.jit
def _dequantize_int4_kernel(
    codes, scales, out, num_rows, K, num_groups, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    group = tl.program_id(0)  # neighbours write adjacent columns
    word = tl.arange(0, GROUP // 4)
    places = (row.to(tl.int64) * num_groups + group)[:, None] * (GROUP // 4) + word[None, :]
    words = tl.load(codes + places, mask=live[:, None], other=0)
    scale = tl.load(scales + group * num_rows + row, mask=live, other=0)
    values = int4_values(words, scale, GROUP, False, out.dtype.element_ty).to(tl.float32)
    values *= _int4_scale(scale)[:, None]
    column = group * GROUP + tl.arange(0, GROUP)
    start = out + row.to(tl.int64)[:, None] * K + column[None, :]
    tl.store(start, values.to(out.dtype.element_ty), mask=live[:, None] & (column < K)[None, :])


@triton.jit
def _dequantize_bytes_kernel(
    codes, scales, zeros, out, num_rows, K, num_groups, CODES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (row < num_rows)[:, None] & (column < K)[None, :]
    places = row[:, None] * K + column[None, :]
    values = converted(tl.load(codes + places, mask=live, other=0), CODES, tl.float32)
    place = row * num_groups
    if num_groups != 1:
        place += tl.program_id(1)
    if zeros is not None:
        values -= tl.load(zeros + place, mask=row < num_rows, other=0).to(tl.float32)[:, None]
    values *= tl.load(scales + place, mask=row < num_rows, other=0.0)[:, None]
    tl.store(out + places, values.to(out.dtype.element_ty), mask=live)


def dequantize(weight: QuantizedWeight, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Return weights [N, K] that are converted, not multiplied as they are."""
    codes, group, scales = weight.codes, weight.group, weight.scales
    assert scales is not None
    num_rows = len(codes)
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=codes.device)
    if weight.kind == INT4:
        num_groups, rows = len(scales), 8192 // group
        _dequantize_int4_kernel[(num_groups, triton.cdiv(num_rows, rows))](
            codes,
            scales,
            out,
            num_rows,
            num_columns,
            num_groups,
            GROUP=group,
            ROWS=rows,
            num_warps=4,
        )
        return out
    block = group or _DEQUANTIZED
    rows = max(1, 4096 // block)
    _dequantize_bytes_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, block))](
        codes,
        scales,
        weight.zeros,
        out,
        num_rows,
        num_columns,
        scales.shape[1],
        CODES=weight.kind,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )
    return out
