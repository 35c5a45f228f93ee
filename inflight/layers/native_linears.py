"""Linear layers on the compiled CPU library."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats import Weight, plain
from inflight.layers.kernels import (
    ComposedLinear,
    Kernels,
    Reduce,
    Residual,
    check_activation,
    check_gate,
    check_weight,
)
from inflight.native.library import ACTIVATION_NUMBERS, GATE_NUMBERS, Library

LOAD_ROWS = 4096  # rows converted at a time, so that a large weight is never held twice


class Panels:
    """A matrix [out_features, in_features] in panels, float32 or bfloat16 (native/tile.h), or several such matrices."""

    def __init__(
        self,
        library: Library,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        count: int = 1,
    ) -> None:
        self._library = library
        self._in_features = in_features
        # float16 would be slower to widen than bfloat16, and float32 holds it exactly.
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        narrow = self.dtype == torch.bfloat16
        self._pack = library.pack_bf16 if narrow else library.pack_f32
        self._gather = library.gather_bf16 if narrow else library.gather_f32
        depth = library.depth_bf16(in_features) if narrow else in_features
        size = count, -(-out_features // library.panel), depth, library.panel
        self._panels = torch.empty(size, dtype=self.dtype, device=device)
        if device.type == "cpu":
            library.advise(self._panels.data_ptr(), self._panels.nbytes)
        if out_features % library.panel:
            self._panels[:, -1] = 0  # columns past the last output take part in products
        if depth != in_features:
            self._panels.zero_()  # as do features past the last input

    def pointer(self, index: int = 0) -> int:
        return self._panels[index].data_ptr()

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None:
        for start in range(0, len(weight), LOAD_ROWS):
            part = plain(weight[start : start + LOAD_ROWS]).to(device="cpu", dtype=self.dtype).contiguous()
            self._pack(
                part.data_ptr(), self.pointer(index), *part.shape, self._in_features, first_row + start,
                first_column, self._library.threads,
            )  # fmt: skip

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [len(ids), in_features] of the first matrix as float32."""
        out = torch.empty(len(ids), self._in_features)
        self._gather(
            self.pointer(), ids.data_ptr(), out.data_ptr(), len(ids), self._in_features, self._library.threads
        )
        return out


class CompiledLinear(ComposedLinear):
    """Checks and shapes around a compiled product."""

    def __init__(
        self,
        kernels: Kernels,
        library: Library,
        in_features: int,
        out_features: int,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        own_bias = torch.zeros(out_features, device=device) if bias else None
        super().__init__(kernels, in_features, out_features, own_bias, reduce)
        self._library = library
        self._bias_pointer = pointer(own_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(self._input(x), 0)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        check_activation(activation)
        return self._product(self._input(x), ACTIVATION_NUMBERS[activation])

    def embed(self, ids: Tensor) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"row ids are {ids.tolist()}: they must be in [0, {self.out_features})")
        return self._rows(ids)

    def _input(self, x: Tensor) -> Tensor:
        x = dense(x)
        if x.shape[1] != self.in_features:
            raise ConfigError(f"input has {x.shape[1]} features: the layer takes {self.in_features}")
        return x

    @abstractmethod
    def _product(self, x: Tensor, activation: int) -> Tensor: ...

    @abstractmethod
    def _rows(self, ids: Tensor) -> Tensor:
        """Return weight rows [len(ids), in_features]."""


class NativeLinear(CompiledLinear):
    """A linear layer computed in float32, over float32 or bfloat16 weights."""

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
    ) -> None:
        super().__init__(kernels, library, in_features, out_features, bias, reduce, device)
        self._panels = Panels(library, out_features, in_features, dtype, device)
        narrow = self._panels.dtype == torch.bfloat16
        self._multiply = library.multiply_bf16 if narrow else library.multiply_f32
        self._weight_pointer = self._panels.pointer()

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_weight(self, weight, first_row, first_column)
        self._panels.load(weight, first_row, first_column)

    def _rows(self, ids: Tensor) -> Tensor:
        return self._panels.rows(ids)

    def _product(self, x: Tensor, activation: int) -> Tensor:
        out = torch.empty(len(x), self.out_features)
        if len(x):
            self._multiply(
                x.data_ptr(), self._weight_pointer, self._bias_pointer, out.data_ptr(), *x.shape,
                self.out_features, activation, self._library.threads,
            )  # fmt: skip
        return out


class NarrowLinear(CompiledLinear):
    """A linear layer that converts its input to a narrow type before it multiplies (native/narrow.h).

    The norm before the product, and the gate or the residual after it, are part of one call.
    """

    _method: int  # numbered as in narrow.h
    _weight_pointer: int

    def normed(self, residual: Residual, eps: float) -> Tensor:
        return self._product(self._input(residual.x), 0, residual.norm, eps)

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self._product(self._input(x), 0, norm, eps)

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        check_gate(activation)
        x = self._input(residual.x)
        out = torch.empty(len(x), self.out_features // 2)
        if len(x):
            self._library.gated_linear(
                x.data_ptr(), self._norm_pointer(residual.norm), self._weight_pointer, self._bias_pointer,
                out.data_ptr(), *x.shape, self.out_features, eps, GATE_NUMBERS[activation], self._method,
                self._library.threads,
            )  # fmt: skip
        return out

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        """In place, unless the product has to be reduced or normalised first."""
        if self._reduce is not None or norm is not None:
            return super().add_to(residual, x, norm, eps, next_norm)
        hidden, x = dense(residual.x), self._input(x)
        if hidden.shape != (len(x), self.out_features):
            raise ConfigError(
                f"the residual is {list(hidden.shape)}: it must be [{len(x)}, {self.out_features}]"
            )
        self._multiply(x, hidden, add=True)
        return Residual(hidden, next_norm)

    def _product(self, x: Tensor, activation: int, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        out = torch.empty(len(x), self.out_features)
        self._multiply(x, out, activation, norm, eps)
        return out

    def _multiply(
        self,
        x: Tensor,
        out: Tensor,
        activation: int = 0,
        norm: Tensor | None = None,
        eps: float = 0.0,
        add: bool = False,
    ) -> None:
        if len(x):
            self._library.linear(
                x.data_ptr(), self._norm_pointer(norm), self._weight_pointer, self._bias_pointer,
                out.data_ptr(), *x.shape, self.out_features, eps, activation, add, self._method,
                self._library.threads,
            )  # fmt: skip

    def _norm_pointer(self, norm: Tensor | None) -> int | None:
        if norm is not None and (norm.shape != (self.in_features,) or norm.dtype != torch.float32):
            raise ConfigError(
                f"a norm's weight is {norm.dtype} {list(norm.shape)}: it must be float32 [{self.in_features}]"
            )
        return pointer(norm)


class Bf16Linear(NarrowLinear):
    """A linear layer over bfloat16 weights, which rounds its input to bfloat16."""

    def __init__(
        self,
        kernels: Kernels,
        library: Library,
        in_features: int,
        out_features: int,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
        method: int,
    ) -> None:
        super().__init__(kernels, library, in_features, out_features, bias, reduce, device)
        self._panels = Panels(library, out_features, in_features, torch.bfloat16, device)
        self._weight_pointer = self._panels.pointer()
        self._method = method

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_weight(self, weight, first_row, first_column)
        self._panels.load(weight, first_row, first_column)

    def _rows(self, ids: Tensor) -> Tensor:
        return self._panels.rows(ids)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def dense(x: Tensor) -> Tensor:
    """Return x as contiguous float32, which the library reads; x itself if it already is."""
    return x.to(torch.float32).contiguous()
