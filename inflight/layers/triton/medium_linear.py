"""Linear layers for dozens to hundreds of tokens: the tensor cores are busy, but latency still dominates.

One kernel computes a tile of tokens by output features, and what comes after the product:

    out = residual + activate(gate) * up,   gate, up = the halves of x @ W.T + bias

Tokens are the left operand, so both operands go from memory to the tensor cores without passing through registers (if
the chip supports it, its copy engine fetches whole tiles by descriptors). A norm is already half done (`NextNorm`)
or left to a separate kernel, since it would need the registers.

A gate's tile holds rows in pairs, gate and up of the same output, so one product serves both and each pair ends up in
one thread. Tiles are split, and their sums added, as in `small_linear`.
"""

from __future__ import annotations

from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from inflight.layers.triton.byte_codes import dot_codes, products
from inflight.layers.triton.elementwise import activate
from inflight.layers.triton.held import HeldWeights, as_held
from inflight.layers.triton.linear_parts import (
    Epilogue,
    SplitKWorkspace,
    dot,
    empty_result,
    fetch_tile,
    launch_linear,
    leave_for_norm,
    load_squares,
)
from inflight.layers.triton.quantized_inputs import QuantizedInputs
from inflight.layers.triton.tuning import LinearTile, can_describe
from inflight.layers.triton_utils.padding import readable_rows
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait


