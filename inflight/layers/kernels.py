"""The seam between the decoder and the arithmetic of one device.

The decoder is written once, in terms of these operations, each as large as some device can do in one go.
`TorchKernels` runs anywhere and is the reference, `NativeKernels` is the compiled CPU path (both put them together
from smaller ones: `composed.py`), `TritonKernels` the GPU path.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream, and the norm through which the next layer reads it.

    Whoever writes the stream may leave part of that norm beside it; who reads it may do without.
    """

    x: Tensor  # [T, hidden]
    norm: Tensor | None  # [hidden] float32; None: it is read as it is
    gained: Tensor | None = None  # x * norm
    squares: Tensor | None = None  # [parts, T]: sums over parts of the features


class Kernels(Protocol):
    """Activations are 2-D, [tokens, features], contiguous, in `compute_dtype`. Norm weights are float32."""

    compute_dtype: torch.dtype

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, bias: bool) -> Linear:
        """An empty linear layer whose weights are stored as `dtype`, or as something no less exact."""

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows [len(ids), n] of an embedding table [N, n], in the compute dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension, whatever the leading ones; statistics in float32."""

    def norm_linear(self, residual: Residual, eps: float, linear: Linear) -> Tensor:
        """linear(rms_norm(x)), or linear(x) without a norm."""

    def norm_gate_up(self, residual: Residual, eps: float, linear: Linear, activation: str) -> Tensor:
        """[T, hidden] -> [T, inner]: activation(first half) * second half of norm_linear. "silu" or "gelu_tanh"."""

    def linear_add(
        self,
        x: Tensor,
        linear: Linear,
        residual: Residual,
        norm: Tensor | None,
        eps: float,
        next_norm: Tensor | None,
    ) -> Residual:
        """The stream plus rms_norm(linear(x)), or plus linear(x) without a norm, to be read through `next_norm`.

        May overwrite the stream.
        """

    def logits(self, x: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
        """norm_linear in float32."""
