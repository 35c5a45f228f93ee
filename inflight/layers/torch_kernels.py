"""Layers in plain torch: the reference for every other implementation, and the fallback of devices without kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.kernels import (
    Kernels,
    Linear,
    Reduce,
    Residual,
    check_activation,
    check_bias,
    check_gate,
    check_weight,
)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class ComposedLinear(ABC):
    """`Linear` built from single operations, for devices where fusing gains nothing.

    Subclasses add the storage: loading, embedding lookup and the product itself.
    """

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
        check_activation(activation)
        return _ACTIVATIONS[activation](self(x))

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


class TorchLinear(ComposedLinear):
    """A linear layer over a row-major weight."""

    def __init__(
        self,
        kernels: Kernels,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        super().__init__(kernels, in_features, out_features, reduce)
        self._compute_dtype = kernels.compute_dtype
        # Widen once here rather than on every call; this is never less precise than `dtype`.
        stored = torch.promote_types(dtype, self._compute_dtype)
        self._weight = torch.empty(out_features, in_features, dtype=stored, device=device)
        self._bias = torch.zeros(out_features, dtype=self._compute_dtype, device=device) if bias else None

    def load(self, weight: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        check_weight(self, weight, first_row, first_column)
        num_rows, num_columns = weight.shape
        self._weight[first_row : first_row + num_rows, first_column : first_column + num_columns] = weight

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        check_bias(self, self._bias is not None, bias, first_row)
        assert self._bias is not None
        self._bias[first_row : first_row + len(bias)].copy_(bias)

    def embed(self, ids: Tensor) -> Tensor:
        return self._weight[ids].to(self._compute_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.to(self._compute_dtype), self._bias)


class TorchKernels:
    """Implements `Kernels`."""

    def __init__(
        self, compute_dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.compute_dtype = compute_dtype
        self._device = torch.device(device)

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None = None,
    ) -> Linear:
        return TorchLinear(self, in_features, out_features, dtype, bias, reduce, self._device)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return table[ids].to(self.compute_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + x

    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        rotary_dim = cos_sin.shape[-1]
        half = rotary_dim // 2
        angles = cos_sin[positions].float().unsqueeze(1)  # [T, 1, rotary_dim]
        cos, sin = angles[..., :half], angles[..., half:]
        left, right = x[..., :half].float(), x[..., half:rotary_dim].float()
        rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        check_gate(activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate) * up

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)

    def add_layer_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        total = residual.float() + x.float()
        return F.layer_norm(total, weight.shape, weight, bias, eps).to(residual.dtype)
