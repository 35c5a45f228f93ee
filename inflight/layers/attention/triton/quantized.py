"""Keys and values in 8 bits, as kernels write and read them: e4m3 codes, and a scale for each token and KV head.

Scales are powers of two. So `code * scale` is exact in every dtype that a model computes in, and a kernel gets the same
result whether it multiplies values, scores or weights by the scale, and whether it reads codes from a block or the
numbers that they stand for from the projection.

The scales of a key and of its value are bfloat16, next to each other: kernels fetch both as one word.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.layers.triton.byte_codes import fp8_values

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SMALLEST = tl.constexpr(-100)  # exponents of scales
_LARGEST = tl.constexpr(118)
# In float16 every code times such a scale is a number, even where it is subnormal.
_SMALLEST_FLOAT16 = tl.constexpr(-15)
_LARGEST_FLOAT16 = tl.constexpr(7)

# Four codes to float16, where the device has an instruction for it: Ada, Hopper and later.
_FP8_TO_FP16 = tl.constexpr(
    """
    {
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)
# Two words of two codes: the first codes of both become one pair of float16, and the second ones another.
_WORDS_TO_FP16 = tl.constexpr(
    """
    {
    .reg .b32 sorted;
    .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }
    """
)


@triton.jit
def code_values(codes):
    """Return the numbers that uint8 codes stand for as float16, exactly. 0x7F, which is never written, is NaN."""
    if _INTERPRETED:
        return fp8_values(codes, tl.float16)
    return tl.inline_asm_elementwise(_FP8_TO_FP16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def word_values(words):
    """Return the numbers that both codes of uint16 words stand for, as `code_values` does: the lower ones, the upper
    ones."""
    if _INTERPRETED:
        return code_values((words & 0xFF).to(tl.uint8)), code_values((words >> 8).to(tl.uint8))
    return tl.inline_asm_elementwise(
        _WORDS_TO_FP16, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def largest_magnitude(x):
    """x [R, N] float32 -> [R], the largest |x| as bits: these are in the same order, and NaN is the largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scale_exponents(bits, dtype: tl.constexpr):
    """Return the exponents of the smallest scales with which numbers up to this magnitude are at most 448 = 1.75 * 2^8,
    the largest e4m3. `dtype` must hold the products of codes and scales. A scale is infinite if a number is not finite,
    so that this shows in results."""
    exponents = ((bits + 0x1FFFFF) >> 23) - (127 + 8)  # one more if the mantissa is above 1.75
    if dtype == tl.float16:
        exponents = tl.minimum(tl.maximum(exponents, _SMALLEST_FLOAT16), _LARGEST_FLOAT16)
    else:
        exponents = tl.minimum(tl.maximum(exponents, _SMALLEST), _LARGEST)
    return tl.where(bits < 0x7F800000, exponents, 128)


@triton.jit
def power_of_two(exponents):
    """2^exponents, in float32"""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log2_of_power(x):
    """Return the logarithms of powers of two, 0 and infinity."""
    if _INTERPRETED:
        return tl.where(x == 0.0, float("-inf"), tl.log2(tl.where(x == 0.0, 1.0, x)))
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def store_scales(pointers, exponents, kept):
    """Store scales to pointers to 16-bit integers."""
    tl.store(pointers, ((exponents + 127) << 7).to(tl.int16), mask=kept)


@triton.jit
def split_scales(words):
    """Return the scales of keys and of values, from the words that hold both."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def encode(x):
    """Return the e4m3 codes (uint8) nearest to float32 numbers; numbers beyond 448 become 448. Chips without fp8 can do
    this, too."""
    limited = tl.minimum(tl.maximum(x, -448.0), 448.0)
    # Times 2^-120: codes are bits 20 to 26.
    bits = (limited * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    codes = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20  # ties go to even
    return (sign | codes).to(tl.uint8)
