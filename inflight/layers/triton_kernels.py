"""The decoder's arithmetic on a GPU: Triton around cuBLAS, and Triton alone where a step does not have many tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.early import can_start_early
from inflight.errors import ConfigError
from inflight.layers.kernels import Linear, Residual
from inflight.layers.torch_kernels import check_activation, check_bias, check_weight
from inflight.layers.triton.elementwise import add_normed, gate, rms_norm, rows
from inflight.layers.triton.medium_linear import medium_linear
from inflight.layers.triton.next_norm import NextNorm
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import MAX_TOKENS, pays_medium, pays_small
from inflight.layers.triton.workspace import Workspace


class TritonLinear:
    """A linear layer over a row-major weight [out_features, in_features] in the compute dtype."""

    def __init__(
        self, kernels: TritonKernels, in_features: int, out_features: int, bias: bool, device: torch.device
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._kernels = kernels
        dtype = kernels.compute_dtype
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None

    def load(self, weight: Tensor, first: int = 0) -> None:
        check_weight(self, weight, first)
        self.weight[first : first + len(weight)].copy_(weight)

    def load_bias(self, bias: Tensor, first: int = 0) -> None:
        check_bias(self, self.bias is not None, bias, first)
        assert self.bias is not None
        self.bias[first : first + len(bias)].copy_(bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self._kernels.rows(self.weight, ids)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.norm_linear(Residual(x, None), 0.0, self)


class TritonKernels:
    """Implements `Kernels`. All calls must come from one stream: they share a workspace."""

    def __init__(
        self,
        compute_dtype: torch.dtype,
        device: torch.device | str,
        few_tokens: int = MAX_TOKENS,
    ) -> None:
        """`few_tokens`: up to here fused kernels are used where they pay; 0: never."""
        self.compute_dtype = compute_dtype
        self._device = torch.device(device)
        self._few_tokens = few_tokens
        self._early = can_start_early(self._device)
        # Measured with a Hopper's copy engine only: older chips keep the vendor's product.
        self._medium = self._early or self._device.type != "cuda"
        self._workspace = Workspace(self._device)

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, bias: bool) -> Linear:  # noqa: ARG002
        return TritonLinear(self, in_features, out_features, bias, self._device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, self._early)

    def norm_linear(self, residual: Residual, eps: float, linear: Linear) -> Tensor:
        layer = _ours(linear)
        if self._is_fused(residual.x, layer):
            return self._fused(residual, eps, layer)
        return F.linear(self._normed(residual, eps), layer.weight, layer.bias)

    def norm_gate_up(self, residual: Residual, eps: float, linear: Linear, activation: str) -> Tensor:
        check_activation(activation)
        layer = _ours(linear)
        if self._is_fused(residual.x, layer, gated=True):
            return self._fused(residual, eps, layer, activation=activation)
        return gate(self.norm_linear(residual, eps, layer), activation, self._early)

    def linear_add(
        self,
        x: Tensor,
        linear: Linear,
        residual: Residual,
        norm: Tensor | None,
        eps: float,
        next_norm: Tensor | None,
    ) -> Residual:
        """In place: the stream becomes the sum."""
        layer, stream, read = _ours(linear), residual.x, Residual(x, None)
        if norm is not None:
            add_normed(stream, self.norm_linear(read, eps, layer), norm, eps, self._early)
        elif self._is_fused(x, layer):
            return self._fused_add(read, eps, layer, stream, next_norm)
        elif layer.bias is not None:
            stream.add_(F.linear(x, layer.weight, layer.bias))
        else:
            stream.addmm_(x, layer.weight.T)
        return Residual(stream, next_norm)

    def logits(self, x: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
        layer, residual = _ours(linear), Residual(x, norm)
        if self._is_fused(x, layer):
            out = torch.empty(len(x), layer.out_features, dtype=torch.float32, device=x.device)
            return self._fused(residual, eps, layer, out=out)
        x = self._normed(residual, eps)
        if layer.bias is None and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, layer.weight.T, out_dtype=torch.float32)
        return F.linear(x, layer.weight, layer.bias).float()

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """table [N, n], ids [T] -> [T, n]"""
        return rows(table, ids, self._early)

    def _is_fused(self, x: Tensor, layer: TritonLinear, gated: bool = False) -> bool:
        if len(x) > self._few_tokens:
            return False
        return self._is_small(x, layer) or (self._medium and _is_medium(x, layer, gated))

    def _is_small(self, x: Tensor, layer: TritonLinear) -> bool:
        """Whether a step has so few tokens that its time is that of reading the weights."""
        return pays_small(len(x), layer.out_features, layer.in_features, x.element_size(), self._medium)

    def _normed(self, residual: Residual, eps: float) -> Tensor:
        return residual.x if residual.norm is None else self.rms_norm(residual.x, residual.norm, eps)

    def _fused_add(
        self, read: Residual, eps: float, layer: TritonLinear, stream: Tensor, gain: Tensor | None
    ) -> Residual:
        """Half of a norm scales a product, not what is multiplied, and that may be too large for float16."""
        if gain is None or stream.dtype == torch.float16:
            return Residual(self._fused(read, eps, layer, residual=stream, out=stream), gain)
        left = NextNorm(gain)
        self._fused(read, eps, layer, residual=stream, next_norm=left, out=stream)
        return Residual(stream, gain, left.gained, left.squares)

    def _fused(self, read: Residual, eps: float, layer: TritonLinear, **after: Any) -> Tensor:
        """`after`: what the kernels do besides."""
        small = self._is_small(read.x, layer)
        if read.gained is not None:
            x, norm = read.gained, None
        elif small and read.x.dtype != torch.float16:  # see `_fused_add`
            x, norm = read.x, read.norm
        else:
            x, norm = self._normed(read, eps), None
        after |= {"bias": layer.bias, "squares": read.squares, "eps": eps, "early": self._early}
        if small:
            return small_linear(x, layer.weight, self._workspace, norm=norm, **after)
        return medium_linear(x, layer.weight, self._workspace, **after)


def _is_medium(x: Tensor, layer: TritonLinear, gated: bool) -> bool:
    return pays_medium(len(x), layer.out_features, layer.in_features, x.element_size(), gated)


def _ours(linear: Linear) -> TritonLinear:
    if not isinstance(linear, TritonLinear):
        raise ConfigError(f"a {type(linear).__name__} was given: these kernels take linear layers they made")
    return linear
