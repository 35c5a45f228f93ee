"""Rows of MXFP4 and fp8 weights that the warps of a program share, so that all their weights are in flight at once.

A warp has 16 rows or more, and every `split`-th of the steps of 256 columns. A lane loads 16 bytes of each of its rows,
straight into the registers in which the tensor cores multiply them: nothing goes through shared memory, and no lane is
shuffled. This takes features in the same order, because tensor cores may add columns in any order:

    row_places      returns where the rows of a program are
    load_first      loads the weights and scales of the first steps
    multiply_rows   multiplies them, and those of later steps, with the features of one token

In Triton, warps are the batch of a product of tensor cores: [S, rows, 8]. Their sums are added once, at the end.

Weights are as few instructions away from bfloat16 as can be: a code is placed in the bits of a number that is 2^126 (of
fp8: 2^120) times too small, and features are raised by 2^64, so that products are normal numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.layers.triton.expert_parts import MXFP4
from inflight.layers.triton.linear_parts import dot
from inflight.layers.triton.mxfp4 import placed_bits

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Two words -> two bfloat16 of each of the four codes, times 2^-126.
_WORDS_TO_PLACED = tl.constexpr(
    """
    {
    .reg .b32 t1, t2, t3, u, v;
    and.b32 $0, $4, 0x81C081C0;
    shl.b32 t1, $4, 3;
    and.b32 $1, t1, 0x81C081C0;
    shl.b32 t2, $4, 6;
    and.b32 $2, t2, 0x81C081C0;
    shl.b32 t3, $4, 1;
    and.b32 t3, t3, 0x80008000;
    shr.b32 u, $4, 5;
    lop3.b32 t3, u, 0x01000100, t3, 0xEA;
    shr.b32 v, $4, 4;
    lop3.b32 $3, v, 0x00C000C0, t3, 0xEA;
    }
    """
)
# Four bytes of fp8 -> bfloat16, times 2^-120. A byte's sign is repeated above it before it is shifted.
_BYTES_TO_PLACED = tl.constexpr(
    """
    {
    .reg .b32 t0, t1;
    prmt.b32 t0, $2, 0, 0x9180;
    prmt.b32 t1, $2, 0, 0xB3A2;
    shl.b32 t0, t0, 4;
    shl.b32 t1, t1, 4;
    and.b32 $0, t0, 0x87F087F0;
    and.b32 $1, t1, 0x87F087F0;
    }
    """
)


@triton.jit
def _placed_numbers(words, dtype: tl.constexpr):
    """Return the four MXFP4 numbers of each word (int16). bfloat16 values are 2^-126 times as large, which saves the
    product that would make them normal numbers: tensor cores do not need those."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _WORDS_TO_PLACED,
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            _placed_number(words, 0, dtype),
            _placed_number(words, 1, dtype),
            _placed_number(words, 2, dtype),
            _placed_number(words, 3, dtype),
        )


@triton.jit
def _placed_number(words, CODE: tl.constexpr, dtype: tl.constexpr):
    number = (placed_bits(words, CODE) << 16).to(tl.float32, bitcast=True)
    if dtype != tl.bfloat16:
        number = (number * 8.507059173023462e37).to(dtype)
    return number


