"""A norm in two halves, neither of which is a kernel of its own.

    rms_norm(x) @ W.T = ((x * gain) @ W.T) / rms(x)

The layer that writes x, the residual stream, leaves x * gain beside it, and of each of its tiles the tokens' sums of
squares. The layer that reads it multiplies what is ready, adds the sums up, always in the same order, and divides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.room import empty_tokens


class NextNorm:
    """The norm that will read a layer's result, and what the layer leaves for it."""

    __slots__ = ("gain", "gained", "squares")

    def __init__(self, gain: Tensor) -> None:
        self.gain = gain  # [N] float32
        self.gained: Tensor | None = None  # [T, N]
        self.squares: Tensor | None = None  # [parts, T] float32


def make_room(
    next_norm: NextNorm | None, out: Tensor, num_parts: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(gain, gained, squares) for a result like `out`, of whose tokens `num_parts` programs write a part each."""
    if next_norm is None:
        return None, None, None
    num_tokens, num_features = out.shape
    next_norm.gained = empty_tokens(num_tokens, num_features, out.dtype, out.device)
    next_norm.squares = torch.empty(num_parts, num_tokens, dtype=torch.float32, device=out.device)
    return next_norm.gain, next_norm.gained, next_norm.squares


@triton.jit
def load_squares(squares, num_parts, num_tokens, token, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """[PARTS, BLOCK_M], zeros past the last part and token. Not added up yet: whoever asks early need not wait."""
    part = tl.arange(0, PARTS)
    m = token + tl.arange(0, BLOCK_M)
    there = (part < num_parts)[:, None] & (m < num_tokens)[None, :]
    return tl.load(squares + part[:, None] * num_tokens + m[None, :], mask=there, other=0.0)


@triton.jit
def leave_for_norm(
    values,  # as they were stored, a tile
    gains,  # of the next norm, for the tile's features
    place,  # of each value in the result
    live,
    gained,
    squares,
    part,
    m,  # the tile's tokens
    num_tokens,
    FEATURES: tl.constexpr,  # which dimension of the tile they are
):
    wide = values.to(tl.float32)
    tl.store(gained + place, (wide * tl.expand_dims(gains, 1 - FEATURES)).to(values.dtype), mask=live)
    sums = tl.sum(tl.where(live, wide * wide, 0.0), FEATURES)
    tl.store(squares + part * num_tokens + m, sums, mask=m < num_tokens)
