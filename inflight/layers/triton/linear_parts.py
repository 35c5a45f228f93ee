"""Shared parts of `small_linear` and `medium_linear`: multiplying and prefetching tiles of weights, norms in halves.

`multiply_plain` and `multiply_tensor_cores`, and functions with the same parameters for quantized weights
(`byte_codes.py`, `int4.py`), multiply a tile of weights with all tokens of a step, or those from `token` on. They
return (products [BLOCK_N, BLOCK_M], sums of squares of the tokens [BLOCK_M]) over features [first, last); squares are
only meaningful with a norm. `rows` are pointers to the tile's `weight_rows` `row` [BLOCK_N], `x` is [num_tokens, K],
`norm` [K] float32 or None is the norm's weight, which is applied first. Weights are the left operand, so that they, and
not padding tokens, fill the long side of a tensor core's tile.

`fetch_tile` prefetches weights into the L2 cache while the previous kernel is still running.

A norm in two halves (`NextNorm`) needs no separate kernel:

    rms_norm(x) @ W.T = ((x * weight) @ W.T) / rms(x)

The layer that writes x, the hidden states, also writes x * weight and, for each of its tiles, the tokens' sums of
squares. The layer that reads x multiplies the former, adds the sums, always in the same order, and divides.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from inflight.layers.triton.elementwise import ACTIVATIONS
from inflight.layers.triton.tuning import LinearTile, num_multiprocessors
from inflight.layers.triton_utils.padding import padded_empty
from inflight.layers.triton_utils.pdl import launch_options

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Wait for all products of the tensor cores.
_WAIT = tl.constexpr("wgmma.wait_group.sync.aligned 0; mov.u32 $0, 0;")
_FETCH_AHEAD = 4 << 20  # bytes in the L2 cache for all programs together: about 1 us of memory bandwidth
# Lanes of one warp that request the same bytes issue one request.
_FETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;")
_FETCH_LINE = tl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


class SplitKWorkspace:
    """Partial sums of programs that share a tile. One serves all layers of a CUDA stream: kernels run one by one."""

    def __init__(self, device: torch.device, num_floats: int = 1 << 23, num_tiles: int = 1 << 12) -> None:
        self.partials = torch.empty(num_floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    def check(self, num_tiles: int, tile: LinearTile) -> None:
        assert num_tiles <= len(self.counters), f"{num_tiles} tiles are too many to split"
        num_floats = num_tiles * tile.split_k * tile.block_m * (tile.block_n + 1)
        assert num_floats <= len(self.partials), f"{num_floats} partial sums do not fit the workspace"


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:  # the interpreter multiplies bfloat16 tensors as raw bits
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_features(x, norm, k, end, m, num_tokens, K, EVEN_K: tl.constexpr = False):
    """Return features k of tokens m [BLOCK_K, BLOCK_M], scaled by the norm's weights, and their squares before. With
    EVEN_K, all of the features exist."""
    inside = k < end
    if EVEN_K:
        mask = (m < num_tokens)[None, :]
    else:
        mask = inside[:, None] & (m < num_tokens)[None, :]
    features = tl.load(x + m[None, :] * K + k[:, None], mask=mask, other=0.0)
    squares = tl.zeros([1, 1], tl.float32)
    if norm is not None:
        wide = features.to(tl.float32)
        squares = wide * wide
        norm_weight = tl.load(norm + k, mask=inside, other=0.0)
        features = (wide * norm_weight[:, None]).to(features.dtype)
    return features, squares


@triton.jit
def wait_for_products(scalar):
    """Wait for the tensor cores at the end of an iteration, on Hopper. Its compiler (ptxas) does not allow products of
    numbers in registers to be in flight from one iteration to the next. If they are, it makes each product of 16
    features wait for the previous one, instead of converting weights meanwhile."""
    if not _INTERPRETED:
        if cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
            tl.inline_asm_elementwise(_WAIT, "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def weight_rows(index, tile, num_out, GATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the weight row at each index [0, BLOCK_N) of a tile, clamped to the last row.

    With a gate, the first half of a tile are gate rows and the second half the up rows of the same outputs.
    """
    if GATE == 0:
        return tl.minimum(tile * BLOCK_N + index, num_out - 1)
    WIDTH: tl.constexpr = BLOCK_N // 2
    return tl.minimum(tile * WIDTH + index % WIDTH, num_out - 1) + (index // WIDTH) * num_out


@triton.jit
def multiply_plain(
    x, rows, row, norm, scales, zeros, first, end, token, num_tokens, num_rows, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, QUANTIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply one token at a time. Weights may be fp8 or int8: without tensor cores, quantizing their inputs would
    gain nothing."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        limit = BLOCK_K if EVEN_K else end - start
        inside = k < limit
        pointers = rows[:, None] + (start + k)[None, :]
        zero = 0 if rows.dtype.element_ty.is_int() else 0.0
        w = tl.load(pointers, mask=inside[None, :], other=zero, eviction_policy="evict_first").to(tl.float32)
        if GROUP != 0:
            num_groups = tl.cdiv(K, GROUP)
            group = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
            places = row[:, None] * num_groups + group[None, :]
            group_scales = tl.load(scales + places, mask=(group < num_groups)[None, :], other=0.0)
        for index in tl.static_range(BLOCK_M):
            mask = k < tl.where(index < num_tokens, limit, 0)
            features = tl.load(x + index * K + start + k, mask=mask, other=0.0).to(tl.float32)
            if norm is not None:
                squares += tl.where(m == index, tl.sum(features * features, 0), 0.0)
                features *= tl.load(norm + start + k, mask=inside, other=0.0)
            if GROUP == 0:
                product = tl.sum(w * features[None, :], 1)  # [BLOCK_N]
            else:
                parts = tl.reshape(w * features[None, :], [BLOCK_N, BLOCK_K // GROUP, GROUP])
                product = tl.sum(tl.sum(parts, 2) * group_scales, 1)
            acc += tl.where((m == index)[None, :], product[:, None], 0.0)
    if scales is not None and GROUP == 0:
        acc *= tl.load(scales + row)[:, None]
    return acc, squares


@triton.jit
def multiply_tensor_cores(
    x, rows, row, norm, scales, zeros, first, end, token, num_tokens, num_rows, K,
    GROUP: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, QUANTIZE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Multiply all tokens at once, BLOCK_K features at a time."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    for start in tl.range(first, end, BLOCK_K, num_stages=STAGES):
        inside = k < (BLOCK_K if EVEN_K else end - start)
        pointers = rows[:, None] + (start + k)[None, :]
        w = tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        mask = inside[:, None] & (m < num_tokens)[None, :]
        features = tl.load(x + m[None, :] * K + (start + k)[:, None], mask=mask, other=0.0)
        if norm is not None:
            wide = features.to(tl.float32)
            squares += wide * wide
            norm_weight = tl.load(norm + start + k, mask=inside, other=0.0)
            features = (wide * norm_weight[:, None]).to(features.dtype)
        acc = dot(w, features, acc, PRECISION)
    return acc, tl.sum(squares, 0)


@triton.jit
def fetch_tile(
    weight, tile, num_out, K, first, end, ahead,
    GATE: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Prefetch the first `ahead` bytes of the tile's part of each weight row, rows distributed over the warps."""
    num_bytes = tl.minimum(ahead, (end - first) * (weight.dtype.element_ty.primitive_bitwidth // 8))
    if num_bytes > 0:
        row = weight_rows(tl.arange(0, LANES) // (LANES // BLOCK_N), tile, num_out, GATE, BLOCK_N)
        fetch_into_l2(weight + row.to(tl.int64) * K + first, num_bytes)


@triton.jit
def fetch_into_l2(pointers, num_bytes):
    """Prefetch `num_bytes` (a multiple of 16) from each of `pointers` (aligned to 16) without waiting."""
    tl.inline_asm_elementwise(
        _FETCH, "=r,l,r", [pointers.to(tl.int64), num_bytes], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_scales(
    scales, tile, num_out, num_rows, first, end, GATE: tl.constexpr, BLOCK_N: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Prefetch the scales, 4 bytes each, of the tile's rows in groups [first, last), one line of 32 for each thread.
    `scales` is [groups, num_rows]."""
    LINES: tl.constexpr = BLOCK_N // 32
    lane = tl.arange(0, LANES)
    group = tl.minimum(first + lane // LINES, end - 1)
    pointers = scales + group * num_rows + weight_rows(lane % LINES * 32, tile, num_out, GATE, BLOCK_N)
    tl.inline_asm_elementwise(
        _FETCH_LINE, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


class NextNorm:
    """The norm that will read a layer's result, and the half of it that the layer precomputes."""

    __slots__ = ("scaled", "squares", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [N] float32
        self.scaled: Tensor | None = None  # [T, N]
        self.squares: Tensor | None = None  # [n, T] float32


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
    mask,
    scaled,
    squares,
    tile,
    m,  # the tile's tokens
    num_tokens,
    FEATURES: tl.constexpr,  # which dimension of the tile they are
):
    wide = values.to(tl.float32)
    tl.store(scaled + place, (wide * tl.expand_dims(weights, 1 - FEATURES)).to(values.dtype), mask=mask)
    sums = tl.sum(tl.where(mask, wide * wide, 0.0), FEATURES)
    tl.store(squares + tile * num_tokens + m, sums, mask=m < num_tokens)


class Epilogue(TypedDict, total=False):
    """The options of a linear kernel beside its product."""

    squares: Tensor | None  # [n, T], where x is already scaled for its norm: see `NextNorm`
    eps: float
    bias: Tensor | None  # [N]
    activation: str | None
    residual: Tensor | None  # [T, N]
    next_norm: NextNorm | None
    pdl: bool


def launch_linear(
    kernel: Any,
    operands: tuple[Any, ...],  # x [T, K], weight [N, K], and what else the kernel reads first
    workspace: SplitKWorkspace,
    tile: LinearTile,
    token_tiles: int,
    out: Tensor,  # [T, N], or [T, N // 2] with an activation
    after: Epilogue,
    **constants: Any,
) -> None:
    """Launch `small_linear` or `medium_linear` over `token_tiles` tiles of tokens and all tiles of weight rows."""
    x, weight, *_ = operands
    squares, activation, pdl = after.get("squares"), after.get("activation"), after.get("pdl", False)
    num_features, split = x.shape[1], tile.split_k > 1
    num_tiles = triton.cdiv(weight.shape[-2], tile.block_n)
    if split:
        workspace.check(num_tiles * token_tiles, tile)
    next_weight, scaled, squares_left = allocate_next_norm(after.get("next_norm"), out, num_tiles)
    num_squares = 0 if squares is None else len(squares)
    kernel[(num_tiles * tile.split_k * token_tiles,)](
        *operands,
        squares,
        after.get("bias"),
        after.get("residual"),
        next_weight,
        out,
        scaled,
        squares_left,
        workspace.partials if split else None,
        workspace.counters if split else None,
        *out.shape,
        num_features,
        after.get("eps", 0.0),
        _bytes_ahead(weight, tile, num_tiles) if pdl else 0,
        num_squares,
        GATE=0 if activation is None else ACTIVATIONS[activation],
        EVEN_K=num_features % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT_K=tile.split_k,
        STAGES=tile.stages,
        LANES=max(32 * tile.num_warps, tile.block_n),
        SQUARES=triton.next_power_of_2(num_squares),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        **constants,
        num_warps=tile.num_warps,
        **launch_options(pdl),
    )


def empty_result(
    x: Tensor, weight: Tensor, activation: str | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return memory for the product of x and weight (a gate leaves half of it), by default of x's type."""
    num_out = weight.shape[-2] // (1 if activation is None else 2)
    return padded_empty(len(x), num_out, dtype or x.dtype, x.device)


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


def _bytes_ahead(weight: Tensor, tile: LinearTile, num_tiles: int) -> int:
    """Return how many bytes of each weight row to prefetch: a multiple of 16, 0 if rows are not aligned to that."""
    row_bytes = weight.shape[-1] * weight.itemsize
    if row_bytes % 16 or weight.data_ptr() % 16:
        return 0
    programs = min(num_tiles * tile.split_k, 2 * num_multiprocessors(weight.device))
    return min(row_bytes, _FETCH_AHEAD // (programs * tile.block_n)) // 16 * 16
