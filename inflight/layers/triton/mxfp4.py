"""MXFP4 weights: four codes in each 16-bit word, which become bfloat16 with a mask each.

A code is a sign, two bits of exponent and one of mantissa. With its sign in bit 15 and the rest in bits 8 to 6, it is
the bfloat16 of the same number times 2^-126. So one product, with the group's scale times 2^126, gives the weight, and
exactly. Words hold their codes such that most of them are in place after one shift:

    code   sign, exponent, mantissa at bits   shift
    0      15  8 7 6                          0
    1      12  5 4 3                          3
    2       9  2 1 0                          6
    3      14 13 11 10                        1, -5, -4

Word j of a tile holds column j of each of its four groups. No lane is shuffled, and each group is a separate product
that has one scale for each row:

    column of code i in word w of a row = w // 32 * 128 + 32 * i + w % 32

The scales of a tile are the four bytes of an int32, in the order of the groups: the exponents of 2^126 times each
scale, as bfloat16 holds them. Missing groups have code 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.errors import WeightsError
from inflight.layers.triton.linear_parts import dot

GROUP = 32
TILE = 4 * GROUP  # columns of a tile
# The largest exponent plus 127 of a scale: with 2^126, bfloat16 can hold no larger one.
MAX_SCALE = 128
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Two words, and twice a pair of scales of each of four groups -> two bfloat16 of each group.
_WORDS_TO_BF16 = tl.constexpr(
    """
    {
    .reg .b32 t0, t1, t2, t3, u, v, zero;
    mov.b32 zero, 0x80008000;
    and.b32 t0, $4, 0x81C081C0;
    shl.b32 t1, $4, 3;
    and.b32 t1, t1, 0x81C081C0;
    shl.b32 t2, $4, 6;
    and.b32 t2, t2, 0x81C081C0;
    shl.b32 t3, $4, 1;
    and.b32 t3, t3, 0x80008000;
    shr.b32 u, $4, 5;
    lop3.b32 t3, u, 0x01000100, t3, 0xEA;
    shr.b32 v, $4, 4;
    lop3.b32 t3, v, 0x00C000C0, t3, 0xEA;
    fma.rn.bf16x2 $0, t0, $5, zero;
    fma.rn.bf16x2 $1, t1, $7, zero;
    fma.rn.bf16x2 $2, t2, $9, zero;
    fma.rn.bf16x2 $3, t3, $11, zero;
    }
    """
)


@triton.jit
def placed_bits(words, CODE: tl.constexpr):
    """Return one code of each word, placed in the bits of a bfloat16."""
    wide = words.to(tl.int32)
    if CODE == 3:
        return ((wide << 1) & 0x8000) | ((wide >> 5) & 0x0100) | ((wide >> 4) & 0x00C0)
    return (wide << (3 * CODE)) & 0x81C0


@triton.jit
def _value(words, scales, CODE: tl.constexpr, dtype: tl.constexpr):
    number = (placed_bits(words, CODE) << 16).to(tl.float32, bitcast=True)
    factor = (((scales >> (8 * CODE)) & 255) << 23).to(tl.float32, bitcast=True)
    return (number * factor).to(dtype)


@triton.jit
def _bf16_scale(scales, GROUP_INDEX: tl.constexpr):
    """Return 2^126 times the scale of one group, twice, as bfloat16."""
    return ((scales >> (8 * GROUP_INDEX)) & 255) * 0x00800080


@triton.jit
def mxfp4_values(words, scales, dtype: tl.constexpr):
    """Return the weights of the four groups of each tile, each of the shape of its words (int16). Scales (int32) have
    the same shape, or one that can be broadcast to it."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _WORDS_TO_BF16,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",  # of each two scales, which are the same, the first is read
            [
                words,
                _bf16_scale(scales, 0),
                _bf16_scale(scales, 1),
                _bf16_scale(scales, 2),
                _bf16_scale(scales, 3),
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return (
        _value(words, scales, 0, dtype),
        _value(words, scales, 1, dtype),
        _value(words, scales, 2, dtype),
        _value(words, scales, 3, dtype),
    )


@triton.jit
def multiply_mxfp4_pairs(
    x_rows, x_scales, x_row, weight, scales, zeros, expert, row, k, num_rows, is_live, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, WEIGHTS_LEFT: tl.constexpr, PRECISION: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """Multiply pairs with MXFP4 weights, four groups at a time: see `multiply_plain_pairs`. The groups are one
    product, which the tensor cores of Hopper multiply while the next weights are converted."""
    num_tiles = tl.cdiv(K, 128)
    rows = weight + (expert * num_rows + row) * (32 * num_tiles)
    scale_rows = scales + expert * num_tiles * num_rows + row
    k = tl.arange(0, 128)
    j = tl.arange(0, 32)
    # Otherwise the sum might come from before the loop, and products would wait for each other.
    tl.assume(num_tiles > 0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for tile in tl.range(0, num_tiles, num_stages=STAGES):
        words = tl.load(rows[:, None] + (tile * 32 + j)[None, :])
        tile_scales = tl.load(scale_rows + tile * num_rows)[:, None]
        weights = mxfp4_values(words, tile_scales, x_rows.dtype.element_ty)
        mask = (k < K - tile * 128)[:, None] & is_live[None, :]
        features = tl.load(x_rows[None, :] + (tile * 128 + k)[:, None], mask=mask, other=0.0)
        halves = tl.join(tl.join(weights[0], weights[1]), tl.join(weights[2], weights[3]))
        whole = tl.reshape(tl.permute(halves, (0, 3, 2, 1)), [BLOCK_N, 128])
        acc = dot(whole, features, acc, PRECISION)
    return acc


def pack_codes(codes: Tensor) -> Tensor:
    """[N, K] uint8 -> words [N, 32 * tiles] int16."""
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % TILE)).to(torch.int32)
    tiles = codes.view(len(codes), -1, 4, GROUP)
    words = torch.zeros_like(tiles[:, :, 0])
    for code in range(4):
        values = tiles[:, :, code]
        if code == 3:
            words |= (values & 8) << 11 | (values & 4) << 11 | (values & 3) << 10
        else:
            words |= ((values & 8) << 12 | (values & 7) << 6) >> (3 * code)
    return words.to(torch.int16).flatten(1)


def pack_scales(scales: Tensor) -> Tensor:
    """[N, groups] uint8, exponents plus 127 -> [N, tiles] int32."""
    if bool((scales > MAX_SCALE).any()):
        raise WeightsError(
            f"a scale is 2^{int(scales.max()) - 127}: experts on a GPU can have scales of at most 2^{MAX_SCALE - 127}"
        )
    biased = torch.nn.functional.pad(scales + 126, (0, -scales.shape[1] % 4))
    return biased.contiguous().view(torch.int32)