@triton.jit
def _paired_rows(n, num_out, GATE: tl.constexpr):
    """Return the weight row of each column, clamped to the last row."""
    if GATE == 0:
        return tl.minimum(n, num_out - 1)
    return tl.minimum(n // 2, num_out - 1) + (n % 2) * num_out


@triton.jit
def _multiply(
    x,
    weight,
    x_tiles,  # descriptor of x, tiles [BLOCK_M, BLOCK_K]; None: by pointers
    weight_tiles,  # of weight, [BLOCK_N, BLOCK_K]; with a gate [BLOCK_N // 2, 2, BLOCK_K]
    x_scales,  # of quantized inputs [num_tokens, groups] and weights [rows, groups], or None
    scales,
    token,  # first of the tile
    tile,
    first,
    end,
    num_tokens,
    num_out,
    K,
    GATE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return the products [BLOCK_M, BLOCK_N] over features [first, last)."""
    k = tl.arange(0, BLOCK_K)
    m = tl.minimum(token + tl.arange(0, BLOCK_M), num_tokens - 1)
    x_rows = x + m.to(tl.int64) * K
    row = _paired_rows(tile * BLOCK_N + tl.arange(0, BLOCK_N), num_out, GATE)
    rows = weight + row.to(tl.int64) * K
    INTEGERS: tl.constexpr = x.dtype.element_ty == tl.int8 and GROUP == 0
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if INTEGERS else tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        inside = k < (BLOCK_K if EVEN_K else end - start)
        if x_tiles is None:
            features = tl.load(x_rows[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0)
            w = tl.load(rows[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0)
        else:
            features = x_tiles.load([token, start])
            if GATE == 0:
                w = weight_tiles.load([tile * BLOCK_N, start])
            else:
                pairs = weight_tiles.load([tile * (BLOCK_N // 2), 0, start])
                w = tl.reshape(pairs, [BLOCK_N, BLOCK_K])
        if scales is None:
            acc = dot(features, tl.trans(w), acc, PRECISION)
        elif GROUP == 0:
            acc = dot_codes(features, tl.trans(w), acc)
        else:
            num_groups = tl.cdiv(K, GROUP)
            x_scale = tl.load(x_scales + m * num_groups + start // GROUP)
            scale = tl.load(scales + row * num_groups + start // GROUP)
            part = products(features, tl.trans(w))
            acc += part * (x_scale[:, None] * scale[None, :])
    if scales is not None:
        if GROUP == 0:
            acc = acc.to(tl.float32) * (tl.load(x_scales + m)[:, None] * tl.load(scales + row)[None, :])
    return acc


@triton.jit
def _places(token, tile, num_tokens, num_out, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of a tile's results [BLOCK_M, WIDTH], and which of them exist."""
    m = token + tl.arange(0, BLOCK_M)
    n = tile * WIDTH + tl.arange(0, WIDTH)
    place = m[:, None].to(tl.int64) * num_out + n[None, :]
    return place, (m < num_tokens)[:, None] & (n < num_out)[None, :]


@triton.jit
def _finish(
    acc,
    loaded_squares,  # sums of squares of each token, not added up
    before,  # the residual
    next_weights,
    token,
    tile,
    bias,
    out,
    scaled,
    squares_left,
    num_tokens,
    num_out,
    K,
    eps,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Apply everything after the product acc [BLOCK_M, BLOCK_N], and store."""
    if loaded_squares is not None:
        acc *= tl.rsqrt(tl.sum(loaded_squares, 0) / K + eps)[:, None]
    if bias is not None:
        row = _paired_rows(tile * BLOCK_N + tl.arange(0, BLOCK_N), num_out, GATE)
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    WIDTH: tl.constexpr = BLOCK_N if GATE == 0 else BLOCK_N // 2
    if GATE != 0:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, WIDTH, 2]))
        acc = activate(gate, GATE) * up
    place, mask = _places(token, tile, num_tokens, num_out, BLOCK_M, WIDTH)
    if before is not None:
        acc += before.to(tl.float32)
    values = acc.to(out.dtype.element_ty)
    tl.store(out + place, values, mask=mask)
    if next_weights is not None:
        m = token + tl.arange(0, BLOCK_M)
        leave_for_norm(values, next_weights, place, mask, scaled, squares_left, tile, m, num_tokens, 1)


@triton.jit(do_not_specialize=["num_tokens", "ahead", "num_squares"])
def _medium_linear_kernel(
    x,  # [num_tokens, K]
    weight,  # [num_out, K]; with a gate [2 * num_out, K]
    x_tiles,
    weight_tiles,
    x_scales,
    scales,
    squares,  # [num_squares, num_tokens] of the norm that x is scaled for, or None
    bias,  # one for each weight row, or None
    residual,  # [num_tokens, num_out], or None
    next_weight,  # [num_out] float32 of the norm that reads the result, or None
    out,  # [num_tokens, num_out]
    scaled,  # the same; for the next norm
    squares_left,  # [tiles, num_tokens]; for the next norm
    partials,  # SPLIT_K of BLOCK_M * BLOCK_N for each tile
    counters,  # int32, one for each tile, zero
    num_tokens,
    num_out,
    K,
    eps,
    ahead,
    num_squares,
    GATE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    LANES: tl.constexpr,
    SQUARES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that read the same weights are neighbours, so they run at the same time.
    token_tiles = tl.cdiv(num_tokens, BLOCK_M)
    token_tile, share_of_tile = tl.program_id(0) % token_tiles, tl.program_id(0) // token_tiles
    split, tile = share_of_tile % SPLIT_K, share_of_tile // SPLIT_K
    token = token_tile * BLOCK_M
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = split * share
    end = tl.minimum(first + share, K)
    WIDTH: tl.constexpr = BLOCK_N if GATE == 0 else BLOCK_N // 2
    # Prefetch what the end of the program needs.
    next_weights = next_weight
    if next_weight is not None:
        n = tile * WIDTH + tl.arange(0, WIDTH)
        next_weights = tl.load(next_weight + n, mask=n < num_out, other=0.0)
    if PDL and token == 0:
        fetch_tile(weight, tile, num_out, K, first, end, ahead, GATE, BLOCK_N, LANES)
    launch_dependents_then_wait(PDL)
    loaded_squares = squares
    if squares is not None:
        loaded_squares = load_squares(squares, num_squares, num_tokens, token, SQUARES, BLOCK_M)
    before = residual
    if residual is not None:
        place, mask = _places(token, tile, num_tokens, num_out, BLOCK_M, WIDTH)
        before = tl.load(residual + place, mask=mask, other=0.0)
    acc = _multiply(
        x, weight, x_tiles, weight_tiles, x_scales, scales, token, tile, first, end, num_tokens, num_out, K,
        GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PRECISION, GROUP,
    )  # fmt: skip
    if SPLIT_K == 1:
        _finish(
            acc, loaded_squares, before, next_weights, token, tile, bias, out, scaled, squares_left, num_tokens,
            num_out, K, eps, GATE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        PARTIAL_SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        meeting = tile * token_tiles + token_tile
        tile_partials = partials + meeting.to(tl.int64) * (SPLIT_K * PARTIAL_SIZE)
        tl.store(tile_partials + split * PARTIAL_SIZE + inner, acc)
        tl.debug_barrier()  # every thread's stores come before the atomic that announces them
        arrived = tl.atomic_add(counters + meeting, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            # Not unrolled: all splits at once are more than the registers hold.
            for other in tl.range(0, SPLIT_K):
                total += tl.load(tile_partials + other * PARTIAL_SIZE + inner, cache_modifier=".cg")
            tl.store(counters + meeting, 0)
            _finish(
                total, loaded_squares, before, next_weights, token, tile, bias, out, scaled, squares_left, num_tokens,
                num_out, K, eps, GATE, BLOCK_M, BLOCK_N,
            )  # fmt: skip


def medium_linear(
    x: Tensor | QuantizedInputs,  # [T, K]
    weight: Tensor | HeldWeights,  # [N, K], quantized as the inputs are
    workspace: SplitKWorkspace,
    *,
    out: Tensor | None = None,
    tile: LinearTile | None = None,
    **after: Unpack[Epilogue],
) -> Tensor:
    """Return [T, N], or [T, N // 2] with an activation. `out` may be the residual."""
    weights = as_held(weight)
    codes = weights.codes
    x_scales = dtype = None
    if isinstance(x, QuantizedInputs):
        x_scales, dtype = x.scales, x.dtype
        x = x.codes
    num_tokens = len(x)
    if out is None:
        out = empty_result(x, codes, after.get("activation"), dtype)
    if num_tokens == 0:
        return out
    if tile is None:
        tile = weights.medium_tile(num_tokens)
    launch_linear(
        _medium_linear_kernel,
        (x, codes, *_describe(x, codes, tile, after.get("activation") is not None), x_scales, weights.scales),
        workspace,
        tile,
        triton.cdiv(num_tokens, tile.block_m),
        out,
        after,
        GROUP=weights.group,
    )
    return out


def _describe(
    x: Tensor, weight: Tensor, tile: LinearTile, gated: bool
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    if not can_describe(x, weight):
        return None, None
    num_rows, num_features = weight.shape[-2:]
    num_tokens = readable_rows(x, tile.block_m)
    x_tiles = TensorDescriptor(x, [num_tokens, num_features], [num_features, 1], [tile.block_m, tile.block_k])
    if not gated:
        shape, strides, block = [num_rows, num_features], [num_features, 1], [tile.block_n, tile.block_k]
    else:
        # [outputs, gate or up, features]
        shape = [num_rows // 2, 2, num_features]
        strides = [num_features, num_rows // 2 * num_features, 1]
        block = [tile.block_n // 2, 2, tile.block_k]
    return x_tiles, TensorDescriptor(weight, shape, strides, block)
