"""The interface of weight formats, the plain format, and formats of codes beside scales.

A format describes the tensors of one matrix [num_rows, num_columns] in a checkpoint. Names are relative to the module:
"weight", "weight_scale". Errors say what is wrong with the tensors; the loader adds the name of the module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inflight.errors import WeightsError
from inflight.layers.formats.schemes import FP8, GroupedMatrix, GroupScheme, Scheme, Weight

# As headers of safetensors files name them.
FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class FormatTensor:
    """A tensor that a checkpoint stores for one matrix."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    also: tuple[tuple[int, ...], ...] = ()  # other shapes that mean the same
    # The dimension along which it has the matrix's rows; None: it is the same for all of them.
    row_axis: int | None = 0
    rows_each: int = 1  # rows of the matrix for each index along that dimension


class WeightFormat(ABC):
    """How checkpoints store the weights of linear layers."""

    # How a device holds the weights if it has kernels for that; None: only as plain numbers.
    scheme: Scheme | None

    @abstractmethod
    def tensors(self, num_rows: int, num_columns: int) -> tuple[FormatTensor, ...]:
        """Return the tensors of a matrix. Raises `WeightsError` if the format cannot store one of this size."""

    @abstractmethod
    def matrix(self, tensors: Mapping[str, Tensor], num_columns: int) -> Weight:
        """Return the matrix that the tensors, all on one device, stand for. Raises `WeightsError` if they stand for
        none."""

    def quantizing(self) -> WeightFormat:
        """Return the format of a checkpoint that stores plain weights, to be held as this format's are."""
        return PLAIN_FORMAT if self.scheme is None else QuantizingFormat(self.scheme)


class PlainFormat(WeightFormat):
    """Weights as they are."""

    scheme = None

    def tensors(self, num_rows: int, num_columns: int) -> tuple[FormatTensor, ...]:
        return (FormatTensor("weight", (num_rows, num_columns)),)

    def matrix(self, tensors: Mapping[str, Tensor], num_columns: int) -> Weight:  # noqa: ARG002
        return tensors["weight"]


PLAIN_FORMAT = PlainFormat()


@dataclass(frozen=True)
class QuantizingFormat(PlainFormat):
    """Plain weights that are quantized when they are loaded."""

    scheme: Scheme  # type: ignore[assignment]

    def matrix(self, tensors: Mapping[str, Tensor], num_columns: int) -> Weight:  # noqa: ARG002
        return self.scheme.quantize(tensors["weight"])


@dataclass(frozen=True)
class ScaledFormat(WeightFormat):
    """8-bit codes [N, K] beside scales: one for each block, row, or all of the matrix.

    Where a checkpoint has fixed scales for the inputs of its layers, they are not used: inputs that are quantized at
    all have a scale for each token, which is at least as precise.
    """

    scheme: GroupScheme
    block_rows: int  # 0: all
    block_columns: int  # 0: all
    scale: str = "weight_scale"
    exponents: bool = False  # scales are powers of two, stored as exponents plus 127

    def tensors(self, num_rows: int, num_columns: int) -> tuple[FormatTensor, ...]:
        shape = _blocks(num_rows, self.block_rows), _blocks(num_columns, self.block_columns)
        also: tuple[tuple[int, ...], ...] = ()
        if not self.block_columns:
            also = ((), (1,)) if not self.block_rows else ((num_rows,),)
        types = ("F8_E8M0", "U8", *FLOATS) if self.exponents else FLOATS
        return (
            FormatTensor(
                "weight", (num_rows, num_columns), ("F8_E4M3" if self.scheme.codes == "fp8" else "I8",)
            ),
            FormatTensor(
                self.scale, shape, types, also, 0 if self.block_rows else None, self.block_rows or 1
            ),
        )

    def matrix(self, tensors: Mapping[str, Tensor], num_columns: int) -> Weight:
        codes = tensors["weight"]
        if codes.dtype == FP8 and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise WeightsError("weight contains NaN")
        scales = tensors[self.scale]
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.float().view(_blocks(len(codes), self.block_rows), -1)
        check_scales(scales, self.scale)
        if self.block_rows != 1:
            scales = scales.repeat_interleave(self.block_rows or len(codes), 0)[: len(codes)]
        return GroupedMatrix(self.scheme, num_columns, codes, scales)


@dataclass(frozen=True)
class Mxfp4Format(WeightFormat):
    """FP4 codes in blocks of 32 columns with power-of-two scales, as gpt-oss stores its experts."""

    scheme: GroupScheme = field(default_factory=lambda: GroupScheme("fp4", 32))

    def tensors(self, num_rows: int, num_columns: int) -> tuple[FormatTensor, ...]:
        if num_columns % 32:
            raise WeightsError(f"MXFP4 stores blocks of 32 columns, but the matrix has {num_columns}")
        return (
            FormatTensor("blocks", (num_rows, num_columns // 32, 16), ("U8",)),
            FormatTensor("scales", (num_rows, num_columns // 32), ("U8",)),
        )

    def matrix(self, tensors: Mapping[str, Tensor], num_columns: int) -> Weight:
        scales = tensors["scales"]
        if bool((scales == 255).any()):
            raise WeightsError("scales contains NaN")
        return GroupedMatrix(self.scheme, num_columns, tensors["blocks"].flatten(1), scales)


def check_scales(scales: Tensor, name: str) -> None:
    if not bool(scales.isfinite().all()):
        raise WeightsError(f"{name} contains NaN or infinity")


def _blocks(count: int, size: int) -> int:
    return -(-count // size) if size else 1
