"""Layers on the compiled CPU library.

Activations are float32 between layers. A product with bfloat16 weights rounds them to bfloat16 if the processor has
instructions for that, and widens the weights if not. A token's result is bit-identical whatever else is in the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.cpu_recurrent import CpuRecurrent
from inflight.layers.formats.schemes import Scheme, Weight
from inflight.layers.kernels import (
    GATES,
    Experts,
    ExpertsShape,
    FusableLayer,
    Linear,
    LoadedExperts,
    Reduce,
    Residual,
    check_gate,
)
from inflight.layers.native.library import Library, native_library
from inflight.layers.native_gguf import BlockRows, ExpertBlocks, block_scheme
from inflight.layers.native_linears import (
    NativeLinear,
    PackedMatrices,
    Panels,
    QuantizedPanels,
    Slabs,
    dense,
    pointer,
    stored_dtype,
    supports_panels,
    vector_pointer,
)
from inflight.layers.torch_kernels import TorchKernels

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
        panels = kernels.panels(routing.num_experts, hidden, dtype, None, instructions=frozenset())
        self.router: Linear = NativeLinear(
            kernels, library, hidden, routing.num_experts, routing.has_bias, None, device, panels
        )
        super().__init__(shape, reduce, torch.float32, device)
        self._kernels = kernels
        self._library = library
        count = len(shape.experts)
        self._gate_up = kernels.matrices(count, 2, inner, hidden, dtype, shape.gate_up_scheme)
        self._down = kernels.matrices(count, 1, hidden, inner, dtype, shape.down_scheme)
        self._layer: Any = None  # of the weights that are loaded

    def _load(self, down: bool, index: int, rows: slice, weight: Weight, first_column: int) -> None:
        (self._down if down else self._gate_up).load(weight, rows.start, first_column, index)
        self._layer = None

    def add_to(
        self,
        residual: Residual,
        eps: float,
        next_norm: Tensor | None,
        padding_mask: Tensor | None = None,
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
        self._sum(x, logits, padding_mask, y, total is not None)
        if not adds_at_once:
            y = self._kernels.add(hidden, y if self._reduce is None else self._reduce.sum(y))
        return Residual(y, next_norm)

    def sum(self, x: Tensor, routed: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        x = dense(x)
        y = torch.empty_like(x)
        self._sum(x, self.router(routed), padding_mask, y, False)
        return y if self._reduce is None else self._reduce.sum(y)

    def _sum(self, x: Tensor, logits: Tensor, padding_mask: Tensor | None, y: Tensor, adds: bool) -> None:
        """Write the weighted sums to y, or add them to it."""
        padding_mask = None if padding_mask is None else padding_mask.to(torch.int32).contiguous()
        self._library.experts(
            ctypes.byref(self._ready()), x.data_ptr(), logits.data_ptr(), pointer(padding_mask), y.data_ptr(), len(x),
            adds, self._library.threads,
        )  # fmt: skip

    def _ready(self) -> Any:
        if self._layer is not None:
            return self._layer
        library, shape, routing = self._library, self._shape, self._shape.routing
        gate_up, down = self._gate_up.table(), self._down.table()
        self._layer = library.experts_layer(
            gate_up=library.matrix.array(gate_up),
            down=library.matrix.array(down),
            gate_up_bias=pointer(self._gate_up_bias),
            down_bias=pointer(self._down_bias),
            correction=pointer(self.correction),
            factors=pointer(self.scales),
            tokens=pointer(self.tokens),
            gate_up_parts=len(gate_up) // len(down),
            hidden=shape.hidden,
            inner=shape.inner,
            experts=routing.num_experts,
            first_held=shape.experts.start,
            held=len(shape.experts),
            top_k=routing.top_k,
            scores=library.scores[routing.scores],
            normalise=routing.normalise,
            groups=routing.num_groups,
            top_groups=routing.top_groups,
            gate=library.activations[shape.activation],
            scale=routing.scale,
            limit=shape.limit,
        )
        return self._layer


# ---- whole decoder layers in one call, without Python between two operations of a step ----


@runtime_checkable
class CompiledAttention(Protocol):
    """An attention backend over the compiled library."""

    def heads(self, layer: Any, cache: Any) -> Any:
        """Return the library's `Heads` of a layer."""

    def step(self, inputs: Any, num_tokens: int) -> Any:
        """Return the library's `Step` of a batch."""

    def addresses(self, caches: Sequence[Any]) -> list[int]:
        """Return where the caches of layers are."""


