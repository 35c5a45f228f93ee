"""The decoder's arithmetic on a GPU: Triton around cuBLAS, and Triton alone where a step does not have many tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.early import can_start_early
from inflight.errors import ConfigError
from inflight.layers.kernels import Linear
from inflight.layers.torch_kernels import check_activation, check_bias, check_weight
from inflight.layers.triton.elementwise import add_normed, gate, rms_norm, rows
from inflight.layers.triton.medium_linear import medium_linear
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
        return self._kernels.norm_linear(x, None, 0.0, self)


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

    def norm_linear(self, x: Tensor, norm: Tensor | None, eps: float, linear: Linear) -> Tensor:
        layer = _ours(linear)
        if self._is_fused(x, layer):
            return self._fused(x, norm, eps, layer)
        return F.linear(self._normed(x, norm, eps), layer.weight, layer.bias)

    def norm_gate_up(
        self, x: Tensor, norm: Tensor | None, eps: float, linear: Linear, activation: str
    ) -> Tensor:
        check_activation(activation)
        layer = _ours(linear)
        if self._is_fused(x, layer, gated=True):
            return self._fused(x, norm, eps, layer, activation=activation)
        return gate(self.norm_linear(x, norm, eps, layer), activation, self._early)

    def linear_add(
        self, x: Tensor, linear: Linear, residual: Tensor, norm: Tensor | None, eps: float
    ) -> Tensor:
        """In place: the residual becomes the sum."""
        layer = _ours(linear)
        if norm is not None:
            return add_normed(residual, self.norm_linear(x, None, eps, layer), norm, eps, self._early)
        if self._is_fused(x, layer):
            return self._fused(x, None, eps, layer, residual=residual, out=residual)
        if layer.bias is not None:
            return residual.add_(F.linear(x, layer.weight, layer.bias))
        return residual.addmm_(x, layer.weight.T)

    def logits(self, x: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
        layer = _ours(linear)
        if self._is_fused(x, layer):
            out = torch.empty(len(x), layer.out_features, dtype=torch.float32, device=x.device)
            return self._fused(x, norm, eps, layer, out=out)
        x = self._normed(x, norm, eps)
        if layer.bias is None and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, layer.weight.T, out_dtype=torch.float32)
        return F.linear(x, layer.weight, layer.bias).float()

    def rows(self, table: Tensor, ids: Tensor) -> Tensor:
        """table [N, n], ids [T] -> [T, n]"""
        return rows(table, ids, self._early)

    def _is_fused(self, x: Tensor, layer: TritonLinear, gated: bool = False) -> bool:
        if len(x) > self._few_tokens:
            return False
        return _is_small(x, layer) or (self._medium and _is_medium(x, layer, gated))

    def _normed(self, x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
        return x if norm is None else self.rms_norm(x, norm, eps)

    def _fused(
        self,
        x: Tensor,
        norm: Tensor | None,
        eps: float,
        layer: TritonLinear,
        *,
        activation: str | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        after: dict[str, Any] = {
            "bias": layer.bias,
            "activation": activation,
            "residual": residual,
            "out": out,
            "early": self._early,
        }
        if not _is_small(x, layer):
            return medium_linear(self._normed(x, norm, eps), layer.weight, self._workspace, **after)
        if x.dtype == torch.float16:
            # The fused norm scales its result, not its input, which may be too large for float16.
            x, norm = self._normed(x, norm, eps), None
        return small_linear(x, layer.weight, self._workspace, norm=norm, eps=eps, **after)


def _is_small(x: Tensor, layer: TritonLinear) -> bool:
    """Whether a step has so few tokens that its time is that of reading the weights."""
    return pays_small(len(x), layer.out_features, layer.in_features, x.element_size())


def _is_medium(x: Tensor, layer: TritonLinear, gated: bool) -> bool:
    return pays_medium(len(x), layer.out_features, layer.in_features, x.element_size(), gated)


def _ours(linear: Linear) -> TritonLinear:
    if not isinstance(linear, TritonLinear):
        raise ConfigError(f"a {type(linear).__name__} was given: these kernels take linear layers they made")
    return linear
