"""Layer norms of encoders: mean and variance of each token's features, computed while they are in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.tuning import NormTile, choose_norm
from inflight.triton_utils.padding import padded_empty
from inflight.triton_utils.pdl import launch_dependents_then_wait, launch_options


@triton.jit(do_not_specialize=["num_tokens"])
def _layer_norm_kernel(
    residual,  # [num_tokens, num_features], or None
    x,  # the same
    weight,  # [num_features] float32
    bias,  # the same, or None
    out,
    num_tokens,
    num_features,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    real = column < num_features
    factor = tl.load(weight + column, mask=real, other=0.0)
    shift = bias
    if bias is not None:
        shift = tl.load(bias + column, mask=real, other=0.0)
    launch_dependents_then_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = row[:, None].to(tl.int64) * num_features + column[None, :]
    live = (row < num_tokens)[:, None] & real[None, :]
    wide = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
    mean = tl.sum(wide, 1) / num_features
    # Not from the mean of squares: that and the mean's square would be two large numbers that differ little.
    wide = tl.where(real[None, :], wide - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / num_features + eps)
    y = wide * scale[:, None] * factor[None, :]
    if bias is not None:
        y += shift[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=live)


def layer_norm(
    x: Tensor,  # [T, n]
    weight: Tensor,  # [n] float32
    bias: Tensor | None,
    eps: float,
    pdl: bool = False,
    tile: NormTile | None = None,
) -> Tensor:
    return _normalise(None, x, weight, bias, eps, pdl, tile)


def add_layer_norm(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    pdl: bool = False,
    tile: NormTile | None = None,
) -> Tensor:
    """Return layer_norm(residual + x); the sum is not rounded in between."""
    return _normalise(residual.contiguous(), x, weight, bias, eps, pdl, tile)


def _normalise(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    pdl: bool,
    tile: NormTile | None,
) -> Tensor:
    num_tokens, num_features = x.shape
    out = padded_empty(num_tokens, num_features, x.dtype, x.device)
    if num_tokens == 0:
        return out
    if tile is None:
        tile = choose_norm(num_features)
    _layer_norm_kernel[(triton.cdiv(num_tokens, tile.rows),)](
        residual,
        x.contiguous(),
        weight,
        bias,
        out,
        num_tokens,
        num_features,
        eps,
        ROWS=tile.rows,
        BLOCK=triton.next_power_of_2(num_features),
        PDL=pdl,
        num_warps=tile.num_warps,
        **launch_options(pdl),
    )
    return out
