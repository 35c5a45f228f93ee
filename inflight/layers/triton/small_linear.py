"""Linear layers for few tokens, where reading the weights once is all the time there is.

One kernel computes a tile of output features for all tokens of the step, and on the way does what stands before
and after the product, each part of it optional:

    out = residual + activate(gate) * up,   gate, up = the halves of rms_norm(x) @ W.T + bias

The norm's statistics are summed beside the product and applied to its result:
sum_k (x_k g_k / rms) w_k = (sum_k x_k g_k w_k) / rms.

Where there are too few tiles for the chip, `split` programs share the features of one tile. Each leaves its sums
in the workspace; the last to arrive adds them up in a fixed order and sets the tile's counter back to zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.early import begin_early, launch_options
from inflight.layers.triton.elementwise import GATES, activate
from inflight.layers.triton.multiply import multiply_plain, multiply_tensor_cores, weight_rows
from inflight.layers.triton.prefetch import bytes_ahead, fetch_tile
from inflight.layers.triton.tuning import Tile, choose_small, num_multiprocessors, token_bucket
from inflight.layers.triton.workspace import Workspace


@triton.jit
def _finish(
    acc,
    squares,
    tile,
    norm,
    bias,
    residual,
    out,
    num_tokens,
    num_out,
    K,
    eps,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What stands after the product acc [BLOCK_N, BLOCK_M], and the store."""
    if norm is not None:
        acc *= tl.rsqrt(squares / K + eps)[None, :]
    if bias is not None:
        row = weight_rows(tl.arange(0, BLOCK_N), tile, num_out, GATE, BLOCK_N)
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    WIDTH: tl.constexpr = BLOCK_N if GATE == 0 else BLOCK_N // 2
    if GATE != 0:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, WIDTH, BLOCK_M]), [1, 2, 0]))
        acc = activate(gate, GATE) * up
    m = tl.arange(0, BLOCK_M)
    n = tile * WIDTH + tl.arange(0, WIDTH)
    live = (n < num_out)[:, None] & (m < num_tokens)[None, :]
    place = m[None, :].to(tl.int64) * num_out + n[:, None]
    if residual is not None:
        acc += tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["num_tokens", "ahead"])
def _small_linear_kernel(
    x,  # [num_tokens, K]
    weight,  # [num_out, K]; with a gate [2 * num_out, K]
    norm,  # [K] float32, or None
    bias,  # one for each weight row, or None
    residual,  # [num_tokens, num_out], or None
    out,  # [num_tokens, num_out]
    partials,  # SPLIT slots of BLOCK_M * (BLOCK_N + 1) for each tile
    counters,  # int32, one for each tile, zero
    num_tokens,
    num_out,
    K,
    eps,
    ahead,
    GATE: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    part, tile = tl.program_id(0) % SPLIT, tl.program_id(0) // SPLIT
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    first = part * share
    last = tl.minimum(first + share, K)
    if EARLY:
        fetch_tile(weight, tile, num_out, K, first, last, ahead, GATE, BLOCK_N, LANES)
    begin_early(EARLY)
    rows = weight + weight_rows(tl.arange(0, BLOCK_N), tile, num_out, GATE, BLOCK_N).to(tl.int64) * K
    if BLOCK_M <= 4:
        acc, squares = multiply_plain(
            x, rows, norm, first, last, num_tokens, K, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES
        )
    else:
        acc, squares = multiply_tensor_cores(
            x, rows, norm, first, last, num_tokens, K, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PRECISION
        )
    if SPLIT == 1:
        _finish(
            acc, squares, tile, norm, bias, residual, out, num_tokens, num_out, K, eps, GATE, BLOCK_M, BLOCK_N
        )
    else:
        SLOT: tl.constexpr = BLOCK_M * (BLOCK_N + 1)
        m = tl.arange(0, BLOCK_M)
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        slots = partials + tile.to(tl.int64) * (SPLIT * SLOT)
        tl.store(slots + part * SLOT + inner, acc)
        if norm is not None:
            tl.store(slots + part * SLOT + BLOCK_M * BLOCK_N + m, squares)
        tl.debug_barrier()  # every thread's stores come before the one atomic that tells of them
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            summed = tl.zeros([BLOCK_M], tl.float32)
            for other in tl.static_range(SPLIT):
                slot = slots + other * SLOT
                total += tl.load(slot + inner, cache_modifier=".cg")
                if norm is not None:
                    summed += tl.load(slot + BLOCK_M * BLOCK_N + m, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            _finish(
                total, summed, tile, norm, bias, residual, out, num_tokens, num_out, K, eps, GATE, BLOCK_M, BLOCK_N
            )  # fmt: skip


def small_linear(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [N, K]
    workspace: Workspace,
    *,
    norm: Tensor | None = None,  # [K] float32
    eps: float = 0.0,
    bias: Tensor | None = None,  # [N]
    activation: str | None = None,
    residual: Tensor | None = None,  # [T, N]
    out: Tensor | None = None,
    early: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """[T, N], or [T, N // 2] with an activation. `out` may be the residual."""
    num_tokens, num_features = x.shape
    num_rows = weight.shape[0]
    num_out = num_rows if activation is None else num_rows // 2
    if out is None:
        out = torch.empty(num_tokens, num_out, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    if tile is None:
        num_sms = num_multiprocessors(x.device)
        tile = choose_small(token_bucket(num_tokens), num_rows, num_features, weight.itemsize, num_sms)
    assert num_tokens <= tile.block_m, f"{num_tokens} tokens do not fit a tile of {tile.block_m}"
    num_tiles = triton.cdiv(num_rows, tile.block_n)
    if tile.split > 1:
        workspace.check(num_tiles, tile)
    _small_linear_kernel[(num_tiles * tile.split,)](
        x,
        weight,
        norm,
        bias,
        residual,
        out,
        workspace.partials if tile.split > 1 else None,
        workspace.counters if tile.split > 1 else None,
        num_tokens,
        num_out,
        num_features,
        eps,
        bytes_ahead(weight, tile, num_tiles) if early else 0,
        GATE=0 if activation is None else GATES[activation],
        EVEN_K=num_features % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT=tile.split,
        STAGES=tile.stages,
        LANES=max(32 * tile.num_warps, tile.block_n),
        PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        EARLY=early,
        num_warps=tile.num_warps,
        **launch_options(early),
    )
    return out
