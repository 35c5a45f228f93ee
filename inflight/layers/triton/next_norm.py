"""A norm in two halves, neither of which needs its own kernel.

    rms_norm(x) @ W.T = ((x * weight) @ W.T) / rms(x)

The layer that writes x, the hidden states, also writes x * weight and, for each of its tiles, the tokens' sums of
squares. The layer that reads x multiplies the former, adds the sums, always in the same order, and divides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.triton_utils.padding import padded_empty


class NextNorm:
    """The norm that will read a layer's result, and the half of it that the layer precomputes."""

    __slots__ = ("scaled", "squares", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [N] float32
        self.scaled: Tensor | None = None  # [T, N]
        self.squares: Tensor | None = None  # [n, T] float32


def allocate_next_norm(
    next_norm: NextNorm | None, out: Tensor, num_tiles: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (weight, scaled, squares) for a result like `out` that is written by `num_tiles` tiles per token."""
    if next_norm is None:
        return None, None, None
    num_tokens, num_features = out.shape
    next_norm.scaled = padded_empty(num_tokens, num_features, out.dtype, out.device)
    next_norm.squares = torch.empty(num_tiles, num_tokens, dtype=torch.float32, device=out.device)
    return next_norm.weight, next_norm.scaled, next_norm.squares


@triton.jit
def load_squares(squares, num_squares, num_tokens, token, SQUARES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load [SQUARES, BLOCK_M], zeros past the last sum and token. They are added later, so a prefetch need not wait."""
    i = tl.arange(0, SQUARES)
    m = token + tl.arange(0, BLOCK_M)
    there = (i < num_squares)[:, None] & (m < num_tokens)[None, :]
    return tl.load(squares + i[:, None] * num_tokens + m[None, :], mask=there, other=0.0)


@triton.jit
def leave_for_norm(
    values,  # as they were stored, a tile
    weights,  # of the next norm, for the tile's features
    place,  # of each value in the result
    live,
    scaled,
    squares,
    tile,
    m,  # the tile's tokens
    num_tokens,
    FEATURES: tl.constexpr,  # which dimension of the tile they are
):
    wide = values.to(tl.float32)
    tl.store(scaled + place, (wide * tl.expand_dims(weights, 1 - FEATURES)).to(values.dtype), mask=live)
    sums = tl.sum(tl.where(live, wide * wide, 0.0), FEATURES)
    tl.store(squares + tile * num_tokens + m, sums, mask=m < num_tokens)
