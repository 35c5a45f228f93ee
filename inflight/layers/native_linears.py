"""Linear layers on the compiled CPU library."""

from __future__ import annotations

import threading
from abc import abstractmethod
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats import GroupedMatrix, GroupScheme, Scheme, Weight, plain
from inflight.layers.kernels import Kernels, Reduce, Residual, check_activation, check_gate, check_weight
from inflight.layers.torch_kernels import ComposedLinear
from inflight.native.library import ACTIVATION_NUMBERS, GATE_NUMBERS, Library, LinearMatrix, PackedMatrix

LOAD_ROWS = 4096  # rows converted at a time, so that a large weight is never held twice
SLAB_BYTES = 64 << 20


class Slabs:
    """Memory for weights of a few megabytes, which share huge pages. Alone, they would lie in small pages for the most
    part: at the end of each, a processor stops prefetching and looks up the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(
        self, library: Library, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a tensor of undefined values."""
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        num_bytes = torch.Size(size).numel() * dtype.itemsize
        # Each NUMA node gets a part of each weight, so weights of several nodes share no pages.
        if library.num_nodes > 1 or num_bytes > SLAB_BYTES // 2:
            alone = torch.empty(size, dtype=dtype)
            library.advise(alone.data_ptr(), alone.nbytes)
            return alone
        # A slab serves loads inside and outside of inference mode.
        with self._lock, torch.inference_mode(False):
            if self._used + num_bytes > len(self._slab):
                self._slab, self._used = torch.empty(SLAB_BYTES, dtype=torch.uint8), 0
                library.advise(self._slab.data_ptr(), SLAB_BYTES)
            part = self._slab[self._used : self._used + num_bytes]
            self._used += -(-num_bytes // 64) * 64  # whole cache lines
            return part.view(dtype).view(size)


SLABS = Slabs()


class PackedRows(Protocol):
    """Weights as a narrow product reads them."""

    group: int  # features with one scale, if that is not fixed

    def pointer(self, index: int = 0) -> int: ...

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None: ...

    def rows(self, ids: Tensor) -> Tensor: ...


class PackedMatrices(Protocol):
    """The matrices of a layer's experts, as products read them."""

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None: ...

    def table(self) -> list[PackedMatrix]:
        """Return the matrices of all experts, of each expert as many as share its rows."""


class PanelStack:
    """Matrices in panels of equal size."""

    group = 0  # features with one scale; only int4 has groups
    _panels: Tensor  # [matrices, panels, ...]
    _method: int  # of products (native/narrow.h)

    def pointer(self, index: int = 0) -> int:
        return self._panels[index].data_ptr()

    def table(self) -> list[PackedMatrix]:
        return [
            PackedMatrix(self.pointer(index), self._method, self.group) for index in range(len(self._panels))
        ]


class Panels(PanelStack):
    """A matrix [out_features, in_features] in panels, float32 or bfloat16 (native/tile.h), or several such matrices."""

    def __init__(
        self,
        library: Library,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        method: int = 0,
        count: int = 1,
    ) -> None:
        self._library = library
        self._method = method
        self._in_features = in_features
        # float16 would be slower to widen than bfloat16, and float32 holds it exactly.
        self.dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        narrow = self.dtype == torch.bfloat16
        self._pack = library.pack_bf16 if narrow else library.pack_f32
        self._gather = library.gather_bf16 if narrow else library.gather_f32
        depth = library.depth_bf16(in_features) if narrow else in_features
        size = count, -(-out_features // library.panel), depth, library.panel
        self._panels = SLABS.empty(library, size, self.dtype, device)
        if out_features % library.panel:
            self._panels[:, -1] = 0  # columns past the last output take part in products
        if depth != in_features:
            self._panels.zero_()  # as do features past the last input

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


def holds(scheme: Scheme | None) -> TypeGuard[GroupScheme]:
    """Return whether `QuantizedPanels` hold weights of this scheme."""
    if not isinstance(scheme, GroupScheme):
        return False
    if scheme.codes == "int8":
        return not scheme.group and not scheme.zeros
    return scheme.codes == "int4" and scheme.group > 0 and scheme.group % 8 == 0


class QuantizedPanels(PanelStack):
    """A matrix of int8 or int4 weights in panels (native/narrow.h), or several such matrices."""

    def __init__(
        self,
        library: Library,
        out_features: int,
        in_features: int,
        scheme: GroupScheme,
        device: torch.device,
        method: int,
        count: int = 1,
    ) -> None:
        self._library = library
        self._in_features = in_features
        self._scheme = scheme
        self._method = method
        self.group = scheme.group
        size = count, -(-out_features // library.panel), library.panel_bytes(in_features, method, self.group)
        # Zeros, since columns and features past the last ones take part in products.
        self._panels = SLABS.empty(library, size, torch.uint8, device).zero_()

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None:
        if first_column or weight.shape[1] != self._in_features:
            raise ConfigError(
                f"columns {first_column} to {first_column + weight.shape[1] - 1} cannot be loaded into a layer of "
                f"{self._in_features} columns held as {self._scheme.name}: it takes whole rows"
            )
        for start in range(0, len(weight), LOAD_ROWS):
            self._load_rows(weight[start : start + LOAD_ROWS], first_row + start, self.pointer(index))

    def _load_rows(self, weight: Weight, first_row: int, to: int) -> None:
        matrix = self._scheme.quantize(weight) if isinstance(weight, Tensor) else weight
        if not isinstance(matrix, GroupedMatrix) or (matrix.scheme.codes, matrix.scheme.group) != (
            self._scheme.codes,
            self._scheme.group,
        ):
            raise ConfigError(
                f"a weight held as {matrix.scheme.name} cannot be loaded into a layer held as {self._scheme.name}"
            )
        codes, scales = matrix.codes.cpu().contiguous(), dense(matrix.scales.cpu())
        sizes = len(matrix), self._in_features
        if self._scheme.codes == "int8":
            self._library.pack_int8(
                codes.data_ptr(), scales.data_ptr(), to, *sizes, first_row, self._library.threads
            )
            return
        zeros = None if matrix.zeros is None else matrix.zeros.cpu().contiguous()
        self._library.pack_int4(
            codes.data_ptr(), scales.data_ptr(), pointer(zeros), to, *sizes, self.group, first_row,
            self._library.threads,
        )  # fmt: skip

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [len(ids), in_features] of the first matrix as float32."""
        out = torch.empty(len(ids), self._in_features)
        arguments = self.pointer(), ids.data_ptr(), out.data_ptr(), len(ids), self._in_features
        if self._scheme.codes == "int8":
            self._library.gather_int8(*arguments, self._library.threads)
        else:
            self._library.gather_int4(*arguments, self.group, self._library.threads)
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

    def matrix(self) -> LinearMatrix | None:
        """Return the layer as other functions of the library read it, or None if it is more than one product. Valid
        until weights are loaded again."""
        return None

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
        self._method = -1 if narrow else 0  # as decoder.cpp numbers them
        self._weight_pointer = self._panels.pointer()

    def matrix(self) -> LinearMatrix | None:
        if self._reduce is not None:
            return None
        size = self.in_features, self.out_features
        return LinearMatrix(self._weight_pointer, self._bias_pointer, *size, self._method, 0)

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
    """A linear layer that converts its input to a narrow type before it multiplies (native/narrow.h): to bfloat16, or
    to int8 with a scale for each token.

    The norm before the product, and the gate or the residual after it, are part of one call.
    """

    def __init__(
        self,
        kernels: Kernels,
        library: Library,
        in_features: int,
        out_features: int,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
        panels: PackedRows,
        method: int,
    ) -> None:
        super().__init__(kernels, library, in_features, out_features, bias, reduce, device)
        self._panels = panels
        self._weight_pointer = panels.pointer()
        self._method = method
        self._group = panels.group

    def matrix(self) -> LinearMatrix | None:
        if self._reduce is not None:
            return None
        size = self.in_features, self.out_features
        return LinearMatrix(self._weight_pointer, self._bias_pointer, *size, self._method, self._group)

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_weight(self, weight, first_row, first_column)
        self._panels.load(weight, first_row, first_column)

    def _rows(self, ids: Tensor) -> Tensor:
        return self._panels.rows(ids)

    def normed(self, residual: Residual, eps: float) -> Tensor:
        return self._product(self._input(residual.x), 0, residual.norm, eps)

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self._product(self._input(x), 0, norm, eps)

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        check_gate(activation)
        x = self._input(residual.x)
        num_tokens = x.shape[0]
        out = torch.empty(num_tokens, self.out_features // 2)
        if num_tokens:
            self._library.gated_linear(
                x.data_ptr(), self._norm_pointer(residual.norm), self._weight_pointer, self._bias_pointer,
                out.data_ptr(), num_tokens, self.in_features, self.out_features, self._method, self._group, eps,
                GATE_NUMBERS[activation], self._library.threads,
            )  # fmt: skip
        return out

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        """In place, unless the product has to be reduced or normalised first."""
        if self._reduce is not None or norm is not None:
            return super().add_to(residual, x, norm, eps, next_norm)
        hidden, x = dense(residual.x), self._input(x)
        if hidden.shape != (x.shape[0], self.out_features):
            raise ConfigError(
                f"the residual is {list(hidden.shape)}: it must be [{x.shape[0]}, {self.out_features}]"
            )
        self._multiply(x, hidden, add=True)
        return Residual(hidden, next_norm)

    def _product(self, x: Tensor, activation: int, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        out = torch.empty(x.shape[0], self.out_features)
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
        num_tokens = x.shape[0]
        if num_tokens:
            self._library.linear(
                x.data_ptr(), self._norm_pointer(norm), self._weight_pointer, self._bias_pointer,
                out.data_ptr(), num_tokens, self.in_features, self.out_features, self._method, self._group, eps,
                activation, add, self._library.threads,
            )  # fmt: skip

    def _norm_pointer(self, norm: Tensor | None) -> int | None:
        if norm is not None and (norm.shape != (self.in_features,) or norm.dtype != torch.float32):
            raise ConfigError(
                f"a norm's weight is {norm.dtype} {list(norm.shape)}: it must be float32 [{self.in_features}]"
            )
        return pointer(norm)


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def dense(x: Tensor) -> Tensor:
    """Return x as contiguous float32, which the library reads; x itself if it already is."""
    if (
        x.dtype == torch.float32 and x.is_contiguous()
    ):  # sooner known than converted, in every product of a step
        return x
    return x.to(torch.float32).contiguous()
