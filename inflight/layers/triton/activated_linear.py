"""A product with an activation at its end, for many tokens: what a kernel of its own would read and write again.

The tensor cores are the limit here, and an activation takes a fifth of their time. So two programs share a
multiprocessor: one multiplies while the other activates. Tiles go in and out by the chip's copy engine.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inflight.layers.triton.elementwise import ACTIVATIONS, activate
from inflight.layers.triton.multiply import dot
from inflight.layers.triton.tuning import ACTIVATED_TILE, LargeTile
from inflight.triton_utils.pdl import launch_dependents_then_wait, launch_options


@triton.jit(do_not_specialize=["num_tokens"])
def _activated_linear_kernel(
    x_tiles,  # descriptor of x [num_tokens, K], tiles [BLOCK_M, BLOCK_K]
    weight_tiles,  # of weight [num_out, K], [BLOCK_N, BLOCK_K]
    bias,  # [num_out], or None
    out_tiles,  # of out [num_tokens, num_out], [BLOCK_M, BLOCK_N // 2]
    num_tokens,
    num_out,
    K,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # tiles of tokens that one tile of weights meets at about the same time
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    token_tiles, weight_tiles_count = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    group = tl.program_id(0) // (GROUP * weight_tiles_count)
    inside = tl.program_id(0) % (GROUP * weight_tiles_count)
    members = tl.minimum(GROUP, token_tiles - group * GROUP)
    token = (group * GROUP + inside % members) * BLOCK_M
    row = inside // members * BLOCK_N
    HALF: tl.constexpr = BLOCK_N // 2
    launch_dependents_then_wait(PDL)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        features = x_tiles.load([token, start])
        w = weight_tiles.load([row, start])
        acc = dot(features, tl.trans(w), acc, PRECISION)
    # In halves: what is on its way out takes shared memory from what comes in.
    left, right = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, HALF]), [0, 2, 1]))
    _finish(left, bias, out_tiles, token, row, num_out, ACTIVATION, HALF)
    _finish(right, bias, out_tiles, token, row + HALF, num_out, ACTIVATION, HALF)


@triton.jit
def _finish(acc, bias, out_tiles, token, row, num_out, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr):
    if bias is not None:
        n = row + tl.arange(0, WIDTH)
        acc += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
    out_tiles.store([token, row], activate(acc, ACTIVATION).to(out_tiles.dtype))


def activated_linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    bias: Tensor | None,  # [N]
    activation: str,
    pdl: bool = False,
    tile: LargeTile = ACTIVATED_TILE,
) -> Tensor:
    """activation(x @ weight.T + bias) -> [T, N]. Rows of all three must be multiples of 16 bytes."""
    num_tokens, num_features = x.shape
    num_out = len(weight)
    out = torch.empty(num_tokens, num_out, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    _activated_linear_kernel[(triton.cdiv(num_tokens, tile.block_m) * triton.cdiv(num_out, tile.block_n),)](
        TensorDescriptor(x, [num_tokens, num_features], [num_features, 1], [tile.block_m, tile.block_k]),
        TensorDescriptor(weight, [num_out, num_features], [num_features, 1], [tile.block_n, tile.block_k]),
        bias,
        TensorDescriptor(out, [num_tokens, num_out], [num_out, 1], [tile.block_m, tile.block_n // 2]),
        num_tokens,
        num_out,
        num_features,
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP=tile.group,
        STAGES=tile.stages,
        PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=tile.num_warps,
        **launch_options(pdl),
    )
    return out
