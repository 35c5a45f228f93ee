"""Quantized matrices in memory.

`GroupedMatrix` covers most of what is in use. The columns of a row are cut into groups, each with one scale and
possibly one zero point:

    weight = (code - zero) * scale

    codes  bits  stored as                            zero point, if there is one   without one
    fp8    8     float8_e4m3fn [N, K]                 -
    int8   8     int8 [N, K]                          int8                          0
    int4   4     uint8 [N, K / 2], low nibble first   uint8                         8
    fp4    4     the same, indices into FP4_VALUES    -

Scales are float32 [N, groups]. fp4 scales are powers of two, held as uint8 exponents plus 127.

A scheme describes such a matrix; it is hashable, and kernels choose by it. A format that does not fit this pattern
brings its own `Scheme` and `QuantizedMatrix`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from inflight.errors import WeightsError

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_LEAST_SCALE = 1e-12  # of rows that are all zero
_EXPONENT_BIAS = 127
# Shares of a group's range that are tried as the range of its codes: a smaller one clips some weights, but rounds the
# others less.
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


class Scheme(Protocol):
    """How the weights of a layer are quantized in memory. Schemes are hashable, and equal if they mean the same."""

    @property
    def name(self) -> str:
        """Its name for people."""

    @property
    def column_multiple(self) -> int:
        """The matrix can be cut at columns that are multiples of this."""

    def union(self, other: Scheme) -> Scheme | None:
        """Return a scheme that holds rows of both, or None if there is none."""

    def empty(self, num_rows: int, num_columns: int, device: torch.device) -> QuantizedMatrix:
        """Return a matrix of undefined weights."""

    def quantize(self, weight: Tensor) -> QuantizedMatrix:
        """Return the nearest matrix to a plain one [N, K]. Rows do not depend on each other."""


def common_scheme(schemes: Iterable[Scheme | None]) -> Scheme | None:
    """Return a scheme that holds rows of all these, or None if there is none but plain numbers."""
    first, *others = set(schemes) or {None}
    for other in others:
        first = None if first is None or other is None else first.union(other)
    return first


class QuantizedMatrix(ABC):
    """A matrix of weights [num_rows, num_columns] in some scheme."""

    scheme: Scheme
    shape: tuple[int, int]

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights. They are computed in `dtype`, or in float32 if that is more precise."""

    @abstractmethod
    def cut(self, rows: slice | Tensor, columns: slice) -> QuantizedMatrix:
        """Return some rows, a slice or their indices, and a run of columns. It may share memory with this matrix."""

    @abstractmethod
    def copy_rows(self, other: QuantizedMatrix, first_row: int) -> None:
        """Overwrite the rows from `first_row` on with those of a matrix that has as many columns."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | Tensor | tuple[slice | Tensor, slice]) -> QuantizedMatrix:
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        return self.cut(rows, columns)


# The sources that layers are loaded from. Both have a shape and a length, and are cut by slices of rows and columns.
Weight = Tensor | QuantizedMatrix


def to_tensor(weight: Weight) -> Tensor:
    """Return the weights as a tensor, for layers that hold no quantized ones."""
    return weight if isinstance(weight, Tensor) else weight.dequantize()


Codes = Literal["fp8", "int8", "int4", "fp4"]


@dataclass(frozen=True, slots=True)
class GroupScheme:
    """Implements `Scheme` for `GroupedMatrix`."""

    codes: Codes
    group: int = 0  # columns that share a scale; 0: all columns of a row
    zeros: bool = False  # whether groups have zero points
    # Whether the model expects inputs to be quantized, too. Kernels that compute with 16-bit inputs are more precise.
    inputs: Literal["fp8", "int8"] | None = None

    bits: ClassVar[dict[Codes, int]] = {"fp8": 8, "int8": 8, "int4": 4, "fp4": 4}

    @property
    def name(self) -> str:
        group = f" in groups of {self.group}" if self.group else ""
        return f"{self.codes}{group}{' with zero points' if self.zeros else ''}"

    @property
    def column_multiple(self) -> int:
        return self.group or (2 if self.bits[self.codes] == 4 else 1)

    def num_groups(self, num_columns: int) -> int:
        return -(-num_columns // self.group) if self.group else 1

    def union(self, other: Scheme) -> GroupScheme | None:
        return self if self == other else None

    def empty(self, num_rows: int, num_columns: int, device: torch.device) -> GroupedMatrix:
        if self.bits[self.codes] == 4 and num_columns % 2:
            raise WeightsError(f"{num_columns} columns cannot be held as {self.name}: they must be even")
        width = num_columns * self.bits[self.codes] // 8
        groups = num_rows, self.num_groups(num_columns)
        dtype = {"fp8": FP8, "int8": torch.int8}.get(self.codes, torch.uint8)
        return GroupedMatrix(
            self,
            num_columns,
            torch.empty(num_rows, width, dtype=dtype, device=device),
            torch.empty(groups, dtype=torch.uint8 if self.codes == "fp4" else torch.float32, device=device),
            torch.empty(groups, dtype=self._zero_dtype, device=device) if self.zeros else None,
        )

    @property
    def _zero_dtype(self) -> torch.dtype:
        return torch.int8 if self.codes == "int8" else torch.uint8

    def quantize(self, weight: Tensor) -> GroupedMatrix:
        num_columns = weight.shape[1]
        groups = self._grouped(weight.float())  # [N, groups, columns of a group]
        if self.codes == "fp8":
            scales = (groups.abs().amax(-1) / FP8_MAX).clamp(min=_LEAST_SCALE)
            codes = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            return self._matrix(codes, scales, None, num_columns)
        if self.codes == "fp4":
            return self._quantize_fp4(groups, num_columns)
        if self.codes == "int8" and not self.zeros:
            scales = (groups.abs().amax(-1) / 127).clamp(min=_LEAST_SCALE)
            codes = (groups / scales[..., None]).round().clamp(-127, 127).to(torch.int8)
            return self._matrix(codes, scales, None, num_columns)
        return self._quantize_best(groups, num_columns)

    def _grouped(self, weight: Tensor) -> Tensor:
        """Return [N, groups, columns of a group]. A last group that is too short repeats its last column, which changes
        neither its smallest nor its largest weight."""
        num_columns = weight.shape[1]
        group = self.group or num_columns
        missing = -num_columns % group
        if missing:
            weight = torch.cat((weight, weight[:, -1:].expand(-1, missing)), dim=1)
        return weight.view(len(weight), -1, group)

    def _matrix(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, num_columns: int) -> GroupedMatrix:
        flat = codes.flatten(1)[:, :num_columns]
        if self.bits[self.codes] == 4:
            flat = pack_nibbles(flat.to(torch.uint8))
        return GroupedMatrix(self, num_columns, flat.contiguous(), scales, zeros)

    def _quantize_best(self, groups: Tensor, num_columns: int) -> GroupedMatrix:
        """Return the integers whose range has the smallest squared error, chosen for each group."""
        bits = self.bits[self.codes]
        lowest, highest = (-(1 << bits - 1), (1 << bits - 1) - 1) if self.codes == "int8" else (0, 15)
        middle = 0 if self.codes == "int8" else 8
        best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        for share in _RANGES:
            if self.zeros:
                low, high = groups.amin(-1).clamp(max=0) * share, groups.amax(-1).clamp(min=0) * share
                scales = _narrow(((high - low) / (highest - lowest)).clamp(min=_LEAST_SCALE))
                zeros = (lowest - low / scales).round().clamp(lowest, highest)
            else:
                scales = groups.abs().amax(-1) * share / (highest - middle + 0.5)
                scales = _narrow(scales.clamp(min=_LEAST_SCALE))
                zeros = torch.full_like(scales, middle)
            codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(lowest, highest)
            errors = ((codes - zeros[..., None]) * scales[..., None] - groups).square().sum(-1)
            if best is None:
                best = errors, codes, scales, zeros
                continue
            better = errors < best[0]
            best = (
                torch.where(better, errors, best[0]),
                torch.where(better[..., None], codes, best[1]),
                torch.where(better, scales, best[2]),
                torch.where(better, zeros, best[3]),
            )
        assert best is not None
        _, codes, scales, zeros = best
        own_zeros = zeros.to(self._zero_dtype) if self.zeros else None
        return self._matrix(codes.to(self._zero_dtype), scales, own_zeros, num_columns)

    def _quantize_fp4(self, groups: Tensor, num_columns: int) -> GroupedMatrix:
        largest = groups.abs().amax(-1).clamp(min=2.0**-120)
        exponents = (largest / FP4_VALUES[7]).log2().ceil()
        scaled = (groups / exponents.exp2()[..., None]).clamp(-6, 6)
        values = torch.tensor(FP4_VALUES[:8], device=groups.device)
        middles = (values[1:] + values[:-1]) / 2
        codes = torch.bucketize(scaled.abs().contiguous(), middles) + 8 * (scaled < 0)
        return self._matrix(codes, (exponents + _EXPONENT_BIAS).to(torch.uint8), None, num_columns)


class GroupedMatrix(QuantizedMatrix):
    """Codes, scales and zero points, in the types that the module's docstring lists."""

    def __init__(
        self,
        scheme: GroupScheme,
        num_columns: int,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
    ) -> None:
        self.scheme: GroupScheme = scheme
        self.shape = len(codes), num_columns
        self.codes = codes
        self.scales = scales
        self.zeros = zeros

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scales = self.scale_values(wide).repeat_interleave(self._group, 1)[:, : self.shape[1]]
        codes = self._code_values(wide)
        if self.zeros is not None:
            codes = codes - self.zeros.to(wide).repeat_interleave(self._group, 1)[:, : self.shape[1]]
        return codes.mul_(scales).to(dtype)

    @property
    def _group(self) -> int:
        return self.scheme.group or self.shape[1]

    def scale_values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the scales [N, groups] as numbers."""
        if self.scheme.codes != "fp4":
            return self.scales.to(dtype)
        exponents = self.scales.to(torch.int32) - _EXPONENT_BIAS
        return torch.ldexp(torch.ones_like(exponents, dtype=dtype), exponents)

    def _code_values(self, dtype: torch.dtype) -> Tensor:
        """Return the codes [N, K] as numbers; those of int4 relative to 8 if there are no zero points."""
        match self.scheme.codes:
            case "int4":
                codes = unpack_nibbles(self.codes).to(dtype)
                return codes if self.scheme.zeros else codes - 8
            case "fp4":
                values = torch.tensor(FP4_VALUES, dtype=dtype, device=self.codes.device)
                return values[unpack_nibbles(self.codes).int()]
            case _:
                return self.codes.to(dtype, copy=True)

    def cut(self, rows: slice | Tensor, columns: slice) -> GroupedMatrix:
        start, stop, _ = columns.indices(self.shape[1])
        if start == 0 and stop == self.shape[1]:
            zeros = None if self.zeros is None else self.zeros[rows]
            return GroupedMatrix(self.scheme, stop, self.codes[rows], self.scales[rows], zeros)
        check_cut(self.scheme, range(start, stop), self.shape[1])
        half = 8 // self.scheme.bits[self.scheme.codes]
        groups = slice(None)
        if self.scheme.group:
            groups = slice(start // self.scheme.group, -(-stop // self.scheme.group))
        return GroupedMatrix(
            self.scheme,
            stop - start,
            self.codes[rows, start // half : -(-stop // half)],
            self.scales[rows, groups],
            None if self.zeros is None else self.zeros[rows, groups],
        )

    def copy_rows(self, other: QuantizedMatrix, first_row: int) -> None:
        assert isinstance(other, GroupedMatrix)
        rows = slice(first_row, first_row + len(other))
        # Not every device copies float8 between layouts, but all copy bytes.
        self.codes[rows].view(torch.uint8).copy_(other.codes.view(torch.uint8))
        self.scales[rows].copy_(other.scales)
        if self.zeros is not None and other.zeros is not None:
            self.zeros[rows].copy_(other.zeros)


def _narrow(scales: Tensor) -> Tensor:
    """Return scales that bfloat16 can hold: checkpoints store those of groups in 16 bits."""
    return scales.bfloat16().float()


def check_cut(scheme: Scheme, columns: range, num_columns: int) -> None:
    """Raise unless a matrix of `num_columns` columns can be cut to these."""
    multiple = scheme.column_multiple
    if columns.start % multiple or (columns.stop % multiple and columns.stop != num_columns):
        raise WeightsError(
            f"columns {columns.start} to {columns.stop - 1} cannot be cut from a matrix held as {scheme.name}: the "
            f"first and the number of columns of each rank must be multiples of {multiple}"
        )


def pack_nibbles(codes: Tensor) -> Tensor:
    """[N, K] -> [N, K / 2] uint8, low nibble first."""
    if codes.shape[1] % 2:
        raise WeightsError(f"{codes.shape[1]} columns of 4 bits do not fill bytes: they must be even")
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[N, K / 2] uint8 -> [N, K] uint8"""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
