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
from inflight.layers.formats import Scheme, Weight, plain
from inflight.layers.kernels import (
    CLAMPED_SILU,
    ComposedLinear,
    ExpertRouting,
    Experts,
    Kernels,
    Linear,
    Reduce,
    Residual,
    TorchKernels,
    check_activation,
    check_bias_fits,
    check_expert,
    check_fits,
    check_gate,
    check_weight,
)
from inflight.native.library import (
    ACTIVATION_NUMBERS,
    GATE_NUMBERS,
    INSTRUCTION_NUMBERS,
    SCORE_NUMBERS,
    ExpertLayer,
    Library,
    native_library,
)

CPU = torch.device("cpu")
LOAD_ROWS = 4096  # rows converted at a time, so that a large weight is never held twice


class NativeLinear(ComposedLinear):
    """A linear layer over weights packed in panels, float32 or bfloat16 (native/tile.h)."""

    def __init__(
        self,
        kernels: Kernels,
        library: Library,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
        bf16_instruction: int,
    ) -> None:
        own_bias = torch.zeros(out_features, device=device) if bias else None
        super().__init__(kernels, in_features, out_features, own_bias, reduce)
        self._library = library
        # float16 would be slower to widen than bfloat16, and float32 holds it exactly.
        self._stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        narrow = self._stored == torch.bfloat16
        self._multiply = library.multiply_bf16 if narrow else library.multiply_f32
        self._instruction = (bf16_instruction,) if narrow else ()
        self._pack = library.pack_bf16 if narrow else library.pack_f32
        self._gather = library.gather_bf16 if narrow else library.gather_f32
        self._panels = _empty_panels(library, out_features, in_features, self._stored, device)
        self._weight_pointer = self._panels.data_ptr()
        self._bias_pointer = None if own_bias is None else own_bias.data_ptr()

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_weight(self, weight, first_row, first_column)
        for start in range(0, len(weight), LOAD_ROWS):
            part = plain(weight[start : start + LOAD_ROWS]).to(device="cpu", dtype=self._stored).contiguous()
            self._pack(
                part.data_ptr(), self._weight_pointer, *part.shape, self.in_features, first_row + start,
                first_column, self._library.threads,
            )  # fmt: skip

    def embed(self, ids: Tensor) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"row ids are {ids.tolist()}: they must be in [0, {self.out_features})")
        out = torch.empty(len(ids), self.in_features)
        self._gather(
            self._weight_pointer,
            ids.data_ptr(),
            out.data_ptr(),
            len(ids),
            self.in_features,
            self._library.threads,
        )
        return out

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, 0)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        check_activation(activation)
        return self._product(x, ACTIVATION_NUMBERS[activation])

    def _product(self, x: Tensor, activation: int) -> Tensor:
        x = _dense(x)
        num_tokens, features = x.shape
        if features != self.in_features:
            raise ConfigError(f"input has {features} features: the layer takes {self.in_features}")
        out = torch.empty(num_tokens, self.out_features)
        if num_tokens:
            self._multiply(
                x.data_ptr(), self._weight_pointer, self._bias_pointer, out.data_ptr(), num_tokens, features,
                self.out_features, activation, *self._instruction, self._library.threads,
            )  # fmt: skip
        return out


