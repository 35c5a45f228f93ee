"""Inputs in fp8 or int8, for weights whose codes are multiplied as they are.

`quantize_rows` quantizes whole inputs, with one scale for each token or for each group of features of a token, and
applies the norm before. `quantized` does it in a kernel, for the features at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton_utils.padding import padded_empty
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait, launch_options

_FP8_MAX = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-10)  # the smallest maximum of a token
_LEAST_BITS = tl.constexpr(0x2EDBE6FF)  # the same as bits
_ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23


@triton.jit
def _scales(wide, AXIS: tl.constexpr, dtype: tl.constexpr):
    """Return the scales with which the largest numbers along an axis become the largest codes."""
    # int8 has no NaN: compared as bits, that is the largest number, and makes a scale NaN.
    if dtype == tl.int8:
        bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)
        return tl.maximum(bits, _LEAST_BITS).to(tl.float32, bitcast=True) / 127.0
    else:
        return tl.maximum(tl.max(tl.abs(wide), AXIS), _LEAST) / _FP8_MAX


@triton.jit
def _codes(scaled, dtype: tl.constexpr):
    """Return the nearest codes. An integer that is added to 1.5 * 2^23 is in the low bits of the sum."""
    if dtype == tl.int8:
        return (scaled + _ROUNDING).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return scaled.to(dtype)


@triton.jit
def quantized(features, AXIS: tl.constexpr, dtype: tl.constexpr):
    """Return features, which are along an axis, as codes with one scale for each token, and the scales."""
    wide = features.to(tl.float32)
    scale = _scales(wide, AXIS, dtype)
    return _codes(wide * tl.expand_dims(1.0 / scale, AXIS), dtype), scale


@dataclass(frozen=True, slots=True)
class QuantizedInputs:
    """Inputs as `quantize_rows` returns them."""

    codes: Tensor  # [T, K] fp8 or int8
    scales: Tensor  # [T, groups] float32
    dtype: torch.dtype  # of the inputs, and of products


@triton.jit
def _quantize_rows_kernel(
    x, norm, codes, scales, num_features, eps, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < num_features
    weight = norm
    if norm is not None:
        weight = tl.load(norm + column, mask=mask, other=0.0)
    launch_dependents_then_wait(PDL)
    values = tl.load(x + row * num_features + column, mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        values *= tl.rsqrt(tl.sum(values * values, 0) / num_features + eps) * weight
    dtype: tl.constexpr = codes.dtype.element_ty
    if GROUP == 0:
        scale = _scales(values, 0, dtype)
        tl.store(scales + row, scale)
        scaled = values / scale
    else:
        groups = tl.reshape(values, [BLOCK // GROUP, GROUP])
        scale = _scales(groups, 1, dtype)
        group = tl.arange(0, BLOCK // GROUP)
        num_groups = tl.cdiv(num_features, GROUP)
        tl.store(scales + row * num_groups + group, scale, mask=group < num_groups)
        scaled = tl.reshape(groups / scale[:, None], [BLOCK])
    tl.store(codes + row * num_features + column, _codes(scaled, dtype), mask=mask)


def quantize_rows(
    x: Tensor,  # [T, K]
    norm: Tensor | None = None,  # [K] float32
    eps: float = 0.0,
    group: int = 0,
    pdl: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizedInputs:
    """Quantize rms_norm(x), or x without a norm, to fp8 or int8."""
    num_tokens, num_features = x.shape
    codes = padded_empty(num_tokens, num_features, dtype, x.device)
    num_groups = -(-num_features // group) if group else 1
    scales = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    if num_tokens:
        block = triton.next_power_of_2(num_features)
        _quantize_rows_kernel[(num_tokens,)](
            x,
            norm,
            codes,
            scales,
            num_features,
            eps,
            GROUP=group,
            BLOCK=block,
            PDL=pdl,
            num_warps=max(1, min(16, block // 512)),
            **launch_options(pdl),
        )
    return QuantizedInputs(codes, scales, x.dtype)