class NativeLayers:
    """Implements `FusedLayers`: the first layers, up to one that is not made of whole products of the library. The bits
    are those of the operations one by one."""

    def __init__(self, slabs: Slabs, layers: Sequence[FusableLayer], attention: CompiledAttention) -> None:
        self._slabs = slabs
        self._library = slabs.library
        self._attention = attention
        self._layers = list(takewhile(_is_fusable, layers))
        self.count = len(self._layers)
        self._array: Any = None
        self._places: list[int] = []  # where the weights and caches are that the array leads to

    def run(self, x: Tensor, caches: Sequence[Any], inputs: Any, first: int, end: int) -> Tensor:
        """In place."""
        x = dense(x)
        num_tokens, width = x.shape
        hidden = self._layers[0].qkv.in_features
        if width != hidden:
            raise ConfigError(f"the residual is {list(x.shape)}: it must be [{num_tokens}, {hidden}]")
        self._point_to(caches[: self.count])
        step = self._attention.step(inputs, num_tokens)
        if num_tokens and first < end:
            self._library.decoder_layers(
                ctypes.byref(self._array, first * ctypes.sizeof(self._array._type_)), end - first, ctypes.byref(step),
                x.data_ptr(), self._library.threads,
            )  # fmt: skip
        return x

    def _point_to(self, caches: Sequence[Any]) -> None:
        """Let the layers read these caches and their weights, which rarely are elsewhere than in the last step."""
        places = [self._slabs.num_moves, *self._attention.addresses(caches)]
        if places != self._places:
            self._places = []
            described = [self._describe(*pair) for pair in zip(self._layers, caches, strict=True)]
            self._array = self._library.decoder_layer.array(described)
            self._places = places

    def _describe(self, layer: FusableLayer, cache: Any) -> Any:
        qkv, output, gate_up, down = _linears(layer)
        hidden, heads = qkv.in_features, self._attention.heads(layer.heads, cache)
        query = heads.heads * heads.dim
        projected = query + 2 * heads.kv_heads * heads.dim
        if (qkv.out_features, output.in_features) != (projected, query):
            raise ConfigError(
                f"attention projects {hidden} features to {qkv.out_features} and {output.in_features} back: these must "
                f"be {projected} and {query}"
            )
        return self._library.decoder_layer(
            attention_norm=vector_pointer(layer.attention_norm, hidden),
            qkv=qkv.structure(),
            heads=heads,
            output=output.structure(),
            mlp_norm=vector_pointer(layer.mlp_norm, hidden),
            gate_up=gate_up.structure(),
            down=down.structure(),
            gate=self._library.activations[layer.activation],
            eps=layer.eps,
        )


def _linears(layer: FusableLayer) -> list[NativeLinear]:
    linears = layer.qkv, layer.output, layer.gate_up, layer.down
    return [linear for linear in linears if isinstance(linear, NativeLinear)]


def _is_fusable(layer: FusableLayer) -> bool:
    linears = _linears(layer)
    return len(linears) == 4 and not any(linear.reduces for linear in linears) and layer.activation in GATES


# ---- all operations ----


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
        self._slabs = Slabs(library, device)

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None = None,
        scheme: Scheme | None = None,
    ) -> Linear:
        blocks = block_scheme(scheme, in_features)
        weights: PackedMatrices
        if blocks is not None:
            weights = BlockRows(self._slabs, blocks, out_features, in_features, self._instructions)
        else:
            weights = self.panels(out_features, in_features, dtype, scheme)
        size = in_features, out_features
        return NativeLinear(self, self._library, *size, bias, reduce, self._device, weights)

    def panels(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        scheme: Scheme | None,
        count: int = 1,
        instructions: frozenset[str] | None = None,
    ) -> PackedMatrices:
        """Return memory for matrices that are multiplied by these instructions, by default all."""
        unquantized = "bf16" if stored_dtype(dtype) == torch.bfloat16 else "f32"
        name = scheme.codes if supports_panels(scheme) else unquantized
        method = self._library.method(name, self._instructions if instructions is None else instructions)
        if supports_panels(scheme):
            return QuantizedPanels(self._slabs, method, out_features, in_features, scheme, count)
        return Panels(self._slabs, method, out_features, in_features, dtype, count)

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
            return ExpertBlocks(self._slabs, blocks, *size, self._instructions)
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

    def fuse(self, layers: Sequence[FusableLayer], attention: Any) -> NativeLayers | None:
        if not isinstance(attention, CompiledAttention):
            return None
        fused = NativeLayers(self._slabs, layers, attention)
        return fused if fused.count else None

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
            gate_up.data_ptr(), out.data_ptr(), num_tokens, width // 2,
            self._library.activations[activation], self._library.threads,
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