class NativeExperts:
    """Implements `Experts` in one call, over weights packed in panels as in `NativeLinear`."""

    def __init__(
        self,
        kernels: NativeKernels,
        library: Library,
        hidden: int,
        inner: int,
        routing: ExpertRouting,
        dtype: torch.dtype,
        activation: str,
        bias: bool,
        limit: float,
        reduce: Reduce | None,
        held: range | None,
        device: torch.device,
    ) -> None:
        if activation != CLAMPED_SILU:
            check_gate(activation)
        # In float32, since rounding could change which experts are chosen.
        self.router: Linear = NativeLinear(
            kernels, library, hidden, routing.num_experts, dtype, routing.has_bias, None, device, 0
        )
        self.correction = torch.zeros(routing.num_experts, device=device) if routing.has_correction else None
        self._kernels = kernels
        self._library = library
        self._hidden = hidden
        self._inner = inner
        self._reduce = reduce
        self._held = held = range(routing.num_experts) if held is None else held
        self._stored = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        narrow = self._stored == torch.bfloat16
        self._multiply = library.experts_bf16 if narrow else library.experts_f32
        self._pack = library.pack_bf16 if narrow else library.pack_f32
        self._gate_up = _empty_panels(
            library, 2 * inner, hidden, self._stored, device, len(held)
        )  # rows of gate, then those of up
        self._down = _empty_panels(library, hidden, inner, self._stored, device, len(held))
        self._gate_up_bias = torch.zeros(len(held), 2 * inner, device=device) if bias else None
        self._down_bias = torch.zeros(len(held), hidden, device=device) if bias else None
        self._layer = ExpertLayer(
            self._gate_up.data_ptr(),
            self._down.data_ptr(),
            _pointer(self._gate_up_bias),
            _pointer(self._down_bias),
            _pointer(self.correction),
            hidden,
            inner,
            routing.num_experts,
            held.start,
            len(held),
            routing.top_k,
            SCORE_NUMBERS[routing.scores],
            routing.normalise,
            routing.num_groups,
            routing.top_groups,
            GATE_NUMBERS[activation],
            kernels.bf16_instruction,
            routing.scale,
            limit,
        )

    def load(self, part: str, expert: int, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_expert(self._held, expert, part)
        shape = (self._hidden, self._inner) if part == "down" else (self._inner, self._hidden)
        check_fits(weight, first_row, first_column, *shape)
        panels = (self._down if part == "down" else self._gate_up)[expert - self._held.start]
        rows = plain(weight).to(device="cpu", dtype=self._stored).contiguous()
        self._pack(
            rows.data_ptr(), panels.data_ptr(), *rows.shape, shape[1],
            first_row + (self._inner if part == "up" else 0), first_column, self._library.threads,
        )  # fmt: skip

    def load_bias(self, part: str, expert: int, bias: Tensor, first_row: int = 0) -> None:
        check_expert(self._held, expert, part)
        if self._gate_up_bias is None or self._down_bias is None:
            raise ConfigError("cannot load a bias into experts that were created without one")
        num_rows = self._hidden if part == "down" else self._inner
        check_bias_fits(bias, first_row, num_rows)
        biases = (self._down_bias if part == "down" else self._gate_up_bias)[expert - self._held.start]
        first_row += self._inner if part == "up" else 0
        biases[first_row : first_row + len(bias)].copy_(bias)

    def add_to(
        self, residual: Residual, eps: float, next_norm: Tensor | None, live: Tensor | None = None
    ) -> Residual:
        """In place, unless the sum has to be reduced first."""
        hidden = _dense(residual.x)
        x = hidden if residual.norm is None else self._kernels.rms_norm(hidden, residual.norm, eps)
        logits = self.router(x)
        live = None if live is None else live.to(torch.int32).contiguous()
        if residual.norm is None and self._reduce is None:
            x = x.clone()  # it is read while the result is written
        y = hidden if self._reduce is None else torch.empty_like(hidden)
        self._multiply(
            ctypes.byref(self._layer), x.data_ptr(), logits.data_ptr(), _pointer(live), y.data_ptr(), len(x),
            self._reduce is None, self._library.threads,
        )  # fmt: skip
        if self._reduce is not None:
            y = self._kernels.add(hidden, self._reduce.sum(y))
        return Residual(y, next_norm)


class NativeKernels:
    """Implements `Kernels`. On the meta device, layers have shapes but no memory."""

    compute_dtype = torch.float32

    def __init__(
        self, library: Library, device: torch.device = CPU, instructions: frozenset[str] | None = None
    ) -> None:
        """Use only these of the processor's instructions; by default all that the library may use."""
        self._library = library
        self._device = device
        usable = library.instructions if instructions is None else library.instructions & instructions
        self.bf16_instruction = best_instruction(usable, "bf16")
        self.recurrent = CpuRecurrent(library)
        self._gates = {
            "silu": library.gate_silu,
            "gelu_tanh": library.gate_gelu_tanh,
            "gelu": library.gate_gelu,
        }

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None = None,
        scheme: Scheme | None = None,  # noqa: ARG002
    ) -> Linear:
        return NativeLinear(
            self,
            self._library,
            in_features,
            out_features,
            dtype,
            bias,
            reduce,
            self._device,
            self.bf16_instruction,
        )

    def experts(
        self,
        hidden: int,
        inner: int,
        routing: ExpertRouting,
        dtype: torch.dtype,
        activation: str,
        bias: bool = False,
        limit: float = 0.0,
        reduce: Reduce | None = None,
        held: range | None = None,
        scheme: Scheme | None = None,  # noqa: ARG002
    ) -> Experts:
        return NativeExperts(
            self,
            self._library,
            hidden,
            inner,
            routing,
            dtype,
            activation,
            bias,
            limit,
            reduce,
            held,
            self._device,
        )

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return table[ids].to(self.compute_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        view = _rows(x)
        num_features = x.shape[-1]
        out = torch.empty(x.shape)
        self._library.rms_norm(
            view.data_ptr(), view.shape[0], view.shape[1], view.stride(0), view.stride(1),
            _weight(weight, num_features).data_ptr(), out.data_ptr(), num_features, eps,
            self._library.threads,
        )  # fmt: skip
        return out

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """In place."""
        residual, x = _alike(residual, x)
        self._library.add(residual.data_ptr(), x.data_ptr(), x.numel(), self._library.threads)
        return residual

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """In place."""
        x = _dense(x)
        self._library.softcap(x.data_ptr(), x.numel(), cap, self._library.threads)
        return x

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """In place."""
        x, gate = _dense(x), gate.to(torch.float32)
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
        if rotary_dim > head_dim or rotary_dim % 2 or len(positions) != num_tokens:
            raise ConfigError(
                f"cannot rotate x {list(x.shape)} at {len(positions)} positions with {rotary_dim} rotary "
                "features: there must be one position per token, and an even number of at most head_dim features"
            )
        positions = positions.to(torch.int64).contiguous()
        cos_sin = _dense(cos_sin)
        self._library.rotate(
            x.data_ptr(), num_tokens, num_heads, x.stride(0), x.stride(1), positions.data_ptr(),
            cos_sin.data_ptr(), rotary_dim, self._library.threads,
        )  # fmt: skip
        return x

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        check_gate(activation)
        gate_up = _dense(gate_up)
        num_tokens, width = gate_up.shape
        out = torch.empty(num_tokens, width // 2)
        self._gates[activation](
            gate_up.data_ptr(), out.data_ptr(), num_tokens, width // 2, self._library.threads
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = _dense(x)
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


def best_instruction(instructions: frozenset[str], kind: str) -> int:
    """Return the number of the best of these instructions for weights of this kind, or 0 without any."""
    numbers = (
        number for name, number in INSTRUCTION_NUMBERS.items() if name in instructions and kind in name
    )
    return next(numbers, 0)


def cpu_kernels(device: torch.device = CPU) -> NativeKernels | TorchKernels:
    """Return the compiled kernels, or plain torch if they are not available."""
    library = native_library()
    return TorchKernels(device=device) if library is None else NativeKernels(library, device)


def _empty_panels(
    library: Library,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    *matrices: int,
) -> Tensor:
    """Return memory for a matrix in panels [out / panel, depth, panel], or for several."""
    depth = library.depth_bf16(in_features) if dtype == torch.bfloat16 else in_features
    size = *matrices, -(-out_features // library.panel), depth, library.panel
    panels = torch.empty(size, dtype=dtype, device=device)
    if device.type == "cpu":
        library.advise(panels.data_ptr(), panels.nbytes)
    if out_features % library.panel:
        panels[..., -1, :, :] = 0  # columns past the last output take part in products
    if depth != in_features:
        panels.zero_()  # as do features past the last input
    return panels


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _dense(x: Tensor) -> Tensor:
    """Return x as contiguous float32, which the library reads; x itself if it already is."""
    return x.to(torch.float32).contiguous()


def _weight(weight: Tensor, num_features: int) -> Tensor:
    if weight.shape != (num_features,):
        raise ConfigError(f"a norm's weight is {list(weight.shape)}: it must be [{num_features}]")
    return _dense(weight)


def _bias(bias: Tensor | None, num_features: int) -> Tensor | None:
    if bias is not None and bias.shape != (num_features,):
        raise ConfigError(f"a norm's bias is {list(bias.shape)}: it must be [{num_features}]")
    return None if bias is None else _dense(bias)


def _alike(residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as the library reads them."""
    if x.shape != residual.shape:
        raise ConfigError(f"x is {list(x.shape)} and residual {list(residual.shape)}: they must be equal")
    return _dense(residual), _dense(x)


def _rows(x: Tensor) -> Tensor:
    """Return x as [outer, inner, features] with unit inner stride: a view if the strides allow it."""
    if x.dtype != torch.float32 or x.stride(-1) != 1 or x.dim() not in (2, 3):
        x = _dense(x).view(-1, x.shape[-1])
    return x if x.dim() == 3 else x.unsqueeze(1)
