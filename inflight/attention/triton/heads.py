"""Heads made ready where they are used: norm and rotation in registers, for kernels that read projected heads raw.

Feature d becomes along[d] * x[d] + across[d] * x[its partner], divided by the head's root mean square if there is a
norm. Cosine, signed sine and the norm's weights are folded into `along` and `across`, ahead of any head.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_turn(
    angles,  # [R] pointers to a position's cosines, sines following
    norm,  # [HEAD_DIM] float32, read if NORM
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """What heads at these positions are multiplied by: along and across, [R, DIM] each."""
    half: tl.constexpr = ROTARY_DIM // 2
    d = tl.arange(0, DIM)
    turned = (d < ROTARY_DIM)[None, :]
    angle = angles[:, None] + tl.where(d < half, d, d - half)[None, :]
    along = tl.load(angle, mask=turned, other=1.0)
    sin = tl.load(angle + half, mask=turned, other=0.0)
    across = tl.where((d < half)[None, :], -sin, sin)
    if NORM:
        along *= tl.load(norm + d, mask=d < HEAD_DIM, other=0.0)[None, :]
        across *= tl.load(norm + _partner(d, ROTARY_DIM), mask=d < HEAD_DIM, other=0.0)[None, :]
    return along, across


@triton.jit
def load_turned(
    heads,  # [N] pointers to projected heads
    along,  # [N or 1, DIM]
    across,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """[N, DIM] in the heads' own type, zeros past HEAD_DIM."""
    d = tl.arange(0, DIM)
    real = (d < HEAD_DIM)[None, :]
    raw = tl.load(heads[:, None] + d[None, :], mask=real, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(heads[:, None] + _partner(d, ROTARY_DIM)[None, :], mask=real, other=0.0).to(tl.float32)
    turned = x * along + y * across
    if NORM:
        turned *= tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    return turned.to(raw.dtype)


@triton.jit
def _partner(d, ROTARY_DIM: tl.constexpr):
    """The feature that feature d turns with; itself past the rotation."""
    half: tl.constexpr = ROTARY_DIM // 2
    return tl.where(d < half, d + half, tl.where(d < ROTARY_DIM, d - half, d))
