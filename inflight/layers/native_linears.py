"""Linear layers on the compiled CPU library."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats.schemes import GroupedMatrix, GroupScheme, Scheme, Weight, to_tensor
from inflight.layers.kernels import GATES, Kernels, Reduce, Residual, check_activation, check_weight
from inflight.layers.native.library import Library
from inflight.layers.torch_kernels import ComposedLinear

LOAD_ROWS = 4096  # rows converted at a time, so that a large weight is never held twice
SLAB_BYTES = 64 << 20


class Slabs:
    """Packs small weights of a device into 64 MB slabs backed by huge pages. On 4 KB pages the prefetcher would stop at
    every page boundary."""

    def __init__(self, library: Library, device: torch.device) -> None:
        self.library = library
        self.device = device
        self.num_moves = 0  # increased when weights that products have read go elsewhere
        self._lock = threading.Lock()
        # Not a tensor: models are searched for tensors, and weights would count twice.
        self._slab = torch.empty(0).untyped_storage()
        self._used = 0

    def empty(self, *size: int) -> Tensor:
        """Return a tensor of undefined bytes."""
        if self.device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        num_bytes = torch.Size(size).numel()
        # Each NUMA node gets a part of each weight, so weights of several nodes share no pages.
        if self.library.num_nodes > 1 or num_bytes > SLAB_BYTES // 2:
            alone = torch.empty(size, dtype=torch.uint8)
            self.library.advise(alone.data_ptr(), num_bytes)
            return alone
        # A slab serves loads inside and outside of inference mode.
        with self._lock, torch.inference_mode(False):
            if self._used + num_bytes > len(self._slab):
                self._slab = torch.empty(SLAB_BYTES, dtype=torch.uint8).untyped_storage()
                self._used = 0
                self.library.advise(self._slab.data_ptr(), SLAB_BYTES)
            part = torch.empty(0, dtype=torch.uint8)
            part.set_(self._slab, self._used, (num_bytes,), (1,))
            self._used += -(-num_bytes // 64) * 64  # whole cache lines
            return part.view(size)


class PackedMatrices(Protocol):
    """Weights as products read them: the sections of a linear layer, or the matrices of a layer's experts."""

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None: ...

    def table(self) -> list[Any]:
        """Return the `Matrix` of each section from the first row on, or of all experts, of each expert as many as share
        its rows."""


