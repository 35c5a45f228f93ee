"""Norms, activations and embedding lookup: one pass over memory each, with as many threads as 16-byte loads need."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.tuning import ACTIVATE_TILE, ElementTile, NormTile, choose_norm
from inflight.layers.triton_utils.padding import padded_empty
from inflight.layers.triton_utils.pdl import (
    launch_dependents_then_wait,
    launch_options,
    wait_then_launch_dependents,
)

# How kernels name the activations; 0 is none.
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "tanh": 5}
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_GATE_BLOCK = 1024
_ROW_BLOCK = 2048  # of a lookup


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 3:
        y = _gelu(x)
    elif ACTIVATION == 4:
        y = tl.where(x < 0, 0.0, x)  # a NaN stays one
    else:  # all made of the logistic function
        if ACTIVATION == 1:
            inner = x
        elif ACTIVATION == 2:
            inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 * sqrt(2 / pi)
        else:
            inner = 2 * x
        small = tl.exp(-tl.abs(inner))  # never overflows
        if ACTIVATION == 5:
            y = tl.where(x >= 0, 1.0 - small, small - 1.0) / (1.0 + small)
        else:
            y = x * tl.where(inner >= 0, 1.0, small) / (1.0 + small)
    return y


@triton.jit
def _gelu(x):
    """Exact GELU: x times the normal CDF of x, computed as the logistic function of a polynomial.

    This takes half the instructions of a library's erf, which would take longer than the memory accesses. The absolute
    error is below 1e-6, the relative error below 1e-5 where the value is above 1e-3. `exp2` is one instruction.
    """
    square = tl.minimum(x * x, 64.0)  # from |x| = 8 on, the result is x or 0
    odds = 5.362254557050861e-09
    odds = odds * square - 3.8389777318962454e-07
    odds = odds * square + 1.1291007365323274e-05
    odds = odds * square - 1.5696258318000108e-04
    odds = odds * square - 1.0906856053719397e-04
    odds = odds * square + 1.0486705482941118e-01
    odds = odds * square + 2.3021901077937184e00
    return x * _reciprocal(1.0 + tl.exp2(tl.minimum(-x * odds, 126.0)))


@triton.jit
def _reciprocal(x):
    """Return 1 / x for x from 1 to 2^126, in one instruction: a division would also handle other ranges."""
    if _INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _rms_norm_kernel(
    x, weight, residual, out, inner_rows, outer_stride, inner_stride, num_features, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row r of x lies at (r // inner_rows) * outer_stride + (r % inner_rows) * inner_stride."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < num_features
    factor = tl.load(weight + column, mask=mask, other=0.0)
    launch_dependents_then_wait(PDL)
    start = (row // inner_rows).to(tl.int64) * outer_stride + (row % inner_rows).to(tl.int64) * inner_stride
    place = row.to(tl.int64) * num_features + column
    wide = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
    y = wide * tl.rsqrt(tl.sum(wide * wide, 0) / num_features + eps) * factor
    if ADD:
        y += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_kernel(gate_up, out, inner, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * inner + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out + row * inner + column, (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def _activate_kernel(x, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents_then_wait(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < size
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(x + place, activate(wide, ACTIVATION).to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embed_kernel(table, ids, out, num_features, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_then_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_features
    source = table + tl.load(ids + row).to(tl.int64) * num_features
    tl.store(out + row * num_features + column, tl.load(source + column, mask=mask), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, pdl: bool = False) -> Tensor:
    """Normalise the last dimension of x [..., n], which may be a view of something larger."""
    return _normalise(x, weight, eps, None, pdl)


def add_normed(residual: Tensor, x: Tensor, weight: Tensor, eps: float, pdl: bool = False) -> Tensor:
    """residual += rms_norm(x), both [T, n] and contiguous; returns the residual."""
    return _normalise(x, weight, eps, residual, pdl)


def _normalise(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, pdl: bool) -> Tensor:
    num_features = x.shape[-1]
    view = _three_dims(x)
    outer_rows, inner_rows, _ = view.shape
    num_rows = outer_rows * inner_rows
    out = residual
    if out is None:
        out = padded_empty(x.numel() // num_features, num_features, x.dtype, x.device).view(x.shape)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(num_features)
    _rms_norm_kernel[(num_rows,)](
        view, weight, x if residual is None else residual, out, inner_rows, view.stride(0), view.stride(1),
        num_features, eps, ADD=residual is not None, BLOCK=block, PDL=pdl, num_warps=_warps(block),
        **launch_options(pdl),
    )  # fmt: skip
    return out


def gate(gate_up: Tensor, activation: str, pdl: bool = False) -> Tensor:
    """[T, 2n] -> [T, n]: activation(first half) * second half."""
    num_rows, double = gate_up.shape
    inner = double // 2
    out = padded_empty(num_rows, inner, gate_up.dtype, gate_up.device)
    if num_rows == 0:
        return out
    _gate_kernel[(num_rows, triton.cdiv(inner, _GATE_BLOCK))](
        gate_up.contiguous(), out, inner, ACTIVATION=ACTIVATIONS[activation], BLOCK=_GATE_BLOCK, PDL=pdl,
        num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


def activate_in_place(
    x: Tensor, activation: str, pdl: bool = False, tile: ElementTile = ACTIVATE_TILE
) -> Tensor:
    """Overwrite x, which is contiguous, with activation(x)."""
    size = x.numel()
    if size > 0:
        _activate_kernel[(triton.cdiv(size, tile.block),)](
            x, size, ACTIVATION=ACTIVATIONS[activation], BLOCK=tile.block, PDL=pdl, num_warps=tile.num_warps,
            **launch_options(pdl),
        )  # fmt: skip
    return x


def embed(table: Tensor, ids: Tensor, pdl: bool = False) -> Tensor:
    """table [N, n], ids [T], 0 <= id < N -> [T, n]"""
    num_features = table.shape[1]
    out = torch.empty(len(ids), num_features, dtype=table.dtype, device=table.device)
    if len(ids) == 0:
        return out
    block = min(_ROW_BLOCK, triton.next_power_of_2(num_features))
    _embed_kernel[(len(ids), triton.cdiv(num_features, block))](
        table, ids, out, num_features, BLOCK=block, PDL=pdl, num_warps=_warps(block), **launch_options(pdl),
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    """Return a number of warps with one 16-byte load (8 elements of 2 bytes) per thread, at most 16."""
    return max(1, min(16, block // 256))


def _three_dims(x: Tensor) -> Tensor:
    """Return [..., n] as [outer, inner, n] with contiguous features, a view if possible. For [T, n], inner is 1."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() > 3:
        x = x.flatten(0, -3)
    return x.reshape(-1, 1, x.shape[-1]) if x.dim() < 3 else x


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
    mask = (row < num_tokens)[:, None] & real[None, :]
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(wide, 1) / num_features
    # Not from the mean of squares: that and the mean's square would be two large numbers that differ little.
    wide = tl.where(real[None, :], wide - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / num_features + eps)
    y = wide * scale[:, None] * factor[None, :]
    if bias is not None:
        y += shift[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


def layer_norm(
    x: Tensor,  # [T, n]
    weight: Tensor,  # [n] float32
    bias: Tensor | None,
    eps: float,
    pdl: bool = False,
    tile: NormTile | None = None,
) -> Tensor:
    return _layer_norm(None, x, weight, bias, eps, pdl, tile)


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
    return _layer_norm(residual.contiguous(), x, weight, bias, eps, pdl, tile)


def _layer_norm(
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
        residual, x.contiguous(), weight, bias, out, num_tokens, num_features, eps, ROWS=tile.rows,
        BLOCK=triton.next_power_of_2(num_features), PDL=pdl, num_warps=tile.num_warps, **launch_options(pdl),
    )  # fmt: skip
    return out
