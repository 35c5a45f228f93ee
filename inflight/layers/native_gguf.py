"""Weights in the block types of GGUF files on the compiled CPU library (layers/native/gguf_blocks.cpp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats.gguf import BlockMatrix, BlockRun, BlockScheme, mxfp4_blocks
from inflight.layers.formats.schemes import GroupedMatrix, GroupScheme, Scheme, Weight
from inflight.layers.native_linears import Slabs

_MXFP4 = BlockScheme(("MXFP4",))


def block_scheme(scheme: Scheme | None, in_features: int) -> BlockScheme | None:
    """Return the blocks in which weights of this scheme are held, or None if they are not held in blocks. MXFP4 of
    other checkpoints is the same in another order."""
    if isinstance(scheme, BlockScheme):
        return scheme
    is_mxfp4 = isinstance(scheme, GroupScheme) and (scheme.codes, scheme.group) == ("fp4", 32)
    return _MXFP4 if is_mxfp4 and in_features % 32 == 0 else None


def _blocks_of(weight: Weight, scheme: BlockScheme, in_features: int) -> BlockMatrix:
    """Return whole rows of a weight in blocks."""
    if isinstance(weight, Tensor):
        weight = scheme.quantize(weight)
    elif isinstance(weight, GroupedMatrix) and block_scheme(weight.scheme, weight.shape[1]) == scheme:
        weight = mxfp4_blocks(weight)
    if not isinstance(weight, BlockMatrix) or weight.shape[1] != in_features:
        raise ConfigError(
            f"a weight of shape {list(weight.shape)} held as {weight.scheme.name} cannot be loaded into a layer "
            f"of {in_features} columns held as {scheme.name}"
        )
    return weight


class _BlockPanels:
    """Packs rows in blocks into panels."""

    def __init__(
        self, slabs: Slabs, scheme: BlockScheme, in_features: int, instructions: frozenset[str]
    ) -> None:
        self._slabs = slabs
        self._library = slabs.library
        self._scheme = scheme
        self._in_features = in_features
        self._instructions = instructions

    def _method(self, type_name: str) -> int:
        return self._library.method(type_name, self._instructions)

    def _size(self, num_rows: int, type_name: str) -> tuple[int, int]:
        """Return the panels of rows, and the bytes of each."""
        panel_bytes = self._library.panel_bytes(self._method(type_name), self._in_features, 0)
        return -(-num_rows // self._library.panel), panel_bytes

    def _largest(self) -> str:
        return max(self._scheme.types, key=lambda name: self._size(1, name))

    def _pack(self, run: BlockRun, panels: Tensor) -> None:
        data, library = run.data.to("cpu").contiguous(), self._library
        library.pack_blocks(
            self._method(run.type_name), data.data_ptr(), panels.data_ptr(), len(data), self._in_features,
            library.threads,
        )  # fmt: skip

    def _matrix(self, panels: Tensor, type_name: str, num_rows: int) -> Any:
        method = self._method(type_name)
        return self._library.matrix(panels=panels.data_ptr(), method=method, rows=num_rows, group=0)


@dataclass(frozen=True, slots=True)
class _PackedRun:
    first_row: int
    num_rows: int
    type_name: str
    panels: Tensor  # [panels, bytes] uint8


class BlockRows(_BlockPanels):
    """Implements `PackedMatrices`: the rows of a linear layer in sections, each in blocks of one type, as they were
    loaded."""

    def __init__(
        self,
        slabs: Slabs,
        scheme: BlockScheme,
        out_features: int,
        in_features: int,
        instructions: frozenset[str],
    ) -> None:
        super().__init__(slabs, scheme, in_features, instructions)
        self._num_rows = out_features
        self._sections: list[_PackedRun] = []
        if slabs.device.type == "meta":  # a layer of the right size
            name = self._largest()
            panels = slabs.empty(*self._size(out_features, name))
            self._sections = [_PackedRun(0, out_features, name, panels)]

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None:  # noqa: ARG002
        """Load whole rows. Rows that were loaded before are replaced if they were loaded together."""
        self._slabs.num_moves += 1
        for run in _blocks_of(weight, self._scheme, self._in_features).runs:
            self._replace(_PackedRun(first_row, len(run.data), run.type_name, self._packed(run)))
            first_row += len(run.data)
        if self._is_complete:
            self._sections = self._joined()

    def table(self) -> list[Any]:
        if not self._is_complete:
            raise ConfigError(f"not all of the {self._num_rows} rows of a layer have been loaded")
        return [
            self._matrix(section.panels, section.type_name, section.num_rows) for section in self._sections
        ]

    @property
    def _is_complete(self) -> bool:
        return sum(section.num_rows for section in self._sections) == self._num_rows

    def _packed(self, run: BlockRun) -> Tensor:
        """Return panels: where they stay, if they are the whole layer."""
        size = self._size(len(run.data), run.type_name)
        is_whole = len(run.data) == self._num_rows
        panels = self._slabs.empty(*size) if is_whole else torch.empty(size, dtype=torch.uint8)
        self._pack(run, panels)
        return panels

    def _replace(self, section: _PackedRun) -> None:
        end = section.first_row + section.num_rows
        kept = [
            other
            for other in self._sections
            if other.first_row >= end or other.first_row + other.num_rows <= section.first_row
        ]
        self._sections = sorted([*kept, section], key=lambda other: other.first_row)

    def _joined(self) -> list[_PackedRun]:
        """Return the sections where they stay, neighbours of one type as one. A layer is loaded in few parts, and held
        twice only here."""
        if len(self._sections) == 1:
            return self._sections
        groups: list[list[_PackedRun]] = []
        for section in self._sections:
            previous = groups[-1][-1] if groups else None
            whole_panels = previous is not None and previous.num_rows % self._library.panel == 0
            if previous is None or previous.type_name != section.type_name or not whole_panels:
                groups.append([])
            groups[-1].append(section)
        return [self._as_one(group) for group in groups]

    def _as_one(self, sections: list[_PackedRun]) -> _PackedRun:
        first, num_rows = sections[0], sum(section.num_rows for section in sections)
        size = sum(len(section.panels) for section in sections), first.panels.shape[1]
        panels = self._slabs.empty(*size)
        torch.cat([section.panels for section in sections], out=panels)
        return _PackedRun(first.first_row, num_rows, first.type_name, panels)


class ExpertBlocks(_BlockPanels):
    """Implements `PackedMatrices`: the matrices of some experts in blocks, as they were loaded. A matrix packs a few
    parts row-wise, each in blocks of one type."""

    def __init__(
        self,
        slabs: Slabs,
        scheme: BlockScheme,
        count: int,
        parts: int,
        part_rows: int,
        in_features: int,
        instructions: frozenset[str],
    ) -> None:
        super().__init__(slabs, scheme, in_features, instructions)
        self._part_rows = part_rows
        self._types: list[list[str | None]] = [[None] * parts for _ in range(count)]
        # [count, panels, bytes] uint8 of each part in each of its types; usually there is one.
        self._stacks: dict[tuple[int, str], Tensor] = {}
        if slabs.device.type == "meta":  # experts of the right size
            self._stacks = {(part, self._largest()): self._stack(self._largest()) for part in range(parts)}

    def _stack(self, type_name: str) -> Tensor:
        return self._slabs.empty(len(self._types), *self._size(self._part_rows, type_name))

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None:
        runs = _blocks_of(weight, self._scheme, self._in_features).runs
        part, offset = divmod(first_row, self._part_rows)
        if offset or first_column or len(runs) != 1 or len(runs[0].data) != self._part_rows:
            raise ConfigError(
                f"rows {offset} to {offset + len(weight) - 1} of an expert cannot be loaded alone: experts held as "
                f"{self._scheme.name} take all {self._part_rows} rows of a matrix at once, in one type"
            )
        (run,) = runs
        key = part, run.type_name
        if key not in self._stacks:
            self._stacks[key] = self._stack(run.type_name)
        self._pack(run, self._stacks[key][index])
        self._types[index][part] = run.type_name

    def table(self) -> list[Any]:
        return [
            self._part(index, part, type_name)
            for index, types in enumerate(self._types)
            for part, type_name in enumerate(types)
        ]

    def _part(self, index: int, part: int, type_name: str | None) -> Any:
        if type_name is None:
            raise ConfigError(f"local expert {index} is incomplete: some of its matrices were not loaded")
        return self._matrix(self._stacks[part, type_name][index], type_name, self._part_rows)