class PanelStack:
    """Matrices in panels of equal size (layers/native/narrow.h), which one method multiplies."""

    def __init__(
        self, slabs: Slabs, method: int, out_features: int, in_features: int, group: int, count: int
    ) -> None:
        self._library = library = slabs.library
        self._method = method
        self._shape = out_features, in_features
        self._group = group  # features with one scale; only int4 has groups
        panel_bytes = library.panel_bytes(method, in_features, group)
        self._panels = slabs.empty(count, -(-out_features // library.panel), panel_bytes)

    def table(self) -> list[Any]:
        matrix, num_rows = self._library.matrix, self._shape[0]
        return [
            matrix(panels=panels.data_ptr(), method=self._method, rows=num_rows, group=self._group)
            for panels in self._panels
        ]


class Panels(PanelStack):
    """Matrices [out_features, in_features] in panels, float32 or bfloat16 (layers/native/tile.h)."""

    def __init__(
        self,
        slabs: Slabs,
        method: int,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        count: int = 1,
    ) -> None:
        super().__init__(slabs, method, out_features, in_features, 0, count)
        self._dtype = stored_dtype(dtype)
        library = slabs.library
        self._pack = library.pack_bf16 if self._dtype == torch.bfloat16 else library.pack_f32
        # Columns past the last output take part in products, as do features past the last input.
        if self._panels.shape[2] != in_features * library.panel * self._dtype.itemsize:
            self._panels.zero_()
        elif out_features % library.panel:
            self._panels[:, -1] = 0

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None:
        for start in range(0, len(weight), LOAD_ROWS):
            part = (
                to_tensor(weight[start : start + LOAD_ROWS]).to(device="cpu", dtype=self._dtype).contiguous()
            )
            self._pack(
                part.data_ptr(), self._panels[index].data_ptr(), *part.shape, self._shape[1], first_row + start,
                first_column, self._library.threads,
            )  # fmt: skip


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of plain weights in memory. float16 would be slower to widen than bfloat16, and float32 holds it
    exactly."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def supports_panels(scheme: Scheme | None) -> TypeGuard[GroupScheme]:
    """Return whether `QuantizedPanels` hold weights of this scheme."""
    if not isinstance(scheme, GroupScheme):
        return False
    if scheme.codes == "int8":
        return not scheme.group and not scheme.zeros
    return scheme.codes == "int4" and scheme.group > 0 and scheme.group % 8 == 0


class QuantizedPanels(PanelStack):
    """A matrix of int8 or int4 weights in panels, or several such matrices."""

    def __init__(
        self,
        slabs: Slabs,
        method: int,
        out_features: int,
        in_features: int,
        scheme: GroupScheme,
        count: int = 1,
    ) -> None:
        super().__init__(slabs, method, out_features, in_features, scheme.group, count)
        self._scheme = scheme
        self._panels.zero_()  # columns and features past the last ones take part in products

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None:
        num_columns = self._shape[1]
        if first_column or weight.shape[1] != num_columns:
            raise ConfigError(
                f"columns {first_column} to {first_column + weight.shape[1] - 1} cannot be loaded into a layer of "
                f"{num_columns} columns held as {self._scheme.name}: it takes whole rows"
            )
        for start in range(0, len(weight), LOAD_ROWS):
            to = self._panels[index].data_ptr()
            self._load_rows(weight[start : start + LOAD_ROWS], first_row + start, to)

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
        sizes = matrix.shape
        if self._scheme.codes == "int8":
            self._library.pack_int8(
                codes.data_ptr(), scales.data_ptr(), to, *sizes, first_row, self._library.threads
            )
            return
        zeros = None if matrix.zeros is None else matrix.zeros.cpu().contiguous()
        self._library.pack_int4(
            codes.data_ptr(), scales.data_ptr(), pointer(zeros), to, *sizes, self._group, first_row,
            self._library.threads,
        )  # fmt: skip


class NativeLinear(ComposedLinear):
    """A linear layer over weights in panels. Its method multiplies in float32, or converts the input to a narrow type
    before (layers/native/narrow.h): to bfloat16, or to int8 with a scale for each token.

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
        weights: PackedMatrices,
    ) -> None:
        own_bias = torch.zeros(out_features, device=device) if bias else None
        super().__init__(kernels, in_features, out_features, own_bias, reduce)
        self._library = library
        self._weights = weights
        self._structures: dict[int, Any] = {}  # by the number of outputs, of the weights that are loaded

    @property
    def reduces(self) -> bool:
        return self._reduce is not None

    def structure(self, first_outputs: int | None = None) -> Any:
        """Return the `Linear` that the library reads, or one of its first outputs. It is another one once weights are
        loaded again."""
        count = first_outputs or self.out_features
        if count not in self._structures:
            parts, num_left = [], count
            for part in self._weights.table():
                part.rows = min(part.rows, num_left)
                num_left -= part.rows
                parts += [part] if part.rows else []
            self._structures[count] = self._library.linear_layer(
                parts=self._library.matrix.array(parts),
                num_parts=len(parts),
                bias=pointer(self._bias),
                in_features=self.in_features,
                out_features=count,
            )
        return self._structures[count]

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_weight(self, weight, first_row, first_column)
        self._weights.load(weight, first_row, first_column)
        self._structures.clear()

    def embed(self, ids: Tensor) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"row ids are {ids.tolist()}: they must be in [0, {self.out_features})")
        out = torch.empty(len(ids), self.in_features)
        self._library.gather(
            ctypes.byref(self.structure()), ids.data_ptr(), out.data_ptr(), len(ids), self._library.threads
        )
        return out

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        check_activation(activation)
        return self._product(x, self._library.activations[activation])

    def normed(self, residual: Residual, eps: float) -> Tensor:
        return self._product(residual.x, 0, residual.norm, eps)

    def logits(self, x: Tensor, norm: Tensor, eps: float, count: int | None = None) -> Tensor:
        if count is None or count >= self.out_features:
            return self._product(x, 0, norm, eps)
        x, out = self._input(x), torch.empty(len(x), count)
        self._multiply(x, out, 0, norm, eps, first_outputs=count)
        return out

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        assert activation in GATES, activation  # checked when the layer was made
        x, library = self._input(residual.x), self._library
        num_tokens = x.shape[0]
        out = torch.empty(num_tokens, self.out_features // 2)
        if num_tokens:
            library.gated_linear(
                ctypes.byref(self.structure()), x.data_ptr(), vector_pointer(residual.norm, self.in_features), eps,
                out.data_ptr(), num_tokens, library.activations[activation], library.threads,
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

    def _input(self, x: Tensor) -> Tensor:
        x = dense(x)
        if x.shape[1] != self.in_features:
            raise ConfigError(f"input has {x.shape[1]} features: the layer takes {self.in_features}")
        return x

    def _product(
        self, x: Tensor, activation: int = 0, norm: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        x = self._input(x)
        out = torch.empty(x.shape[0], self.out_features)
        self._multiply(x, out, activation, norm, eps)
        return out

    def _multiply(
        self,
        x: Tensor,
        out: Tensor,
        activation: int = 0,  # none
        norm: Tensor | None = None,
        eps: float = 0.0,
        add: bool = False,
        first_outputs: int | None = None,
    ) -> None:
        num_tokens = x.shape[0]
        if num_tokens:
            self._library.linear(
                ctypes.byref(self.structure(first_outputs)), x.data_ptr(), vector_pointer(norm, self.in_features), eps,
                out.data_ptr(), num_tokens, activation, add, self._library.threads,
            )  # fmt: skip


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def vector_pointer(vector: Tensor | None, size: int, name: str = "a norm") -> int | None:
    """Return the address of a float32 vector of this size. `name` is that of the vector in an error message."""
    if vector is None:
        return None
    if vector.shape != (size,) or vector.dtype != torch.float32 or not vector.is_contiguous():
        raise ConfigError(
            f"{name} has the shape {list(vector.shape)} of {vector.dtype}: it must be float32 [{size}]"
        )
    return vector.data_ptr()


def dense(x: Tensor) -> Tensor:
    """Return x as contiguous float32, which the library reads; x itself if it already is."""
    # Checking is cheaper than converting, and this runs for every product.
    if x.dtype == torch.float32 and x.is_contiguous():
        return x
    return x.to(torch.float32).contiguous()
