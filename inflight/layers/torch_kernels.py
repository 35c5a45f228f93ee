"""The decoder's arithmetic in plain torch: any device, any dtype, and the reference for faster ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.composed import ComposedKernels
from inflight.layers.kernels import Linear

ACTIVATIONS = ("silu", "gelu_tanh")


class TorchLinear:
    """A linear layer over a row-major weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._compute_dtype = compute_dtype
        # Widened once here rather than in every call: no less exact than `dtype`.
        stored = torch.promote_types(dtype, compute_dtype)
        self._weight = torch.empty(out_features, in_features, dtype=stored, device=device)
        self._bias = torch.zeros(out_features, dtype=compute_dtype, device=device) if bias else None

    def load(self, weight: Tensor, first: int = 0) -> None:
        check_weight(self, weight, first)
        self._weight[first : first + len(weight)].copy_(weight)

    def load_bias(self, bias: Tensor, first: int = 0) -> None:
        check_bias(self, self._bias is not None, bias, first)
        assert self._bias is not None
        self._bias[first : first + len(bias)].copy_(bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids].to(self._compute_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.to(self._compute_dtype), self._bias)


class TorchKernels(ComposedKernels):
    """Implements `Kernels`."""

    def __init__(
        self, compute_dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.compute_dtype = compute_dtype
        self._device = torch.device(device)

    def linear(self, in_features: int, out_features: int, dtype: torch.dtype, bias: bool) -> Linear:
        return TorchLinear(in_features, out_features, dtype, bias, self.compute_dtype, self._device)

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
        turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
        return torch.cat((turned, x[..., rotary_dim:]), dim=-1)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        check_activation(activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def check_weight(linear: Linear, weight: Tensor, first: int) -> None:
    """Refuse a weight that does not fit `linear` at output row `first`."""
    fits = weight.dim() == 2 and weight.shape[1] == linear.in_features
    if not fits or not 0 <= first <= first + len(weight) <= linear.out_features:
        raise ConfigError(
            f"a weight of shape {list(weight.shape)} does not fit at output row {first}: "
            f"the layer is [{linear.out_features}, {linear.in_features}]"
        )


def check_bias(linear: Linear, has_bias: bool, bias: Tensor, first: int) -> None:
    """Refuse a bias that does not fit `linear` at output row `first`."""
    if not has_bias:
        raise ConfigError("a bias was given to a linear layer that was made without one")
    if bias.dim() != 1 or not 0 <= first <= first + len(bias) <= linear.out_features:
        raise ConfigError(
            f"a bias of shape {list(bias.shape)} does not fit at output row {first}: "
            f"the layer has {linear.out_features} outputs"
        )


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation is {activation!r}: allowed is {', '.join(ACTIVATIONS)}")
