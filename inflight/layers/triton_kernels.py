"""Layers on a GPU: Triton kernels around cuBLAS, and Triton alone for steps with few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.formats.schemes import Scheme, Weight
from inflight.layers.kernels import (
    GATES,
    Experts,
    ExpertsShape,
    FusableLayer,
    Linear,
    Reduce,
    Residual,
    check_activation,
    check_gate,
    check_weight,
    copy_bias,
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
from inflight.layers.triton.held import HeldWeights, Size, allocate
from inflight.layers.triton.linear_parts import NextNorm, SplitKWorkspace
from inflight.layers.triton.medium_linear import medium_linear
from inflight.layers.triton.quantized_inputs import QuantizedInputs, quantize_rows
from inflight.layers.triton.recurrent import TritonRecurrent
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import MAX_TOKENS
from inflight.layers.triton_experts import TritonExperts
from inflight.layers.triton_utils.pdl import supports_pdl


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
        self, compute_dtype: torch.dtype, device: torch.device | str, few_tokens: int = MAX_TOKENS
    ) -> None:
        """Fused kernels are used for up to `few_tokens` tokens where they pay; 0: never."""
        self.compute_dtype = compute_dtype
        self.device = torch.device(device)
        self.few_tokens = few_tokens
        self.pdl = supports_pdl(self.device)
        # Only measured with Hopper's copy engine: older chips use cuBLAS.
        self.medium = self.pdl or self.device.type != "cuda"
        self.fp8_products = has_fp8_products(self.device)
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
        scheme: Scheme | None = None,
    ) -> Linear:
        return TritonLinear(self, in_features, out_features, bias, reduce, scheme)

    def experts(self, shape: ExpertsShape, reduce: Reduce | None = None) -> Experts:
        router = TritonLinear(self, shape.hidden, shape.routing.num_experts, shape.routing.has_bias)
        return TritonExperts(self, router, shape, reduce)

    def allocate(
        self, size: Size, scheme: Scheme | None, experts: bool = False, bias: Tensor | None = None
    ) -> HeldWeights:
        """Return memory for the weights of a linear layer, or of one matrix of each expert."""
        return allocate(scheme, size, self.compute_dtype, self.device, self.fp8_products, experts, bias)

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

    def fuse(self, layers: Sequence[FusableLayer], attention: Any) -> None:  # noqa: ARG002
        return None  # a captured graph has no host work between layers


class TritonLinear:
    """A linear layer over plain or quantized weights: see `triton/held.py`.

    Three kernels multiply them: `small_linear` for so few tokens that the time is that of reading the weights,
    `medium_linear` for some more, and cuBLAS with separate kernels around it. Weights that have to be converted are
    dequantized before cuBLAS, which takes little beside the product. Inputs may be quantized: in the kernel for few
    tokens, otherwise where the norm is read.
    """

    def __init__(
        self,
        kernels: TritonKernels,
        in_features: int,
        out_features: int,
        bias: bool,
        reduce: Reduce | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._kernels = kernels
        self._reduce = reduce
        self._adding = reduce if isinstance(reduce, AddingReduce) else None
        self.weights = kernels.allocate((1, out_features, in_features), scheme)
        dtype, device = kernels.compute_dtype, kernels.device
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None

    # ---- loading ----

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_weight(self, weight, first_row, first_column)
        self.weights.load(0, slice(first_row, first_row + len(weight)), weight, first_column)

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        copy_bias(self, self.bias, bias, first_row)

    # ---- the operations of models ----

    def embed(self, ids: Tensor) -> Tensor:
        return self.weights.embed(ids, self._kernels.compute_dtype, self._kernels.pdl)

    def __call__(self, x: Tensor) -> Tensor:
        return self.normed(Residual(x, None), 0.0)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        check_activation(activation)
        # A fused kernel with its own product takes as long as cuBLAS and a pass over its result.
        return activate_in_place(self(x), activation, self._kernels.pdl)

    def normed(self, residual: Residual, eps: float) -> Tensor:
        if self._is_fused(residual.x):
            return self._fused(residual, eps)
        return self._large(residual, eps)

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        assert activation in GATES, activation  # checked when the layer was made
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
            buffers = self.next_norm_buffers(next_norm, x, hidden)
            if self._adding.add_sum(hidden, y, norm, eps, buffers):
                return _read_through(hidden, next_norm, buffers)
        if self._reduce is not None:
            y = self._reduce.sum(y)
        if norm is None:
            self._kernels.add(hidden, y)
        else:
            add_normed(hidden, y, norm, eps, self._kernels.pdl)
        return Residual(hidden, next_norm)

    def logits(self, x: Tensor, norm: Tensor, eps: float, count: int | None = None) -> Tensor:
        return self.wide(Residual(x, norm), eps)[:, :count]

    def wide(self, residual: Residual, eps: float) -> Tensor:
        """Return the same as `normed`, in float32."""
        x = residual.x
        if self._is_fused(x):
            out = torch.empty(len(x), self.out_features, dtype=torch.float32, device=x.device)
            return self._fused(residual, eps, out=out)
        return self._large_wide(residual, eps)

    # ---- many tokens ----

    def _large(self, residual: Residual, eps: float) -> Tensor:
        if self.weights.quantizes_inputs:
            return self._large_quantized(residual, eps)
        weight = self._dense()
        return F.linear(self._norm(residual, eps), weight, self.bias)

    def _large_wide(self, residual: Residual, eps: float) -> Tensor:
        if self.weights.quantizes_inputs:
            return self._large_quantized(residual, eps).float()
        weight = self._dense()
        x = self._norm(residual, eps)
        if self.bias is None and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return F.linear(x, weight, self.bias).float()

    def _add_large(self, hidden: Tensor, x: Tensor) -> None:
        if self.bias is None and not self.weights.quantizes_inputs:
            hidden.addmm_(x, self._dense().T)
        else:
            hidden.add_(self._large(Residual(x, None), 0.0))

    def _large_quantized(self, residual: Residual, eps: float) -> Tensor:
        weights, kernels, inputs = self.weights, self._kernels, self._quantize_inputs(residual, eps)
        aligned = self.in_features % 16 == 0 and self.out_features % 16 == 0
        # cuBLAS would leave sums of int8, which have 32 bits, for another kernel to scale.
        if (
            weights.codes.dtype == torch.int8
            or weights.group
            or not aligned
            or inputs.dtype != torch.bfloat16
            or not residual.x.is_cuda
        ):
            return medium_linear(inputs, weights, kernels.workspace, bias=self.bias, pdl=kernels.pdl)
        assert weights.scales is not None
        return torch._scaled_mm(
            inputs.codes,
            weights.codes[0].T,
            inputs.scales,
            weights.scales[0],
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,  # which would keep too few bits of long sums
        )

    def _dense(self) -> Tensor:
        return self.weights.dense(self._kernels.compute_dtype)

    def _quantize_inputs(self, residual: Residual, eps: float) -> QuantizedInputs:
        group, dtype = self.weights.group, self.weights.codes.dtype
        return quantize_rows(residual.x, residual.norm, eps, group, self._kernels.pdl, dtype)

    # ---- choosing the kernel ----

    def _is_fused(self, x: Tensor, gated: bool = False) -> bool:
        if len(x) > self._kernels.few_tokens:
            return False
        if self._is_small(x):
            return True
        medium = self._kernels.medium or self.weights.quantizes_inputs
        return medium and self.weights.pays_medium(len(x), gated)

    def _is_small(self, x: Tensor) -> bool:
        return self.weights.pays_small(len(x), self._kernels.medium)

    def _norm(self, residual: Residual, eps: float) -> Tensor:
        return residual.x if residual.norm is None else self._kernels.rms_norm(residual.x, residual.norm, eps)

    def _add_product(self, hidden: Tensor, x: Tensor, eps: float, next_norm: Tensor | None) -> Residual:
        """Do product and sum in one kernel, and half of the next norm with them where that is safe."""
        if not self._is_fused(x):
            self._add_large(hidden, x)
            return Residual(hidden, next_norm)
        buffers = self.next_norm_buffers(next_norm, x, hidden)
        self._fused(Residual(x, None), eps, residual=hidden, next_norm=buffers, out=hidden)
        return _read_through(hidden, next_norm, buffers)

    def next_norm_buffers(self, norm: Tensor | None, x: Tensor, hidden: Tensor) -> NextNorm | None:
        """Allocate the buffers for the next layer's norm if this kernel precomputes half of it: in small steps, unless
        hidden states are float16. This half scales them up before the other half scales them down, which could
        overflow. Where a separate kernel quantizes inputs, that kernel does all of the norm."""
        if norm is None or hidden.dtype == torch.float16 or not self._is_fused(x):
            return None
        if self.weights.quantizes_inputs and not self._is_small(x):
            return None
        return NextNorm(norm)

    def _fused(self, read: Residual, eps: float, **after: Any) -> Tensor:
        """Run the small or the medium kernel. `after` is passed on to it."""
        small, kernels = self._is_small(read.x), self._kernels
        after |= {"bias": self.bias, "pdl": kernels.pdl}
        if self.weights.quantizes_inputs and not small:
            return medium_linear(self._quantize_inputs(read, eps), self.weights, kernels.workspace, **after)
        if read.scaled is not None:
            x, norm = read.scaled, None
        elif small and read.x.dtype != torch.float16:  # see `next_norm_buffers`
            x, norm = read.x, read.norm
        else:
            x, norm = self._norm(read, eps), None
        after |= {"squares": read.squares, "eps": eps}
        if small:
            return small_linear(x, self.weights, kernels.workspace, norm=norm, **after)
        return medium_linear(x, self.weights, kernels.workspace, **after)


def _read_through(hidden: Tensor, norm: Tensor | None, next_norm: NextNorm | None) -> Residual:
    if next_norm is None:
        return Residual(hidden, norm)
    return Residual(hidden, norm, next_norm.scaled, next_norm.squares)


def has_fp8_products(device: torch.device) -> bool:
    """Return whether the chip multiplies fp8: Ada, Hopper and later."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
