"""The seam between the decoder and the arithmetic of one device.

The decoder is written once, in terms of these operations. `TorchKernels` runs anywhere and is the
reference; `NativeKernels` is the compiled CPU path.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Linear(Protocol):
    """y = x @ W.T + b, with W held in the layout that suits the device best."""

    in_features: int
    out_features: int

    def load(self, weight: Tensor, first: int = 0) -> None:
        """Copy `weight` [n, in_features] into output rows [first, first + n)."""

    def load_bias(self, bias: Tensor, first: int = 0) -> None:
        """Copy `bias` [n] into output rows [first, first + n)."""

    def rows(self, ids: Tensor) -> Tensor:
        """Weight rows [len(ids), in_features] in the compute dtype: a tied embedding's lookup."""

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in_features] -> [M, out_features]."""


class Kernels(Protocol):
    """Activations are 2-D, [tokens, features], contiguous, in `compute_dtype`."""

    compute_dtype: torch.dtype

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, bias: bool) -> Linear:
        """An empty linear layer whose weights are stored as `dtype`, or as something no less exact."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension, whatever the leading ones; statistics in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). May reuse the memory of either input."""

    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotary embedding of x [T, heads, head_dim]: the first rotary_dim features of each head, in halves
        (feature i turns with feature i + rotary_dim / 2). cos_sin [max_position, rotary_dim] holds cos in its
        first half and sin in its second. May work in place."""

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2n] -> [T, n]: activation(first half) * second half. "silu" or "gelu_tanh"."""
