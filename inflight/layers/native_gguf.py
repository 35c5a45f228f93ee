"""Linear layers and experts over the block types of GGUF files on the compiled CPU library (native/gguf_blocks.cpp)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats import GroupedMatrix, GroupScheme, Scheme, Weight
from inflight.layers.formats.gguf import BlockMatrix, BlockRun, BlockScheme, mxfp4_blocks
from inflight.layers.kernels import Kernels, Reduce, Residual, check_weight
from inflight.layers.native_linears import SLABS, CompiledLinear, NarrowLinear
from inflight.native.library import Library, PackedMatrix

# As `Kind` in gguf_blocks.cpp.
KINDS = {
    name: number
    for number, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K"))
}
_METHOD = 1 << 8  # kGgufMethod in narrow.h
_MXFP4 = BlockScheme(("MXFP4",))


class BlockPanels:
    """Rows in blocks of one type, as panels."""

    group = 0  # only int4 has groups of any size

    def __init__(self, library: Library, type_name: str, panels: Tensor, in_features: int) -> None:
        self._library = library
        self._kind = KINDS[type_name]
        self._panels = panels
        self._in_features = in_features

    def pointer(self, index: int = 0) -> int:
        return self._panels[index].data_ptr()

    def load(self, weight: Weight, first_row: int, first_column: int, index: int = 0) -> None:  # noqa: ARG002
        raise ConfigError("rows in blocks are packed when they are created")

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows [len(ids), in_features] as float32."""
        out = torch.empty(len(ids), self._in_features)
        self._library.gguf_gather(
            self._kind, self.pointer(), ids.data_ptr(), out.data_ptr(), len(ids), self._in_features,
            self._library.threads,
        )  # fmt: skip
        return out


def method_of(type_name: str, instruction: int) -> int:
    """Return the number of the method of a block type, as in narrow.h."""
    return _METHOD * (1 + KINDS[type_name]) + instruction


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


def _panel_bytes(library: Library, type_name: str, in_features: int) -> int:
    size: int = library.panel_bytes(in_features, method_of(type_name, 0), 0)
    return size


def _pack(library: Library, run: BlockRun, in_features: int, panels: Tensor) -> None:
    data = run.data.to("cpu").contiguous()
    library.gguf_pack(
        KINDS[run.type_name], data.data_ptr(), panels.data_ptr(), len(data), in_features, library.threads
    )


@dataclass(frozen=True, slots=True)
class _Section:
    first_row: int
    num_rows: int
    type_name: str
    panels: Tensor  # [panels, bytes] uint8


