"""Layers on a GPU: Triton kernels around cuBLAS, and Triton alone for steps with few tokens."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.formats import GroupedMatrix, GroupScheme, Scheme, Weight
from inflight.layers.formats.schemes import unpack_nibbles
from inflight.layers.gpu_weights import empty_words, held_on_gpu
from inflight.layers.kernels import (
    Experts,
    ExpertsShape,
    Linear,
    Reduce,
    Residual,
    check_activation,
    check_gate,
    copy_bias,
    copy_quantized,
    copy_weight,
    taken_as,
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
from inflight.layers.triton.quantized import (
    FP8,
    FP8_BYTES,
    INT4,
    INT8,
    INT8_CONVERTED,
    MAX_INT8_FEATURES,
    PRODUCTS,
    QuantizedInputs,
    QuantizedWeight,
    dequantize,
    pack_int4,
    pack_int4_scales,
    quantize_rows,
)
from inflight.layers.triton.recurrent import TritonRecurrent
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import (
    MAX_TOKENS,
    max_small_quantized,
    pays_medium,
    pays_medium_fp8,
    pays_small,
)
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
        if isinstance(scheme, GroupScheme) and held_on_gpu(scheme):
            return QuantizedTritonLinear(self, in_features, out_features, bias, reduce, scheme)
        return TritonLinear(self, in_features, out_features, bias, reduce)

    def experts(self, shape: ExpertsShape, reduce: Reduce | None = None) -> Experts:
        router = TritonLinear(self, shape.hidden, shape.routing.num_experts, shape.routing.has_bias)
        return TritonExperts(self, router, shape, reduce)

    def byte_codes(self, scheme: GroupScheme, num_columns: int) -> tuple[int, torch.dtype]:
        """Return how kernels name the codes of a scheme of 8 bits, and their type. They are multiplied as they are if
        the model expects inputs to be quantized, too, and the chip can do so."""
        quantized = scheme.inputs == scheme.codes and scheme.group in (0, 128) and not scheme.zeros
        if scheme.codes == "int8":
            exact = quantized and num_columns <= MAX_INT8_FEATURES
            return INT8 if exact else INT8_CONVERTED, torch.int8
        if quantized and self.fp8_products:
            return FP8, torch.float8_e4m3fn
        return FP8_BYTES, torch.uint8

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
        self.weight = self._allocate(dtype, device)
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None

    # ---- loading ----

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor | QuantizedWeight:
        return torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)

    @property
    def _plain(self) -> Tensor:
        assert isinstance(self.weight, Tensor)
        return self.weight

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        copy_weight(self, self._plain, weight, first_row, first_column)

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        copy_bias(self, self.bias, bias, first_row)

    # ---- the operations of models ----

    def embed(self, ids: Tensor) -> Tensor:
        return self._kernels.embed(self._plain, ids)

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
        return self._large_wide(residual, eps)

    # ---- many tokens ----

    def _large(self, residual: Residual, eps: float) -> Tensor:
        return F.linear(self._norm(residual, eps), self._plain, self.bias)

    def _large_wide(self, residual: Residual, eps: float) -> Tensor:
        x = self._norm(residual, eps)
        if self.bias is None and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self._plain.T, out_dtype=torch.float32)
        return F.linear(x, self._plain, self.bias).float()

    def _add_large(self, hidden: Tensor, x: Tensor) -> None:
        if self.bias is not None:
            hidden.add_(F.linear(x, self._plain, self.bias))
        else:
            hidden.addmm_(x, self._plain.T)

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
            self._add_large(hidden, x)
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


class QuantizedTritonLinear(TritonLinear):
    """A linear layer over fp8, int8 or 4-bit weights.

    Inputs of fp8 and int8 weights are quantized as well, if the model expects that and the chip multiplies such
    numbers: in the kernel for few tokens, otherwise where the norm is read. All other weights are converted in the
    kernel for few tokens; for many, they are dequantized first, which takes little beside the product.
    """

    def __init__(
        self,
        kernels: TritonKernels,
        in_features: int,
        out_features: int,
        bias: bool,
        reduce: Reduce | None,
        scheme: GroupScheme,
    ) -> None:
        self._scheme = scheme
        super().__init__(kernels, in_features, out_features, bias, reduce)

    # ---- loading ----

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> QuantizedWeight:  # noqa: ARG002
        num_rows, num_columns, scheme = self.out_features, self.in_features, self._scheme
        if scheme.codes == "int4":
            words = empty_words(scheme, num_rows, num_columns, device)
            return QuantizedWeight(words.codes, INT4, words.group, words.scales)
        kind, codes = self._kernels.byte_codes(scheme, num_columns)
        matrix = scheme.empty(num_rows, num_columns, device)
        return QuantizedWeight(matrix.codes.view(codes), kind, scheme.group, matrix.scales, matrix.zeros)

    @property
    def _quantized(self) -> QuantizedWeight:
        assert isinstance(self.weight, QuantizedWeight)
        return self.weight

    @property
    def _matrix(self) -> GroupedMatrix:
        """The weights in 8 bits, in the types of their scheme. A view: no two tensors of a model share memory, so that
        each can be moved and counted by itself."""
        own = self._quantized
        assert own.scales is not None
        codes = own.codes.view(torch.int8 if self._scheme.codes == "int8" else torch.float8_e4m3fn)
        return GroupedMatrix(self._scheme, self.in_features, codes, own.scales, own.zeros)

    @property
    def _multiplies_codes(self) -> bool:
        return self._quantized.kind in PRODUCTS

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        if self._scheme.codes != "int4":
            copy_quantized(self._matrix, weight, first_row, first_column)
            return
        shape = self.out_features, self.in_features
        matrix = taken_as(self._scheme, weight, first_row, first_column, shape)
        assert isinstance(matrix, GroupedMatrix)
        own, rows = self._quantized, slice(first_row, first_row + len(matrix))
        assert own.scales is not None
        codes = unpack_nibbles(matrix.codes.to(own.codes.device))
        own.codes[rows] = pack_int4(codes, own.group)
        own.scales[:, rows] = pack_int4_scales(matrix.scales, matrix.zeros, len(own.scales)).to(
            own.codes.device
        )

    def embed(self, ids: Tensor) -> Tensor:
        dtype = self._kernels.compute_dtype
        if self._scheme.codes != "int4":
            return self._matrix[ids.long()].dequantize(dtype)
        own = self._quantized
        assert own.scales is not None
        rows = QuantizedWeight(own.codes[ids], own.kind, own.group, own.scales[:, ids])
        return dequantize(rows, self.in_features, dtype)

    # ---- many tokens ----

    def _large(self, residual: Residual, eps: float) -> Tensor:
        own, kernels = self._quantized, self._kernels
        if not self._multiplies_codes:
            weight = dequantize(own, self.in_features, kernels.compute_dtype)
            return F.linear(self._norm(residual, eps), weight, self.bias)
        inputs = self._quantize_inputs(residual, eps)
        aligned = self.in_features % 16 == 0 and self.out_features % 16 == 0
        if (
            own.kind == INT8  # cuBLAS would leave sums of 32 bits for another kernel to scale
            or own.group
            or not aligned
            or inputs.dtype != torch.bfloat16
            or not residual.x.is_cuda
        ):
            return medium_linear(inputs, own, kernels.workspace, bias=self.bias, pdl=kernels.pdl)
        assert own.scales is not None
        return torch._scaled_mm(
            inputs.codes,
            own.codes.T,
            inputs.scales,
            own.scales.T,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,  # which would keep too few bits of long sums
        )

    def _large_wide(self, residual: Residual, eps: float) -> Tensor:
        return self._large(residual, eps).float()

    def _add_large(self, hidden: Tensor, x: Tensor) -> None:
        hidden.add_(self._large(Residual(x, None), 0.0))

    def _quantize_inputs(self, residual: Residual, eps: float) -> QuantizedInputs:
        own = self._quantized
        return quantize_rows(residual.x, residual.norm, eps, own.group, self._kernels.pdl, own.codes.dtype)

    # ---- choosing the kernel ----

    def _is_fused(self, x: Tensor, gated: bool = False) -> bool:  # noqa: ARG002
        if len(x) > self._kernels.few_tokens:
            return False
        if self._is_small(x) or not self._multiplies_codes:
            return self._is_small(x)
        kind = self._quantized.kind
        return kind == INT8 or pays_medium_fp8(len(x), self.out_features, self.in_features)

    def _is_small(self, x: Tensor) -> bool:
        return len(x) <= max_small_quantized(self._quantized.kind)

    def left_for(self, next_norm: Tensor | None, x: Tensor, hidden: Tensor) -> NextNorm | None:
        """Return what to fill in for the next norm. Where inputs are quantized in a kernel of their own, that does all
        of the norm."""
        return super().left_for(next_norm, x, hidden) if self._is_small(x) else None

    def _fused(self, read: Residual, eps: float, **after: Any) -> Tensor:
        if self._is_small(read.x):
            return super()._fused(read, eps, **after)
        own, kernels = self._quantized, self._kernels
        inputs = self._quantize_inputs(read, eps)
        return medium_linear(inputs, own, kernels.workspace, bias=self.bias, pdl=kernels.pdl, **after)


def has_fp8_products(device: torch.device) -> bool:
    """Return whether the chip multiplies fp8: Ada, Hopper and later."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
