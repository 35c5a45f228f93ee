"""Operations in plain torch: the reference, and what a device without a kernel of its own for one falls back on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.kernels import check_activation, check_gate


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def activate(x: Tensor, activation: str) -> Tensor:
    check_activation(activation)
    return _ACTIVATIONS[activation](x)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    check_gate(activation)
    first, second = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](first) * second


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)


def add_layer_norm(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(residual.float() + x.float(), weight.shape, weight, bias, eps).to(residual.dtype)