class BlockLinear(CompiledLinear):
    """A linear layer over sections of rows, each in blocks of one type, as they were loaded."""

    def __init__(
        self,
        kernels: Kernels,
        library: Library,
        in_features: int,
        out_features: int,
        scheme: BlockScheme,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
        instruction: int,
    ) -> None:
        super().__init__(kernels, library, in_features, out_features, bias, reduce, device)
        self._scheme = scheme
        self._instruction = instruction
        self._sections: list[_Section] = []
        self._parts: list[NarrowLinear] = []
        if device.type == "meta":  # a layer of the right size
            sizes = [_panel_bytes(library, name, in_features) for name in scheme.types]
            panels = -(-out_features // library.panel)
            self._size = torch.empty(panels, max(sizes), dtype=torch.uint8, device=device)

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        """Load whole rows. Rows that were loaded before are replaced if they were loaded together."""
        check_weight(self, weight, first_row, first_column)
        for run in _blocks_of(weight, self._scheme, self.in_features).runs:
            self._replace(_Section(first_row, len(run.data), run.type_name, self._packed(run)))
            first_row += len(run.data)
        self._parts = []
        if self._is_complete:
            self._sections = self._joined()

    @property
    def _is_complete(self) -> bool:
        return sum(section.num_rows for section in self._sections) == self.out_features

    def _packed(self, run: BlockRun) -> Tensor:
        panels = self._memory(len(run.data), run.type_name)
        _pack(self._library, run, self.in_features, panels)
        return panels

    def _memory(self, num_rows: int, type_name: str) -> Tensor:
        """Return memory for panels: where they stay, if they are the whole layer."""
        library = self._library
        size = -(-num_rows // library.panel), _panel_bytes(library, type_name, self.in_features)
        if num_rows == self.out_features:
            return SLABS.empty(library, size, torch.uint8, torch.device("cpu"))
        return torch.empty(size, dtype=torch.uint8)

    def _replace(self, section: _Section) -> None:
        end = section.first_row + section.num_rows
        kept = [
            other
            for other in self._sections
            if other.first_row >= end or other.first_row + other.num_rows <= section.first_row
        ]
        self._sections = sorted([*kept, section], key=lambda other: other.first_row)

    def _ready(self) -> list[NarrowLinear]:
        """Return the sections as layers."""
        if not self._parts:
            if not self._is_complete:
                raise ConfigError(f"not all of the {self.out_features} rows of a layer have been loaded")
            self._parts = [self._part(section) for section in self._sections]
        return self._parts

    def _part(self, section: _Section) -> NarrowLinear:
        panels = BlockPanels(self._library, section.type_name, section.panels, self.in_features)
        has_bias, method = self._bias is not None, method_of(section.type_name, self._instruction)
        part = NarrowLinear(
            self._kernels,
            self._library,
            self.in_features,
            section.num_rows,
            has_bias,
            None,
            section.panels.device,
            panels,
            method,
        )
        if self._bias is not None:
            part.load_bias(self._bias[section.first_row : section.first_row + section.num_rows])
        return part

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        super().load_bias(bias, first_row)
        self._parts = []

    def _joined(self) -> list[_Section]:
        """Return the sections where they stay, neighbours of one type as one. A layer is loaded in few parts, and held
        twice only here."""
        if len(self._sections) == 1:
            return self._sections
        groups: list[list[_Section]] = []
        for section in self._sections:
            last = groups[-1][-1] if groups else None
            whole_panels = last is not None and last.num_rows % self._library.panel == 0
            if last is None or last.type_name != section.type_name or not whole_panels:
                groups.append([])
            groups[-1].append(section)
        return [self._as_one(group) for group in groups]

    def _as_one(self, sections: list[_Section]) -> _Section:
        first, num_rows = sections[0], sum(section.num_rows for section in sections)
        size = sum(len(section.panels) for section in sections), first.panels.shape[1]
        panels = SLABS.empty(self._library, size, torch.uint8, torch.device("cpu"))
        torch.cat([section.panels for section in sections], out=panels)
        return _Section(first.first_row, num_rows, first.type_name, panels)

    def normed(self, residual: Residual, eps: float) -> Tensor:
        return _beside([part.normed(residual, eps) for part in self._ready()])

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return _beside([part.logits(x, norm, eps) for part in self._ready()])

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        parts = self._ready()
        if len(parts) == 1:
            return parts[0].gated(residual, eps, activation)
        return super().gated(residual, eps, activation)

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        parts = self._ready()
        if len(parts) == 1 and self._reduce is None:
            return parts[0].add_to(residual, x, norm, eps, next_norm)
        return super().add_to(residual, x, norm, eps, next_norm)

    def _product(self, x: Tensor, activation: int) -> Tensor:
        return _beside([part._product(x, activation) for part in self._ready()])

    def _rows(self, ids: Tensor) -> Tensor:
        parts = self._ready()
        if len(parts) == 1:
            return parts[0]._rows(ids)
        out = torch.empty(len(ids), self.in_features)
        for section, part in zip(self._sections, parts, strict=True):
            own = (ids >= section.first_row) & (ids < section.first_row + section.num_rows)
            out[own] = part._rows((ids[own] - section.first_row).contiguous())
        return out


def _beside(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class ExpertBlocks:
    """Implements `PackedMatrices`: the matrices of some experts in blocks, as they were loaded. A matrix packs a few
    parts row-wise, each in blocks of one type."""

    def __init__(
        self,
        library: Library,
        count: int,
        parts: int,
        part_rows: int,
        in_features: int,
        scheme: BlockScheme,
        device: torch.device,
        instruction: int,
    ) -> None:
        self._library = library
        self._part_rows = part_rows
        self._in_features = in_features
        self._scheme = scheme
        self._instruction = instruction
        self._types: list[list[str | None]] = [[None] * parts for _ in range(count)]
        # [count, panels, bytes] uint8 of each part in each of its types; usually there is one.
        self._stacks: dict[tuple[int, str], Tensor] = {}
        if device.type == "meta":  # experts of the right size
            largest = max(scheme.types, key=lambda name: _panel_bytes(library, name, in_features))
            self._stacks = {(part, largest): self._stack(largest, device) for part in range(parts)}

    def _stack(self, type_name: str, device: torch.device) -> Tensor:
        num_panels = -(-self._part_rows // self._library.panel)
        size = len(self._types), num_panels, _panel_bytes(self._library, type_name, self._in_features)
        return SLABS.empty(self._library, size, torch.uint8, device)

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
            self._stacks[key] = self._stack(run.type_name, torch.device("cpu"))
        _pack(self._library, run, self._in_features, self._stacks[key][index])
        self._types[index][part] = run.type_name

    def table(self) -> list[PackedMatrix]:
        return [
            self._matrix(index, part, type_name)
            for index, types in enumerate(self._types)
            for part, type_name in enumerate(types)
        ]

    def _matrix(self, index: int, part: int, type_name: str | None) -> PackedMatrix:
        if type_name is None:
            raise ConfigError(
                f"not all of the matrices of expert {index} of those held here have been loaded"
            )
        pointer = self._stacks[part, type_name][index].data_ptr()
        return PackedMatrix(pointer, method_of(type_name, self._instruction), 0)
