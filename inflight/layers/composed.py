"""The decoder's operations put together from smaller ones, for devices where nothing is gained by fusing them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from inflight.layers.kernels import Linear, Residual


class ComposedKernels(ABC):
    """All of `Kernels` but what its parts are made of."""

    compute_dtype: torch.dtype

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension, whatever the leading ones; statistics in float32."""

    @abstractmethod
    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2n] -> [T, n]: activation(first half) * second half. "silu" or "gelu_tanh"."""

    @abstractmethod
    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x. May overwrite the residual."""

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        return table[ids].to(self.compute_dtype)

    def norm_linear(self, residual: Residual, eps: float, linear: Linear) -> Tensor:
        x, norm = residual.x, residual.norm
        return linear(x if norm is None else self.rms_norm(x, norm, eps))

    def norm_gate_up(self, residual: Residual, eps: float, linear: Linear, activation: str) -> Tensor:
        return self.gate(self.norm_linear(residual, eps, linear), activation)

    def linear_add(
        self,
        x: Tensor,
        linear: Linear,
        residual: Residual,
        norm: Tensor | None,
        eps: float,
        next_norm: Tensor | None,
    ) -> Residual:
        y = linear(x)
        return Residual(self.add(residual.x, y if norm is None else self.rms_norm(y, norm, eps)), next_norm)

    def logits(self, x: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
        return linear(self.rms_norm(x, norm, eps)).float()
