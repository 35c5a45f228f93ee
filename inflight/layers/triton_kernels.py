"""Layers on a GPU: Triton kernels around cuBLAS, and Triton alone for steps with few tokens."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.formats import Scheme, Weight
from inflight.layers.kernels import (
    ExpertRouting,
    Experts,
    Linear,
    Reduce,
    Residual,
    check_activation,
    check_gate,
    copy_bias,
    copy_weight,
)
from inflight.layers.triton.elementwise import (
    activate_in_place,
    add_layer_norm,
    add_normed,
    embed,
    gate,
    layer_norm,
    rms_norm,
)
from inflight.layers.triton.linear_parts import NextNorm, SplitKWorkspace
from inflight.layers.triton.medium_linear import medium_linear
from inflight.layers.triton.recurrent import TritonRecurrent
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import MAX_TOKENS, pays_medium, pays_small
from inflight.layers.triton_experts import TritonExperts
from inflight.triton_utils.pdl import supports_pdl


@runtime_checkable
class AddingReduce(Reduce, Protocol):
    """A reduction that can add to the residual, and do half of the next norm, in the same pass."""

    def add_sum(
        self, hidden: Tensor, x: Tensor, norm: Tensor | None, eps: float, next_norm: NextNorm | None
    ) -> bool:
        """Add the sum of all x, or its rms_norm, to `hidden`, and fill in `next_norm`. Returns False, having done
        nothing, if it cannot."""


class TritonKernels:
    """Implements `Kernels`. All calls must come from one CUDA stream: the linear layers share a workspace."""

    def __init__(
        self,
        compute_dtype: torch.dtype,
        device: torch.device | str,
        few_tokens: int = MAX_TOKENS,
    ) -> None:
        """Fused kernels are used for up to `few_tokens` tokens where they pay; 0: never."""
        self.compute_dtype = compute_dtype
        self.device = torch.device(device)
        self.few_tokens = few_tokens
        self.pdl = supports_pdl(self.device)
        # Only measured with Hopper's copy engine: older chips use cuBLAS.
        self.medium = self.pdl or self.device.type != "cuda"
        self.workspace = SplitKWorkspace(self.device)
        self.recurrent = TritonRecurrent(self.pdl)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """In place."""
        return x.div_(cap).tanh_().mul_(cap)

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,  # noqa: ARG002
        bias: bool,
        reduce: Reduce | None = None,
        scheme: Scheme | None = None,  # noqa: ARG002
    ) -> Linear:
        return TritonLinear(self, in_features, out_features, bias, reduce)

    def experts(
        self,
        hidden: int,
        inner: int,
        routing: ExpertRouting,
        dtype: torch.dtype,  # noqa: ARG002
        activation: str,
        bias: bool = False,
        limit: float = 0.0,
        reduce: Reduce | None = None,
        held: range | None = None,
        scheme: Scheme | None = None,  # noqa: ARG002
    ) -> Experts:
        router = TritonLinear(self, hidden, routing.num_experts, routing.has_bias)
        return TritonExperts(self, router, inner, routing, activation, bias, limit, reduce, held)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return embed(table, ids, self.pdl)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, self.pdl)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        check_gate(activation)
        return gate(gate_up, activation, self.pdl)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return layer_norm(x, weight, bias, eps, self.pdl)

    def add_layer_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        return add_layer_norm(residual, x, weight, bias, eps, self.pdl)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """In place."""
        return residual.add_(x)


class TritonLinear:
    """A linear layer over a row-major weight [out_features, in_features] in the compute dtype.

    Three kernels multiply it: `small_linear` for so few tokens that the time is that of reading the weights,
    `medium_linear` for some more, and cuBLAS with separate kernels around it.
    """

    def __init__(
        self,
        kernels: TritonKernels,
        in_features: int,
        out_features: int,
        bias: bool,
        reduce: Reduce | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._kernels = kernels
        self._reduce = reduce
        self._adding = reduce if isinstance(reduce, AddingReduce) else None
        dtype, device = kernels.compute_dtype, kernels.device
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None

    # ---- loading ----

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        copy_weight(self, self.weight, weight, first_row, first_column)

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        copy_bias(self, self.bias, bias, first_row)

    # ---- the operations of models ----

    def embed(self, ids: Tensor) -> Tensor:
        return self._kernels.embed(self.weight, ids)

    def __call__(self, x: Tensor) -> Tensor:
        return self.normed(Residual(x, None), 0.0)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        check_activation(activation)
        # A fused kernel with its own product takes as long as cuBLAS and a pass over its result.
        return activate_in_place(self(x), activation, self._kernels.pdl)

    def normed(self, residual: Residual, eps: float) -> Tensor:
        if self._is_fused(residual.x):
            return self._fused(residual, eps)
        return F.linear(self._norm(residual, eps), self.weight, self.bias)

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        check_gate(activation)
        if self._is_fused(residual.x, gated=True):
            return self._fused(residual, eps, activation=activation)
        return self._kernels.gate(self.normed(residual, eps), activation)

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        """In place: the residual becomes the sum."""
        hidden = residual.x
        if norm is None and self._reduce is None:
            return self._add_product(hidden, x, eps, next_norm)
        y = self(x)
        if self._adding is not None:
            left = self.left_for(next_norm, x, hidden)
            if self._adding.add_sum(hidden, y, norm, eps, left):
                return _read_through(hidden, next_norm, left)
        if self._reduce is not None:
            y = self._reduce.sum(y)
        if norm is None:
            self._kernels.add(hidden, y)
        else:
            add_normed(hidden, y, norm, eps, self._kernels.pdl)
        return Residual(hidden, next_norm)

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self.wide(Residual(x, norm), eps)

    def wide(self, residual: Residual, eps: float) -> Tensor:
        """Return the same as `normed`, in float32."""
        x = residual.x
        if self._is_fused(x):
            out = torch.empty(len(x), self.out_features, dtype=torch.float32, device=x.device)
            return self._fused(residual, eps, out=out)
        x = self._norm(residual, eps)
        if self.bias is None and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return F.linear(x, self.weight, self.bias).float()

    # ---- choosing the kernel ----

    def _is_fused(self, x: Tensor, gated: bool = False) -> bool:
        if len(x) > self._kernels.few_tokens:
            return False
        return self._is_small(x) or (self._kernels.medium and self._is_medium(x, gated))

    def _is_small(self, x: Tensor) -> bool:
        medium = self._kernels.medium
        return pays_small(len(x), self.out_features, self.in_features, x.element_size(), medium)

    def _is_medium(self, x: Tensor, gated: bool) -> bool:
        return pays_medium(len(x), self.out_features, self.in_features, x.element_size(), gated)

    def _norm(self, residual: Residual, eps: float) -> Tensor:
        return residual.x if residual.norm is None else self._kernels.rms_norm(residual.x, residual.norm, eps)

    def _add_product(self, hidden: Tensor, x: Tensor, eps: float, next_norm: Tensor | None) -> Residual:
        """Do product and sum in one kernel, and half of the next norm with them where that is safe."""
        if not self._is_fused(x):
            if self.bias is not None:
                hidden.add_(F.linear(x, self.weight, self.bias))
            else:
                hidden.addmm_(x, self.weight.T)
            return Residual(hidden, next_norm)
        left = self.left_for(next_norm, x, hidden)
        self._fused(Residual(x, None), eps, residual=hidden, next_norm=left, out=hidden)
        return _read_through(hidden, next_norm, left)

    def left_for(self, next_norm: Tensor | None, x: Tensor, hidden: Tensor) -> NextNorm | None:
        """Return what to fill in for the next norm, if half of it is done here: in small steps, unless hidden states
        are float16. This half scales them up before the other half scales them down, which could overflow."""
        if next_norm is None or hidden.dtype == torch.float16 or not self._is_fused(x):
            return None
        return NextNorm(next_norm)

    def _fused(self, read: Residual, eps: float, **after: Any) -> Tensor:
        """Run the small or the medium kernel. `after` is passed on to it."""
        small, kernels = self._is_small(read.x), self._kernels
        if read.scaled is not None:
            x, norm = read.scaled, None
        elif small and read.x.dtype != torch.float16:  # see `left_for`
            x, norm = read.x, read.norm
        else:
            x, norm = self._norm(read, eps), None
        after |= {"bias": self.bias, "squares": read.squares, "eps": eps, "pdl": kernels.pdl}
        if small:
            return small_linear(x, self.weight, kernels.workspace, norm=norm, **after)
        return medium_linear(x, self.weight, kernels.workspace, **after)


def _read_through(hidden: Tensor, norm: Tensor | None, left: NextNorm | None) -> Residual:
    if left is None:
        return Residual(hidden, norm)
    return Residual(hidden, norm, left.scaled, left.squares)