@triton.jit
def _placed_bytes(codes, dtype: tl.constexpr):
    """Return the numbers of fp8 codes. bfloat16 values are 2^-120 times as large."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _BYTES_TO_PLACED, "=&r,=&r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        numbers = codes.to(tl.float32)
        numbers = tl.where(numbers == numbers, numbers, 0.0)  # undefined ones may be NaN
        if dtype == tl.bfloat16:
            return numbers * 7.52316384526264e-37
        else:
            return numbers.to(dtype)


@triton.jit
def _raised(features):
    """Return features times 2^64 if they are bfloat16, so that products with placed numbers are normal numbers."""
    if features.dtype != tl.bfloat16:
        return features
    elif _INTERPRETED:
        return features.to(tl.float32) * 18446744073709551616.0
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 f, zero; mov.b32 f, 0x5F805F80; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, f, zero; }",
            "=r,r",
            [features],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _only(features, is_kept):
    """Return the columns of features that are kept, and zeros."""
    if _INTERPRETED or features.dtype.primitive_bitwidth != 16:
        return tl.where(is_kept[None, None, :], features, 0.0)
    else:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;",
            "=r,r,r,r",  # of the masks of two features, which are the same, the first is read
            [features, tl.where(is_kept, -1, 0)[None, None, :]],
            dtype=features.dtype,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _load_step(
    code_at, scale_at, exists, part, step, stride, K,
    SPLIT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return 256 columns of each warp's rows in pieces [8, S, R, ..], and their scales [4, 8, S, R]. Codes that do not
    exist are undefined: their features are 0."""
    index = step * SPLIT + part  # [S]
    t = tl.arange(0, 4)[:, None, None, None]
    codes = ()
    if CODES == MXFP4:
        tile = (2 * index)[None, :, None, None]
        num_tiles = tl.cdiv(K, 128)
        words = code_at + tile * 32 + tl.arange(0, 32)[None, None, None, :]
        for piece in tl.static_range(2):
            inside = exists[None, :, None, None] & (tile + piece < num_tiles)
            codes += (tl.load(words + 32 * piece, mask=inside),)  # type: ignore[assignment]
        tile = (2 * index)[None, None, :, None] + t // 2
        inside = exists[None, None, :, None] & (tile < num_tiles)
        scale = tl.load(scale_at + tile * stride, mask=inside, other=0)
    else:
        k = index[None, :, None, None] * 256 + tl.arange(0, 64)[None, None, None, :]
        for piece in tl.static_range(4):
            inside = exists[None, :, None, None] & (k + 64 * piece < K)
            codes += (tl.load(code_at + k + 64 * piece, mask=inside),)  # type: ignore[assignment]
        scale = codes[0]  # type: ignore[misc]
        if GROUP != 0:
            k = index[None, None, :, None] * 256 + t % 2 * 128
            inside = exists[None, None, :, None] & (k < K)
            scale = tl.load(scale_at + k // GROUP * stride, mask=inside, other=0.0)
    return codes, scale


@triton.jit
def _step_products(
    loaded, x_rows, exists, part, step, K,
    SPLIT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply what `_load_step` returned with features, whose rows start at the pointers `x_rows` [S]: [S, 8 R, 8]
    float32, to be added along the last dimension.

    Tensor cores multiply with eight columns, and there is one token. So column n has the features of group n alone (of
    fp8: of piece n, if there are that many), and groups have their own sums, which are scaled once.
    """
    codes, scale = loaded
    S: tl.constexpr = codes[0].shape[1]
    R: tl.constexpr = codes[0].shape[2]
    dtype: tl.constexpr = x_rows.dtype.element_ty
    index = step * SPLIT + part
    n = tl.arange(0, 8)
    j = tl.arange(0, 32)
    acc = tl.zeros([S, 8 * R, 8], tl.float32)
    # Each lane multiplies the columns that it loaded: tensor cores may add columns in any order.
    if CODES == MXFP4:
        column = index[None, :, None] * 256 + n[:, None, None] * 32 + j[None, None, :]
        inside = exists[None, :, None] & (column < K)
        features = _raised(tl.load(x_rows[None, :, None] + column, mask=inside, other=0.0))
        features = tl.permute(tl.reshape(features, [8, S, 4, 2, 2, 2]), (1, 3, 4, 2, 5, 0))
        features = tl.reshape(features, [S, 32, 8])
        for piece in tl.static_range(2):
            numbers = _placed_numbers(codes[piece], dtype)
            for group in tl.static_range(4):
                weights = tl.reshape(numbers[group], [8, S, R, 4, 2, 2, 2])
                weights = tl.reshape(tl.permute(weights, (1, 2, 0, 4, 5, 3, 6)), [S, 8 * R, 32])
                acc = dot(weights, _only(features, n == 4 * piece + group), acc, PRECISION)
        scale = scale >> (16 * (tl.arange(0, 4) % 2))[:, None, None, None]
        scales = tl.join((scale & 0xFF) << 23, ((scale >> 8) & 0xFF) << 23).to(tl.float32, bitcast=True)
        if dtype != tl.bfloat16:
            scales *= 1.1754943508222875e-38
        acc *= tl.reshape(tl.permute(scales, (2, 3, 1, 0, 4)), [S, 8 * R, 8])
    else:
        # A lane has 8 and 8 columns.
        lane_columns = tl.arange(0, 2)[:, None] * 8 + (j // 8 * 16 + j % 8)[None, :]
        column = (index[None, :, None] * 256 + (n % 4)[:, None, None] * 64)[:, :, :, None] + lane_columns[
            None, None, :, :
        ]
        inside = exists[None, :, None, None] & (column < K)
        features = _raised(tl.load(x_rows[None, :, None, None] + column, mask=inside, other=0.0))
        features = tl.permute(tl.reshape(features, [8, S, 2, 4, 2, 4]), (1, 2, 4, 3, 5, 0))
        features = tl.reshape(features, [S, 64, 8])
        for piece in tl.static_range(4):
            numbers = tl.reshape(_placed_bytes(codes[piece], dtype), [8, S, R, 4, 4, 4])
            weights = tl.reshape(tl.permute(numbers, (1, 2, 0, 4, 3, 5)), [S, 8 * R, 64])
            acc = dot(weights, _only(features, n == piece), acc, PRECISION)
        if GROUP != 0:
            scales = tl.broadcast_to(scale[:, :, :, :, None], [4, 8, S, R, 2])
            acc *= tl.reshape(tl.permute(scales, (2, 3, 1, 0, 4)), [S, 8 * R, 8])
    return acc


@triton.jit
def row_places(
    weight, scales, expert, first, num_rows, K,
    ROWS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return pointers to the weights [8, S, R, 1] and scales [1, 8, S, R] of rows from `first` on of experts
    `expert` [S]. A warp reads 8 rows at once, each with four lanes."""
    row = tl.arange(0, ROWS // 8)[None, None, :] * 8 + tl.arange(0, 8)[:, None, None]
    row = tl.minimum(first + row, num_rows - 1)
    num_groups = tl.cdiv(K, 128 if CODES == MXFP4 else GROUP) if GROUP != 0 else 1
    length = 32 * num_groups if CODES == MXFP4 else K
    code_at = (weight + expert * num_rows * length)[None, :, None] + row * length
    scale_at = (scales + expert * (num_groups * num_rows))[None, :, None] + row
    return code_at[:, :, :, None], scale_at[None, :, :, :]


@triton.jit
def load_first(
    code_at, scale_at, exists, part, stride, K,
    AHEAD: tl.constexpr, SPLIT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the weights and scales of the first AHEAD steps, for `multiply_rows`. `exists` [S] says which warps have
    rows, and `part` [S] which of the SPLIT parts of the features they have."""
    parts = ()
    for step in tl.static_range(AHEAD):
        parts += (_load_step(code_at, scale_at, exists, part, step, stride, K, SPLIT, CODES, GROUP),)  # type: ignore[assignment]
    tl.debug_barrier()  # else loads would move to where they are needed
    return parts


@triton.jit
def multiply_rows(
    parts, code_at, scale_at, x_rows, exists, part, stride, K,
    ROWS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, SPLIT: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of rows with features that start at the pointers `x_rows` [S]: [S, ROWS] float32, to be
    added over the parts of an expert. `parts` is what `load_first` returned."""
    dtype: tl.constexpr = x_rows.dtype.element_ty
    sums = tl.zeros([x_rows.shape[0], ROWS, 8], tl.float32)
    for step in tl.static_range(STEPS):
        sums += _step_products(parts[step], x_rows, exists, part, step, K, SPLIT, CODES, GROUP, PRECISION)
        if step + AHEAD < STEPS:
            parts += (
                _load_step(code_at, scale_at, exists, part, step + AHEAD, stride, K, SPLIT, CODES, GROUP),
            )
            tl.debug_barrier()
    total = tl.sum(sums, 2)
    if GROUP == 0:
        scales = tl.permute(tl.load(scale_at), (2, 3, 1, 0))
        total *= tl.reshape(scales, [x_rows.shape[0], ROWS])
    if dtype == tl.bfloat16:
        total *= 5.421010862427522e-20 if CODES == MXFP4 else 7.205759403792794e16
    return total
