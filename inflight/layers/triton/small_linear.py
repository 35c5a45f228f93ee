"""Linear layers for few tokens, whose time is that of reading the weights once.

One kernel computes a tile of output features for all tokens of the step, together with what comes before and after the
product; each part is optional:

    out = residual + activate(gate) * up,   gate, up = the halves of rms_norm(x) @ W.T + bias

The norm's statistics are summed along with the product and applied to its result:
sum_k (x_k g_k / rms) w_k = (sum_k x_k g_k w_k) / rms. Or half of the norm is already done (`NextNorm`).

If there are too few tiles for the chip, SPLIT_K programs share the features of one tile. Each writes its sums to the
workspace; the last to arrive adds them in a fixed order and resets the tile's counter.
"""

from __future__ import annotations

from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.elementwise import activate
from inflight.layers.triton.held import HeldWeights, as_held
from inflight.layers.triton.linear_parts import (
    Epilogue,
    SplitKWorkspace,
    empty_result,
    fetch_scales,
    fetch_tile,
    launch_linear,
    leave_for_norm,
    load_squares,
    weight_rows,
)
from inflight.layers.triton.tuning import LinearTile, token_bucket
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait


@triton.jit
def _places(token, tile, num_tokens, num_out, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Return the offsets of a tile's results [WIDTH, BLOCK_M], and which of them exist."""
    m = token + tl.arange(0, BLOCK_M)
    n = tile * WIDTH + tl.arange(0, WIDTH)
    place = m[None, :].to(tl.int64) * num_out + n[:, None]
    return place, (n < num_out)[:, None] & (m < num_tokens)[None, :]


@triton.jit
def _finish(
    acc,
    sums,  # squares of each token, if NORMED
    before,  # the residual; if not EARLY, a pointer to it
    next_weights,
    token,  # first of the tile
    tile,
    bias,
    out,
    scaled,
    squares_left,
    num_tokens,
    num_out,
    K,
    eps,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Apply everything after the product acc [BLOCK_N, BLOCK_M], and store."""
    if NORMED:
        acc *= tl.rsqrt(sums / K + eps)[None, :]
    if bias is not None:
        row = weight_rows(tl.arange(0, BLOCK_N), tile, num_out, GATE, BLOCK_N)
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    WIDTH: tl.constexpr = BLOCK_N if GATE == 0 else BLOCK_N // 2
    if GATE != 0:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, WIDTH, BLOCK_M]), [1, 2, 0]))
        acc = activate(gate, GATE) * up
    place, mask = _places(token, tile, num_tokens, num_out, BLOCK_M, WIDTH)
    if before is not None:
        if EARLY:
            acc += before.to(tl.float32)
        else:
            acc += tl.load(before + place, mask=mask, other=0.0).to(tl.float32)
    values = acc.to(out.dtype.element_ty)
    tl.store(out + place, values, mask=mask)
    if next_weights is not None:
        m = token + tl.arange(0, BLOCK_M)
        leave_for_norm(values, next_weights, place, mask, scaled, squares_left, tile, m, num_tokens, 0)


@triton.jit
def _add_splits(
    acc, sums, before, next_weights, token, tile, bias, out, scaled, squares_left, num_tokens, num_out, K, eps,
    norm, squares, partials, counters, meeting, split,
    SPLIT_K: tl.constexpr, EARLY: tl.constexpr, GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finish the tile. If programs share it, the last to arrive at `meeting` does, with the sums of all."""
    NORMED: tl.constexpr = norm is not None or squares is not None
    if SPLIT_K == 1:
        _finish(
            acc, sums, before, next_weights, token, tile, bias, out, scaled, squares_left, num_tokens, num_out, K,
            eps, NORMED, EARLY, GATE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        PARTIAL_SIZE: tl.constexpr = BLOCK_M * (BLOCK_N + 1)
        m = tl.arange(0, BLOCK_M)
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tile_partials = partials + meeting.to(tl.int64) * (SPLIT_K * PARTIAL_SIZE)
        tl.store(tile_partials + split * PARTIAL_SIZE + inner, acc)
        if norm is not None:
            tl.store(tile_partials + split * PARTIAL_SIZE + BLOCK_M * BLOCK_N + m, sums)
        tl.debug_barrier()  # every thread's stores come before the atomic that announces them
        arrived = tl.atomic_add(counters + meeting, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT_K - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            if norm is not None:
                sums = tl.zeros([BLOCK_M], tl.float32)
            if EARLY:
                for other in tl.static_range(SPLIT_K):
                    partial = tile_partials + other * PARTIAL_SIZE
                    total += tl.load(partial + inner, cache_modifier=".cg")
                    if norm is not None:
                        sums += tl.load(partial + BLOCK_M * BLOCK_N + m, cache_modifier=".cg")
            else:  # all splits at once are more than the registers hold
                for other in tl.range(0, SPLIT_K):
                    partial = tile_partials + other * PARTIAL_SIZE
                    total += tl.load(partial + inner, cache_modifier=".cg")
                    if norm is not None:
                        sums += tl.load(partial + BLOCK_M * BLOCK_N + m, cache_modifier=".cg")
            tl.store(counters + meeting, 0)
            _finish(
                total, sums, before, next_weights, token, tile, bias, out, scaled, squares_left, num_tokens, num_out,
                K, eps, NORMED, EARLY, GATE, BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "ahead", "num_squares"])
def _small_linear_kernel(
    x,  # [num_tokens, K]
    weight,  # [num_out, K]; with a gate [2 * num_out, K]
    norm,  # [K] float32, or None
    scales,  # of quantized weights, and their zero points: see `held.py`
    zeros,
    squares,  # [num_squares, num_tokens] of the norm that x is scaled for, or None
    bias,  # one for each weight row, or None
    residual,  # [num_tokens, num_out], or None
    next_weight,  # [num_out] float32 of the norm that reads the result, or None
    out,  # [num_tokens, num_out]
    scaled,  # the same; for the next norm
    squares_left,  # [tiles, num_tokens]; for the next norm
    partials,  # SPLIT_K of BLOCK_M * (BLOCK_N + 1) for each tile
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
    MULTIPLY: tl.constexpr,  # a function like `multiply_plain`
    GROUP: tl.constexpr,
    QUANTIZE: tl.constexpr,  # whether inputs are quantized, too
    SCALED: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
):
    if TOKEN_TILES == 1:
        token_tile, share_of_tile = 0, tl.program_id(0)
    else:  # neighbours read the same weights
        token_tile, share_of_tile = tl.program_id(0) % TOKEN_TILES, tl.program_id(0) // TOKEN_TILES
    token = token_tile * BLOCK_M
    PACKED: tl.constexpr = weight.dtype.element_ty == tl.int16  # words hold four features each
    row_size = tl.cdiv(K, GROUP) * (GROUP // 4) if PACKED else K
    split, tile = share_of_tile % SPLIT_K, share_of_tile // SPLIT_K
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = split * share
    share_end = tl.minimum(first + share, K)
    WIDTH: tl.constexpr = BLOCK_N if GATE == 0 else BLOCK_N // 2
    # Prefetch what the end of the program needs.
    next_weights = next_weight
    if next_weight is not None:
        n = tile * WIDTH + tl.arange(0, WIDTH)
        next_weights = tl.load(next_weight + n, mask=n < num_out, other=0.0)
    num_rows = num_out if GATE == 0 else 2 * num_out
    if PDL:
        if PACKED:
            begin, end = first // GROUP, tl.cdiv(share_end, GROUP)
            fetch_scales(scales, tile, num_out, num_rows, begin, end, GATE, BLOCK_N, LANES)
            begin, end = begin * (GROUP // 4), end * (GROUP // 4)
        else:
            begin, end = first, share_end
        fetch_tile(weight, tile, num_out, row_size, begin, end, ahead, GATE, BLOCK_N, LANES)
    launch_dependents_then_wait(PDL)
    # Load what the end of the program needs while it multiplies, unless large tiles need the registers.
    EARLY: tl.constexpr = not PACKED or BLOCK_M < 64
    loaded_squares = squares
    before = residual
    if EARLY:
        if squares is not None:
            loaded_squares = load_squares(squares, num_squares, num_tokens, token, SQUARES, BLOCK_M)
        if residual is not None:
            place, mask = _places(token, tile, num_tokens, num_out, BLOCK_M, WIDTH)
            before = tl.load(residual + place, mask=mask, other=0.0)
    row = weight_rows(tl.arange(0, BLOCK_N), tile, num_out, GATE, BLOCK_N)
    rows = weight + row.to(tl.int64) * row_size
    acc, sums = MULTIPLY(
        x, rows, row, norm, scales, zeros, first, share_end, token, num_tokens, num_rows, K, GROUP, EVEN_K, BLOCK_M,
        BLOCK_N, BLOCK_K, STAGES, PRECISION, QUANTIZE, SCALED,
    )  # fmt: skip
    if squares is not None:
        if not EARLY:
            loaded_squares = load_squares(squares, num_squares, num_tokens, token, SQUARES, BLOCK_M)
        sums = tl.sum(loaded_squares, 0)
    _add_splits(
        acc, sums, before, next_weights, token, tile, bias, out, scaled, squares_left, num_tokens, num_out, K, eps,
        norm, squares, partials, counters, tile * TOKEN_TILES + token_tile, split,
        SPLIT_K, EARLY, GATE, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def small_linear(
    x: Tensor,  # [T, K]
    weight: Tensor | HeldWeights,  # [N, K]
    workspace: SplitKWorkspace,
    *,
    norm: Tensor | None = None,  # [K] float32
    out: Tensor | None = None,
    tile: LinearTile | None = None,
    **after: Unpack[Epilogue],
) -> Tensor:
    """Return [T, N], or [T, N // 2] with an activation. `out` may be the residual."""
    num_tokens, weights = len(x), as_held(weight)
    if out is None:
        out = empty_result(x, weights.codes, after.get("activation"))
    if num_tokens == 0:
        return out
    if tile is None:
        tile = weights.small_tile(token_bucket(num_tokens))
    token_tiles = -(-num_tokens // tile.block_m)
    assert token_tiles == 1 or weights.splits_tokens, (
        f"{num_tokens} tokens do not fit a tile of {tile.block_m}"
    )
    launch_linear(
        _small_linear_kernel,
        (x, weights.codes, norm, weights.scales, weights.zeros),
        workspace,
        tile,
        token_tiles,
        out,
        after,
        MULTIPLY=weights.multiply_few(tile),
        GROUP=weights.group,
        QUANTIZE=weights.quantizes_inputs,
        SCALED=tile.scaled,
        TOKEN_TILES=token_tiles,
    )
    return out
