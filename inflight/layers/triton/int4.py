"""Products with 4-bit weights in groups of columns, four codes in each 16-bit word.

Words are in the order in which the tensor cores hold their left operand: a thread's codes of one row and group are
adjacent, so it loads up to 16 bytes at once, and each step of the conversion gives two numbers that belong into the
same register. No lane is shuffled. In a group,

    code i of word (t, s, p) is column 32 s + 16 (i // 2) + 8 (i % 2) + 2 t + p,   0 <= t < 4, 0 <= p < 2

The scale of a group is a float32 with its zero point in the lowest eight bits, whose values are far below the precision
of products; one load gives both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.linear_parts import dot, load_features, wait_for_products

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Two words, and 128 plus the zero point twice -> two bfloat16 of each of the four codes, less the zero point, and
# possibly scaled. A code in the mantissa of 128.0 is 128 + code; the difference is exact.
_PLACE = """
    {
    .reg .b32 t0, t1, t2, t3;
    shr.b32 t1, $4, 4;
    shr.b32 t2, $4, 8;
    shr.b32 t3, $4, 12;
    lop3.b32 t0, $4, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t1, t1, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t2, t2, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 t3, t3, 0x000F000F, 0x43004300, 0xEA;
"""
_SUBTRACT = "".join(f"    sub.bf16x2 {{0}}{code}, t{code}, $5;\n" for code in range(4))
_SCALE = "".join(f"    mul.bf16x2 ${code}, t{code}, $6;\n" for code in range(4))
_END = "    }\n    "
_WORDS_TO_BF16 = tl.constexpr(_PLACE + _SUBTRACT.format("$") + _END)
_WORDS_TO_SCALED_BF16 = tl.constexpr(_PLACE + _SUBTRACT.format("t") + _SCALE + _END)


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
def multiply_int4(
    x, rows, row, norm, scales, zeros, first, end, token, num_tokens, num_rows, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, QUANTIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply the tokens from `token` on with 4-bit weights, group by group, and BLOCK_K features at a time. Sums of
    groups are scaled, or, if SCALED, the weights before, so that one sum goes through all groups."""
    m = token + tl.arange(0, BLOCK_M)
    k = tl.arange(0, GROUP)
    word = tl.arange(0, GROUP // 4)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([GROUP, BLOCK_M], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        for part in tl.static_range(BLOCK_K // GROUP):
            group = start // GROUP + part
            pointers = rows[:, None] + (group * (GROUP // 4) + word)[None, :]
            if EVEN_K:
                words = tl.load(pointers, eviction_policy="evict_first")
                scale = tl.load(scales + group * num_rows + row)
            else:  # features past the last are 0, but their weights must be finite
                exists = tl.full([BLOCK_N], group * GROUP, tl.int32) < end
                words = tl.load(pointers, mask=exists[:, None], other=0, eviction_policy="evict_first")
                scale = tl.load(scales + group * num_rows + row, mask=exists, other=0)
            features, step_squares = load_features(
                x, norm, start + part * GROUP + k, end, m, num_tokens, K, EVEN_K
            )
            if norm is not None:
                squares += step_squares
            weights = int4_values(words, scale, GROUP, SCALED, x.dtype.element_ty)
            if SCALED:
                acc = dot(weights, features, acc, PRECISION)
            else:
                acc += int4_product(weights, features, scale, PRECISION)
        if SCALED:
            wait_for_products(start)
    return acc, tl.sum(squares, 0)


@triton.jit
def int4_product(weights, features, scales, PRECISION: tl.constexpr):
    """Return the product over one group, whose weights are not scaled."""
    empty = tl.zeros([weights.shape[0], features.shape[1]], tl.float32)
    return dot(weights, features, empty, PRECISION) * _int4_scale(scales)[:, None]


@triton.jit
def multiply_int4_pairs(
    x_rows, x_scales, x_row, weight, scales, zeros, expert, row, k, num_rows, is_live, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, WEIGHTS_LEFT: tl.constexpr, PRECISION: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Multiply pairs with 4-bit weights, group by group: see `multiply_plain_pairs`."""
    num_groups = tl.cdiv(K, GROUP)
    rows = weight + (expert * num_rows + row) * (num_groups * (GROUP // 4))
    scale_rows = scales + expert * num_groups * num_rows + row
    k = tl.arange(0, GROUP)
    word = tl.arange(0, GROUP // 4)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for group in tl.range(0, num_groups, num_stages=STAGES):
        words = tl.load(rows[:, None] + (group * (GROUP // 4) + word)[None, :])
        scale = tl.load(scale_rows + group * num_rows)
        column = group * GROUP + k
        mask = (column < K)[:, None] & is_live[None, :]
        features = tl.load(x_rows[None, :] + column[:, None], mask=mask, other=0.0)
        weights = int4_values(words, scale, GROUP, False, x_rows.dtype.element_ty)
        acc += int4_product(weights, features, scale, PRECISION)
    return acc


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
    is_row = row < num_rows
    group = tl.program_id(0)  # neighbours write adjacent columns
    word = tl.arange(0, GROUP // 4)
    places = (row.to(tl.int64) * num_groups + group)[:, None] * (GROUP // 4) + word[None, :]
    words = tl.load(codes + places, mask=is_row[:, None], other=0)
    scale = tl.load(scales + group * num_rows + row, mask=is_row, other=0)
    values = int4_values(words, scale, GROUP, False, out.dtype.element_ty).to(tl.float32)
    values *= _int4_scale(scale)[:, None]
    column = group * GROUP + tl.arange(0, GROUP)
    start = out + row.to(tl.int64)[:, None] * K + column[None, :]
    tl.store(start, values.to(out.dtype.element_ty), mask=is_row[:, None] & (column < K)[None, :])


def dequantize_int4(
    codes: Tensor,  # [N, words]
    scales: Tensor,  # [groups, N], contiguous
    num_columns: int,
    group: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the weights [N, num_columns]."""
    num_rows, num_groups, rows = len(codes), len(scales), 8192 // group
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=codes.device)
    _dequantize_int4_kernel[(num_groups, triton.cdiv(num_rows, rows))](
        codes, scales, out, num_rows, num_columns, num_groups, GROUP=group, ROWS=rows, num_warps=4
    )
    return out
