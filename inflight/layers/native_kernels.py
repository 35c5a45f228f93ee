"""Layers on the compiled CPU library.

Activations are float32 between layers. A product with bfloat16 weights rounds them to bfloat16 if the processor has
instructions for that, and widens the weights if not. A token's result is bit-identical whatever else is in the batch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.cpu_recurrent import CpuRecurrent
from inflight.layers.formats import Scheme, Weight
from inflight.layers.kernels import (
    Experts,
    ExpertsShape,
    Linear,
    LoadedExperts,
    Reduce,
    Residual,
    check_gate,
)
from inflight.layers.native_gguf import BlockLinear, ExpertBlocks, block_scheme
from inflight.layers.native_linears import (
    NarrowLinear,
    NativeLinear,
    PackedMatrices,
    Panels,
    QuantizedPanels,
    dense,
    holds,
    pointer,
)
from inflight.layers.torch_kernels import TorchKernels
from inflight.native.library import (
    GATE_NUMBERS,
    INSTRUCTION_NUMBERS,
    SCORE_NUMBERS,
    ExpertLayer,
    Library,
    PackedMatrix,
    best_method,
    native_library,
)

CPU = torch.device("cpu")


class NativeExperts(LoadedExperts):
    """Implements `Experts` in one call, over weights packed in panels as in linear layers."""

    def __init__(
        self,
        kernels: NativeKernels,
        library: Library,
        shape: ExpertsShape,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        routing, hidden, inner, dtype = shape.routing, shape.hidden, shape.inner, shape.dtype
        # In float32, since rounding could change which experts are chosen.
        self.router: Linear = NativeLinear(
            kernels, library, hidden, routing.num_experts, dtype, routing.has_bias, None, device
        )
        super().__init__(shape, reduce, torch.float32, device)
        self._kernels = kernels
        self._library = library
        self._multiply = library.experts_bf16 if dtype == torch.bfloat16 else library.experts_f32
        count = len(shape.experts)
        self._gate_up = kernels.matrices(count, 2, inner, hidden, dtype, shape.gate_up_scheme)
        self._down = kernels.matrices(count, 1, hidden, inner, dtype, shape.down_scheme)
        self._layer: ExpertLayer | None = None  # of the weights that are loaded

    def _load(self, down: bool, index: int, rows: slice, weight: Weight, first_column: int) -> None:
        (self._down if down else self._gate_up).load(weight, rows.start, first_column, index)
        self._layer = None

    def add_to(
        self,
        residual: Residual,
        eps: float,
        next_norm: Tensor | None,
        live: Tensor | None = None,
        partial: Tensor | None = None,
    ) -> Residual:
        """In place, unless the sum has to be reduced first."""
        hidden = dense(residual.x)
        x = hidden if residual.norm is None else self._kernels.rms_norm(hidden, residual.norm, eps)
        logits = self.router(x)
        adds_at_once = self._reduce is None and partial is None
        if residual.norm is None and adds_at_once:
            x = x.clone()  # it is read while the result is written
        total = hidden if adds_at_once else partial
        y = torch.empty_like(hidden) if total is None else dense(total)
        self._sum(x, logits, live, y, total is not None)
        if not adds_at_once:
            y = self._kernels.add(hidden, y if self._reduce is None else self._reduce.sum(y))
        return Residual(y, next_norm)

    def sum(self, x: Tensor, routed: Tensor, live: Tensor | None = None) -> Tensor:
        x = dense(x)
        y = torch.empty_like(x)
        self._sum(x, self.router(routed), live, y, False)
        return y if self._reduce is None else self._reduce.sum(y)

    def _sum(self, x: Tensor, logits: Tensor, live: Tensor | None, y: Tensor, adds: bool) -> None:
        """Write the weighted sums to y, or add them to it."""
        live = None if live is None else live.to(torch.int32).contiguous()
        self._multiply(
            ctypes.byref(self._ready()), x.data_ptr(), logits.data_ptr(), pointer(live), y.data_ptr(), len(x),
            adds, self._library.threads,
        )  # fmt: skip

    def _ready(self) -> ExpertLayer:
        if self._layer is not None:
            return self._layer
        gate_up, down = self._gate_up.table(), self._down.table()
        shape, routing = self._shape, self._shape.routing
        self._layer = ExpertLayer(
            (PackedMatrix * len(gate_up))(*gate_up),
            (PackedMatrix * len(down))(*down),
            pointer(self._gate_up_bias),
            pointer(self._down_bias),
            pointer(self.correction),
            pointer(self.scales),
            pointer(self.tokens),
            len(gate_up) // len(down),
            shape.hidden,
            shape.inner,
            routing.num_experts,
            shape.experts.start,
            len(shape.experts),
            routing.top_k,
            SCORE_NUMBERS[routing.scores],
            routing.normalise,
            routing.num_groups,
            routing.top_groups,
            GATE_NUMBERS[shape.activation],
            routing.scale,
            shape.limit,
        )
        return self._layer


class NativeKernels:
    """Implements `Kernels`. On the meta device, layers have shapes but no memory."""

    compute_dtype = torch.float32

    def __init__(
        self, library: Library, device: torch.device = CPU, instructions: frozenset[str] | None = None
    ) -> None:
        """Use only these of the processor's instructions; by default all that the library may use."""
        self._library = library
        self._device = device
        self._instructions = (
            library.instructions if instructions is None else library.instructions & instructions
        )
        self.recurrent = CpuRecurrent(library)

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None = None,
        scheme: Scheme | None = None,
    ) -> Linear:
        size, common = (out_features, in_features), (bias, reduce, self._device)
        blocks = block_scheme(scheme, in_features)
        if blocks is not None:
            instruction = self._block_instruction
            return BlockLinear(self, self._library, in_features, out_features, blocks, *common, instruction)
        method = self.method(dtype, scheme)
        if not method:
            return NativeLinear(self, self._library, in_features, out_features, dtype, *common)
        panels = self.panels(*size, dtype, scheme)
        return NarrowLinear(self, self._library, in_features, out_features, *common, panels, method)

    def method(self, dtype: torch.dtype, scheme: Scheme | None) -> int:
        """Return the number of the method that multiplies these weights, or 0 for products in float32."""
        if holds(scheme):
            return best_method(scheme.codes, self._instructions)
        return best_method("bf16", self._instructions) if dtype == torch.bfloat16 else 0

    @property
    def _block_instruction(self) -> int:
        return INSTRUCTION_NUMBERS["vnni"] if "vnni" in self._instructions else 0

    def panels(
        self, out_features: int, in_features: int, dtype: torch.dtype, scheme: Scheme | None, count: int = 1
    ) -> Panels | QuantizedPanels:
        """Return memory for the weights of matrices."""
        size, method = (self._library, out_features, in_features), self.method(dtype, scheme)
        if holds(scheme):
            return QuantizedPanels(*size, scheme, self._device, method, count)
        return Panels(*size, dtype, self._device, method, count)

    def matrices(
        self,
        count: int,
        parts: int,
        part_rows: int,
        in_features: int,
        dtype: torch.dtype,
        scheme: Scheme | None,
    ) -> PackedMatrices:
        """Return memory for matrices of `count` experts, each of which packs some parts row-wise."""
        blocks = block_scheme(scheme, in_features)
        if blocks is not None:
            size = count, parts, part_rows, in_features
            return ExpertBlocks(self._library, *size, blocks, self._device, self._block_instruction)
        return self.panels(parts * part_rows, in_features, dtype, scheme, count)

    def experts(self, shape: ExpertsShape, reduce: Reduce | None = None) -> Experts:
        return NativeExperts(self, self._library, shape, reduce, self._device)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return table.index_select(0, ids).to(self.compute_dtype)  # several times as fast as table[ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        view = _rows(x)
        outer, inner, num_features = view.shape
        outer_stride, inner_stride, _ = view.stride()
        out = torch.empty(x.shape)
        self._library.rms_norm(
            view.data_ptr(), outer, inner, outer_stride, inner_stride, _weight(weight, num_features).data_ptr(),
            out.data_ptr(), num_features, eps, self._library.threads,
        )  # fmt: skip
        return out

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """In place."""
        residual, x = _alike(residual, x)
        self._library.add(residual.data_ptr(), x.data_ptr(), x.numel(), self._library.threads)
        return residual

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """In place."""
        x = dense(x)
        self._library.softcap(x.data_ptr(), x.numel(), cap, self._library.threads)
        return x

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """In place."""
        x, gate = dense(x), gate.to(torch.float32)
        num_tokens, num_features = x.shape
        if gate.shape not in ((num_tokens, num_features), (num_tokens, 1)):
            raise ConfigError(
                f"x is {list(x.shape)} and its gate {list(gate.shape)}: there must be a gate for each feature, or one "
                "for each token"
            )
        gate = gate if gate.stride(1) == 1 else gate.contiguous()
        self._library.sigmoid_gate(
            x.data_ptr(), gate.data_ptr(), num_tokens, num_features, gate.stride(0), gate.shape[1],
            self._library.threads,
        )  # fmt: skip
        return x

    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """In place."""
        if x.stride(-1) != 1 or x.dtype != torch.float32:
            x = x.to(torch.float32).contiguous()
        num_tokens, num_heads, head_dim = x.shape
        rotary_dim = cos_sin.shape[-1]
        if rotary_dim > head_dim or rotary_dim % 2 or positions.shape != (num_tokens,):
            raise ConfigError(
                f"cannot rotate x {list(x.shape)} at {list(positions.shape)} positions with {rotary_dim} rotary "
                "features: there must be one position per token, and an even number of at most head_dim features"
            )
        if positions.dtype != torch.int64 or not positions.is_contiguous():
            positions = positions.to(torch.int64).contiguous()
        cos_sin = dense(cos_sin)
        token_stride, head_stride, _ = x.stride()
        self._library.rotate(
            x.data_ptr(), num_tokens, num_heads, token_stride, head_stride, positions.data_ptr(),
            cos_sin.data_ptr(), rotary_dim, self._library.threads,
        )  # fmt: skip
        return x

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        check_gate(activation)
        gate_up = dense(gate_up)
        num_tokens, width = gate_up.shape
        out = torch.empty(num_tokens, width // 2)
        self._library.gate(
            gate_up.data_ptr(), out.data_ptr(), num_tokens, width // 2, GATE_NUMBERS[activation],
            self._library.threads,
        )  # fmt: skip
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = dense(x)
        num_tokens, num_features = x.shape
        weight, bias = _weight(weight, num_features), _bias(bias, num_features)
        out = torch.empty(x.shape)
        self._library.layer_norm(
            x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            num_tokens, num_features, eps, self._library.threads,
        )  # fmt: skip
        return out

    def add_layer_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """In place."""
        residual, x = _alike(residual, x)
        num_tokens, num_features = x.shape
        weight, bias = _weight(weight, num_features), _bias(bias, num_features)
        self._library.add_layer_norm(
            residual.data_ptr(), x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
            num_tokens, num_features, eps, self._library.threads,
        )  # fmt: skip
        return residual


def cpu_kernels(device: torch.device = CPU) -> NativeKernels | TorchKernels:
    """Return the compiled kernels, or plain torch if they are not available."""
    library = native_library()
    return TorchKernels(device=device) if library is None else NativeKernels(library, device)


def _weight(weight: Tensor, num_features: int) -> Tensor:
    if weight.shape != (num_features,):
        raise ConfigError(f"a norm's weight is {list(weight.shape)}: it must be [{num_features}]")
    return dense(weight)


def _bias(bias: Tensor | None, num_features: int) -> Tensor | None:
    if bias is not None and bias.shape != (num_features,):
        raise ConfigError(f"a norm's bias is {list(bias.shape)}: it must be [{num_features}]")
    return None if bias is None else dense(bias)


def _alike(residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as the library reads them."""
    if x.shape != residual.shape:
        raise ConfigError(f"x is {list(x.shape)} and residual {list(residual.shape)}: they must be equal")
    return dense(residual), dense(x)


def _rows(x: Tensor) -> Tensor:
    """Return x as [outer, inner, features] with unit inner stride: a view if the strides allow it."""
    if x.dtype != torch.float32 or x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = dense(x).view(-1, x.shape[-1])
    return x if x.dim() == 3 else x.unsqueeze(1)
