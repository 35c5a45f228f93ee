"""A linear layer whose operations are put together from smaller ones, for devices where nothing is gained by fusing."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from inflight.layers.kernels import Kernels, Reduce, Residual
from inflight.layers.torch_ops import activate


class ComposedLinear(ABC):
    """All of `Linear` but storage: loading, lookup and the product itself."""

    def __init__(self, kernels: Kernels, in_features: int, out_features: int, reduce: Reduce | None) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._kernels = kernels
        self._reduce = reduce

    @abstractmethod
    def load(self, weight: Tensor, first_row: int = 0, first_column: int = 0) -> None: ...

    @abstractmethod
    def load_bias(self, bias: Tensor, first_row: int = 0) -> None: ...

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor: ...

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def activated(self, x: Tensor, activation: str) -> Tensor:
        return activate(self(x), activation)

    def normed(self, residual: Residual, eps: float) -> Tensor:
        x, norm = residual.x, residual.norm
        return self(x if norm is None else self._kernels.rms_norm(x, norm, eps))

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        return self._kernels.gate(self.normed(residual, eps), activation)

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        y = self(x)
        if self._reduce is not None:
            y = self._reduce.sum(y)
        if norm is not None:
            y = self._kernels.rms_norm(y, norm, eps)
        return Residual(self._kernels.add(residual.x, y), next_norm)

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self(self._kernels.rms_norm(x, norm, eps)).float()
