"""Matrices in the block types of GGUF files: a scheme, a matrix and a format.

The tensors of a file differ in type, so the rows of a layer that packs several of them do, too. A matrix is a list of
runs of rows, each in blocks of one type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from inflight.checkpoint.gguf_file import BLOCK_TYPES
from inflight.errors import WeightsError
from inflight.layers.formats.gguf_blocks import BLOCKS, dequantize, quantize_q8_0
from inflight.layers.formats.schemes import GroupedMatrix, QuantizedMatrix, Scheme
from inflight.layers.formats.weight_format import PlainFormat

_ROWS = 4096  # dequantized at a time


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """Implements `Scheme`: blocks of these types."""

    types: tuple[str, ...]  # names, sorted

    @property
    def name(self) -> str:
        return f"GGUF blocks ({', '.join(self.types)})"

    @property
    def column_multiple(self) -> int:
        return lcm(*(BLOCK_TYPES[name].num_values for name in self.types))

    def union(self, other: Scheme) -> BlockScheme | None:
        if not isinstance(other, BlockScheme):
            return None
        return BlockScheme(tuple(sorted({*self.types, *other.types})))

    def empty(self, num_rows: int, num_columns: int, device: torch.device) -> BlockMatrix:
        """Return an empty matrix, sized for the largest type. Copied rows keep their own type."""
        largest = max(self.types, key=lambda name: row_bytes(name, num_columns))
        data = torch.empty(num_rows, row_bytes(largest, num_columns), dtype=torch.uint8, device=device)
        return BlockMatrix([BlockRun(largest, data)], num_columns, self)

    def quantize(self, weight: Tensor) -> BlockMatrix:
        """Return the nearest matrix in Q8_0, the most precise type."""
        return BlockMatrix([BlockRun("Q8_0", quantize_q8_0(weight))], weight.shape[1], self)


def row_bytes(type_name: str, num_columns: int) -> int:
    block = BLOCK_TYPES[type_name]
    if num_columns % block.num_values:
        raise WeightsError(
            f"{num_columns} columns cannot be held as {type_name}: they must be a multiple of {block.num_values}"
        )
    return num_columns // block.num_values * block.num_bytes


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Rows in blocks of one type."""

    type_name: str
    data: Tensor  # [rows, bytes] uint8


class BlockMatrix(QuantizedMatrix):
    """Rows as a GGUF file stores them."""

    def __init__(self, runs: list[BlockRun], num_columns: int, scheme: BlockScheme | None = None) -> None:
        self.scheme: BlockScheme = scheme or BlockScheme(tuple(sorted({run.type_name for run in runs})))
        self.runs = runs
        self.shape = sum(len(run.data) for run in runs), num_columns

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        parts = [
            dequantize(run.data[first : first + _ROWS], run.type_name).to(dtype)
            for run in self.runs
            for first in range(0, len(run.data), _ROWS)
        ]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def cut(self, rows: slice | Tensor, columns: slice) -> BlockMatrix:
        begin, end, _ = columns.indices(self.shape[1])
        runs = []
        for run, part in self._rows(rows):
            if end - begin < self.shape[1]:
                part = part[:, row_bytes(run.type_name, begin) : row_bytes(run.type_name, end)]
            runs.append(BlockRun(run.type_name, part))
        return BlockMatrix(runs, end - begin, self.scheme)

    def _rows(self, rows: slice | Tensor) -> Iterator[tuple[BlockRun, Tensor]]:
        """Yield the runs that have any of these rows, with the blocks of those."""
        if isinstance(rows, Tensor):
            (run,) = self.runs  # matrices of a file have one type
            yield run, run.data[rows]
            return
        (start, stop, step), run_start = rows.indices(len(self)), 0
        for run in self.runs:
            # The first row of the run that the slice selects, however far before the run it starts.
            begin = start - run_start if start >= run_start else (start - run_start) % step
            part = run.data[begin : max(begin, stop - run_start) : step]
            if len(part):
                yield run, part
            run_start += len(run.data)

    def copy_rows(self, other: QuantizedMatrix, first_row: int) -> None:
        assert isinstance(other, BlockMatrix)
        every = slice(None)
        before = self.cut(slice(first_row), every)
        after = self.cut(slice(first_row + len(other), None), every)
        self.runs = [*before.runs, *other.runs, *after.runs]

    def to(self, device: torch.device | None) -> BlockMatrix:
        runs = [BlockRun(run.type_name, run.data.to(device)) for run in self.runs]
        return BlockMatrix(runs, self.shape[1], self.scheme)


def mxfp4_blocks(matrix: GroupedMatrix) -> BlockMatrix:
    """Return fp4 in groups of 32 as blocks of MXFP4, which pair nibbles 16 columns apart instead of neighbours."""
    pairs = matrix.codes.view(len(matrix), -1, 2, 8)  # of each group the first 16 columns, then the others
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    codes = torch.stack((low & 15 | high << 4, low >> 4 | high & 0xF0), dim=-1).flatten(2)
    data = torch.cat((matrix.scales.unsqueeze(-1), codes), dim=-1).flatten(1)
    return BlockMatrix([BlockRun("MXFP4", data)], matrix.shape[1])


class BlockStack:
    """Matrices [count, rows, columns] in blocks of one type: one for each expert."""

    def __init__(self, type_name: str, data: Tensor, shape: tuple[int, int, int]) -> None:
        self._type_name = type_name
        self._data = data.view(shape[0], shape[1], -1)
        self.shape = shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: int | tuple[slice, slice]) -> BlockMatrix | BlockStack:
        """Return one matrix, or some rows of some of them."""
        data = self._data[key]
        if isinstance(key, int):
            return BlockMatrix([BlockRun(self._type_name, data)], self.shape[2])
        return BlockStack(self._type_name, data, (len(data), data.shape[1], self.shape[2]))

    def to(self, device: torch.device | None) -> BlockStack:
        return BlockStack(self._type_name, self._data.to(device), self.shape)


@dataclass(frozen=True)
class BlockFormat(PlainFormat):
    """A tensor of a GGUF file, which is read as a `BlockMatrix`."""

    scheme: BlockScheme  # type: ignore[assignment]


def block_format(type_name: str) -> PlainFormat | None:
    """Return the format of a type that has blocks."""
    return BlockFormat(BlockScheme((type_name,))) if type_name in BLOCKS else None
