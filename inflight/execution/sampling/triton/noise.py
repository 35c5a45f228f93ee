"""The counter-based generator and the race of `randomness.py`, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from inflight.execution.sampling import randomness

_WORD = 0xFFFFFFFF
_A = tl.constexpr(randomness.A & _WORD)
_B = tl.constexpr(randomness.B & _WORD)
_START_1 = tl.constexpr(randomness.START_1 & _WORD)
_START_2 = tl.constexpr(randomness.START_2 & _WORD)
_STRIDE = tl.constexpr(randomness.STRIDE & _WORD)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG_2 = tl.constexpr(0.6931471805599453)
# Below this the logarithm of 1 - u has lost too many bits of u, and five terms of its series have not.
_SERIES_LIMIT = tl.constexpr(1 / 16)


@triton.jit
def race_key(seed_low, seed_high, position):
    """The two words, uint32, that int32 (seed, position) become."""
    low = seed_low.to(tl.uint32, bitcast=True)
    high = seed_high.to(tl.uint32, bitcast=True)
    place = position.to(tl.uint32, bitcast=True)
    first = _mix(_mix(_mix(low + _START_1) + high) + place)
    second = _mix(_mix(_mix(low + _START_2) + high) + place)
    return first, second


@triton.jit
def race_scores(logits, inverse_temperature, first, second, token_ids):
    """logit / temperature - log(exponential), float32, in the shape of the int32 ids: the greatest wins."""
    u = _uniform(_bits(first, second, token_ids))
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    exponential = tl.where(u < _SERIES_LIMIT, series, -_LOG_2 * _log2(1.0 - u))
    return logits * inverse_temperature - _LOG_2 * _log2(exponential)


@triton.jit
def _log2(x):
    """One instruction, right to about 2^-22; an exact logarithm would be most of the race's work."""
    return tl.log2(x) if _INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def _bits(first, second, token_ids):
    x = token_ids.to(tl.uint32, bitcast=True) * _STRIDE + first
    x = ((x ^ (x >> 16)) * _A) ^ second
    x = (x ^ (x >> 15)) * _B
    return x ^ (x >> 16)


@triton.jit
def _uniform(bits):
    """float32 strictly inside (0, 1)."""
    u = (bits >> 1).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-31 + 2.0**-32
    return tl.minimum(u, 1 - 2.0**-24)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * _A
    x = (x ^ (x >> 15)) * _B
    return x ^ (x >> 16)
