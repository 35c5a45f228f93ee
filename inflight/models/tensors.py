"""Tensors in models and in safetensors files: what a model holds, what the files have, and copying one to the other.

Headers are compared with what the model needs before any memory is allocated: a config may claim anything, but the
headers show what is there. Files are memory-mapped, so weights are never held twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import lcm
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.checkpoint.gguf_file import GgufFile, is_gguf
from inflight.errors import WeightsError
from inflight.layers.formats.schemes import Weight, check_cut, to_tensor
from inflight.layers.formats.weight_format import (
    FLOATS,
    PLAIN_FORMAT,
    FormatTensor,
    PlainFormat,
    WeightFormat,
)
from inflight.layers.kernels import Experts, Linear
from inflight.models.gguf_tensors import GgufTensors

Progress = Callable[[int, int], None]  # (bytes done, total bytes)

# (a tensor or a run of its rows, the index of the first of these rows)
Store = Callable[[Tensor, int], None]
WeightOrBias = TypeVar("WeightOrBias", Weight, Tensor)

_ITEM_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
_DUMMY_VALUES = 1 << 20
_DUMMY_STD = 0.02
_SHOWN = 3
_MAX_MISSING = 100_000


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor that a model needs."""

    name: str
    shape: tuple[int, ...]
    store: Store
    dummy: float | None = None  # fill value of dummy weights; None: random numbers
    dummy_scale: float = 1.0  # multiplies these random numbers
    dtypes: tuple[str, ...] = FLOATS  # as which it may be stored
    also: tuple[tuple[int, ...], ...] = ()  # other shapes that it may have
    on_device: bool = False  # whether `store` takes it only on the model's device
    # The part of it that is needed: slices of its dimensions, and the number of the first row (or expert) for `store`.
    needed: tuple[slice, ...] = ()
    first: int = 0


class _MatrixTensors:
    """The tensors of a matrix, or of the matrices of all experts. They are loaded once the last of them is read."""

    def __init__(
        self,
        module: str,
        weights: WeightFormat,
        shape: tuple[int, int],
        rows: range,  # those that are needed
        columns: range,
        load: Callable[[dict[str, Tensor], int], None],
    ) -> None:
        with named_errors(module):
            self.tensors = weights.tensors(*shape)
            if weights.scheme is not None:
                check_cut(weights.scheme, columns, shape[1])
        step = lcm(*(tensor.rows_each for tensor in self.tensors))
        first, end = rows.start // step * step, min(-(-rows.stop // step) * step, shape[0])
        self.rows = range(first, end)  # those that are read: whole rows of each tensor
        self._on_device = weights.scheme is not None or len(self.tensors) > 1
        self._load = load
        self._read: dict[str, Tensor] = {}

    def placement(
        self,
        tensor: FormatTensor,
        name: str,
        shape: tuple[int, ...],
        needed: tuple[slice, ...] = (),  # of the dimensions before those of the tensor
        first: int = 0,
    ) -> Placement:
        if tensor.row_axis is not None:
            rows_per_unit = tensor.rows_each
            rows = slice(self.rows.start // rows_per_unit, -(-self.rows.stop // rows_per_unit))
            needed = (*needed, *(slice(None),) * tensor.row_axis, rows)
        return Placement(
            name,
            shape,
            partial(self._store, tensor.name),
            dtypes=tensor.dtypes,
            also=tensor.also,
            on_device=self._on_device,
            needed=needed,
            first=first,
        )

    def _store(self, name: str, tensor: Tensor, first: int) -> None:
        self._read[name] = tensor
        if len(self._read) == len(self.tensors):
            tensors, self._read = self._read, {}
            self._load(tensors, first)


@contextmanager
def named_errors(module: str) -> Iterator[None]:
    """Add a module's name to errors about its weights."""
    try:
        yield
    except WeightsError as error:
        raise WeightsError(f"{module}: {error}") from None


def _matrix_placements(
    module: str,
    weights: WeightFormat,
    shape: tuple[int, int],
    rows: range,
    columns: range,
    load: Callable[[Weight, int], None],
) -> Iterator[Placement]:
    """Yield the tensors of a checkpoint's matrix; `load` needs these rows and columns of it."""

    def convert(tensors: dict[str, Tensor], first: int) -> None:
        with named_errors(module):
            load(weights.matrix(tensors, shape[1]), first)

    matrix = _MatrixTensors(module, weights, shape, rows, columns, convert)
    for tensor in matrix.tensors:
        yield matrix.placement(tensor, f"{module}.{tensor.name}", tensor.shape, first=matrix.rows.start)


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows [first, first + count) of a checkpoint's tensor, which go to rows from `to` on."""

    first: int
    count: int
    to: int


def rows_in(runs: Iterable[RowRun], count: int, first: int) -> Iterator[tuple[int, slice]]:
    """Yield which of rows [first, first + count) of a checkpoint's tensor belong to a run, counted from the first of
    them, each slice with the row that it goes to."""
    for run in runs:
        start, end = max(run.first, first), min(run.first + run.count, first + count)
        if start < end:
            yield run.to + start - run.first, slice(start - first, end - first)


@dataclass(frozen=True, slots=True)
class LinearRows:
    """The rows and columns of a checkpoint's weight [count, num_columns] that a linear layer holds. A tensor parallel
    rank holds only some of them."""

    linear: Linear
    count: int
    num_columns: int
    runs: tuple[RowRun, ...]
    first_column: int  # the layer's in_features columns start here
    bias: bool  # whether the checkpoint has a bias
    has_bias: bool  # whether the layer holds it: if the ranks' products are summed, only one does
    head_dim: int = 0  # of heads whose halves alternate, row by row, in the checkpoint; 0: they do not

    def placements(self, module: str, weights: WeightFormat = PLAIN_FORMAT) -> Iterator[Placement]:
        """Yield the tensors of the checkpoint's module, whose weights are stored in a format, and where they go."""
        columns = range(self.first_column, self.first_column + self.linear.in_features)
        head_dim = self.head_dim or 1  # heads are read whole
        first = min(run.first for run in self.runs) // head_dim * head_dim
        end = -(-max(run.first + run.count for run in self.runs) // head_dim) * head_dim
        shape = self.count, self.num_columns
        yield from _matrix_placements(module, weights, shape, range(first, end), columns, self.load)
        if self.bias:
            yield Placement(f"{module}.bias", (self.count,), self.load_bias)

    def load(self, weight: Weight, first: int = 0) -> None:
        """Load rows [first, first + len(weight)) of the checkpoint's weight."""
        columns = slice(self.first_column, self.first_column + self.linear.in_features)
        weight = self._in_halves(weight)
        for row, rows in rows_in(self.runs, len(weight), first):
            self.linear.load(weight[rows, columns], row)

    def load_bias(self, bias: Tensor, first: int = 0) -> None:
        if self.has_bias:
            bias = self._in_halves(bias)
            for row, rows in rows_in(self.runs, len(bias), first):
                self.linear.load_bias(bias[rows], row)

    def _in_halves(self, rows: WeightOrBias) -> WeightOrBias:
        """Return whole heads with their first halves first."""
        if not self.head_dim or len(rows) % self.head_dim:  # dummy weights come in parts of any size
            return rows
        order = torch.arange(len(rows)).view(-1, self.head_dim // 2, 2).transpose(1, 2).flatten()
        return rows[order]


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A norm, and the features of the checkpoint's norm that it holds."""

    weight: Tensor
    count: int  # in the checkpoint
    first: int = 0
    offset: float = 0.0  # added to the checkpoint's weight
    bias: Tensor | None = None

    def placements(self, module: str, weights: WeightFormat = PLAIN_FORMAT) -> Iterator[Placement]:  # noqa: ARG002
        store = into_tensor(self.weight, self.offset, self.first)
        yield Placement(f"{module}.weight", (self.count,), store, dummy=1.0 - self.offset)
        if self.bias is not None:
            yield Placement(
                f"{module}.bias", (self.count,), into_tensor(self.bias, first=self.first), dummy=0.0
            )


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor that holds some rows of a checkpoint's tensor, each of which has the same values in another shape."""

    tensor: Tensor
    shape: tuple[int, ...]  # in the checkpoint
    runs: tuple[RowRun, ...]
    dummy: float
    dtypes: tuple[str, ...] = FLOATS  # as which the checkpoint may store it

    def placements(self, name: str, weights: WeightFormat = PLAIN_FORMAT) -> Iterator[Placement]:  # noqa: ARG002
        yield Placement(name, self.shape, self._load, self.dummy, dtypes=self.dtypes)

    def _load(self, tensor: Tensor, first: int) -> None:
        for row, rows in rows_in(self.runs, len(tensor), first):
            part = tensor[rows]
            self.tensor[row : row + len(part)] = part.reshape(len(part), *self.tensor.shape[1:])


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One matrix of every expert, [num_rows, num_columns] in the checkpoint, or several that it packs row-wise."""

    experts: Experts
    parts: tuple[str, ...]  # the experts' matrices, each with `num_rows` rows
    num_experts: int
    num_rows: int
    num_columns: int
    local_experts: range  # the experts that are here,
    rows: range  # and the rows and columns of each part that are here
    columns: range
    transposed: bool = False  # whether a tensor of all experts is [num_experts, num_columns, num_rows]
    interleaved: bool = False  # whether the rows of the parts alternate
    # Experts that a checkpoint with a tensor for each expert stores plain, whatever the format of the others is.
    unquantized: frozenset[int] = frozenset()

    def placements(self, name: str, weights: WeightFormat = PLAIN_FORMAT) -> Iterator[Placement]:
        """Yield the tensors: those of each expert if the name has a place for its number, otherwise those of all."""
        num_parts = len(self.parts)
        matrix_shape = num_parts * self.num_rows, self.num_columns
        rows = range(self.rows.start, (num_parts - 1) * self.num_rows + self.rows.stop)
        if self.interleaved:
            rows = range(num_parts * self.rows.start, num_parts * self.rows.stop)
        if "{}" in name:
            for expert in self.local_experts:
                module, load = name.format(expert), partial(self.load, expert)
                weight_format = PLAIN_FORMAT if expert in self.unquantized else weights
                yield from _matrix_placements(module, weight_format, matrix_shape, rows, self.columns, load)
            return

        def load_all(tensors: dict[str, Tensor], first: int) -> None:
            self._load_all(name, weights, tensors, first, matrix.rows.start)

        matrix = _MatrixTensors(name, weights, matrix_shape, rows, self.columns, load_all)
        local_experts = slice(self.local_experts.start, self.local_experts.stop)
        for stored in matrix.tensors:
            # "weight" is left out: gate_up_proj, gate_up_proj_scale_inv.
            suffix = stored.name.removeprefix("weight").removeprefix("_")
            is_transposed = self._is_transposed(weights)
            tensor = replace(stored, shape=stored.shape[::-1], row_axis=1) if is_transposed else stored
            shape = self.num_experts, *tensor.shape
            full_name = f"{name}_{suffix}" if suffix else name
            yield matrix.placement(tensor, full_name, shape, (local_experts,), self.local_experts.start)

    def _is_transposed(self, weights: WeightFormat) -> bool:
        """Return whether tensors of all experts are transposed. Only plain weights ever are."""
        return self.transposed and isinstance(weights, PlainFormat)

    def _load_all(
        self, name: str, weights: WeightFormat, tensors: dict[str, Tensor], first: int, first_row: int
    ) -> None:
        """Load the matrices of the experts from `first` on: whole matrices, or their rows from `first_row` on."""
        num_rows = len(self.parts) * self.num_rows
        for index in range(len(next(iter(tensors.values())))):
            if first + index in self.local_experts:
                expert_tensors = {key: tensor[index] for key, tensor in tensors.items()}
                if self._is_transposed(weights):
                    expert_tensors = {key: tensor.T for key, tensor in expert_tensors.items()}
                with named_errors(f"{name} of expert {first + index}"):
                    weight = weights.matrix(expert_tensors, self.num_columns)
                    self.load(first + index, weight, first_row if len(weight) < num_rows else 0)

    def load(self, expert: int, weight: Weight, first: int = 0) -> None:
        """Load rows [first, first + len(weight)) of one expert's matrix."""
        columns = slice(self.columns.start, self.columns.stop)
        for index, part in enumerate(self.parts):
            if self.interleaved:
                num_before = self.rows.start - first // len(self.parts)
                rows = weight[index :: len(self.parts)][num_before : num_before + len(self.rows)]
                self.experts.load(part, expert, rows[:, columns])
                continue
            part_start = index * self.num_rows
            start, end = (
                max(part_start + self.rows.start, first),
                min(part_start + self.rows.stop, first + len(weight)),
            )
            if start < end:
                rows = weight[start - first : end - first, columns]
                self.experts.load(part, expert, rows, start - part_start - self.rows.start)


@dataclass(frozen=True, slots=True)
class ExpertBias:
    """The biases of an `ExpertMatrix`, a tensor of all experts."""

    matrix: ExpertMatrix

    def placements(self, name: str, weights: WeightFormat = PLAIN_FORMAT) -> Iterator[Placement]:  # noqa: ARG002
        matrix = self.matrix
        yield Placement(name, (matrix.num_experts, len(matrix.parts) * matrix.num_rows), self._load_all)

    def _load_all(self, biases: Tensor, first: int) -> None:
        matrix = self.matrix
        for expert, bias in enumerate(biases, first):
            if expert not in matrix.local_experts:
                continue
            for index, part in enumerate(matrix.parts):
                part_bias = (
                    bias[index :: len(matrix.parts)]
                    if matrix.interleaved
                    else bias.chunk(len(matrix.parts))[index]
                )
                matrix.experts.load_bias(part, expert, part_bias[matrix.rows.start : matrix.rows.stop])


# The part of a model that a module of a checkpoint is loaded into.
Target = LinearRows | NormWeight | TensorRows | ExpertMatrix | ExpertBias


def whole_tensor(tensor: Tensor, dummy: float) -> TensorRows:
    """Return the target of a tensor that is held as the checkpoint has it."""
    return TensorRows(tensor, tuple(tensor.shape), (RowRun(0, len(tensor), 0),), dummy)


def whole_rows(linear: Linear, bias: bool) -> LinearRows:
    """Return the target of a layer that holds all of the checkpoint's matrix."""
    run = RowRun(0, linear.out_features, 0)
    return LinearRows(linear, linear.out_features, linear.in_features, (run,), 0, bias, bias)


def summed_columns(linear: Linear, features: range, whole: int, bias: bool, holds_bias: bool) -> LinearRows:
    """Return the target of a layer that holds some columns and whose product is summed over the ranks."""
    run = RowRun(0, linear.out_features, 0)
    return LinearRows(linear, linear.out_features, whole, (run,), features.start, bias, bias and holds_bias)


def packed_rows(
    linear: Linear, name: str, parts: Mapping[str, tuple[range, int]], bias: bool
) -> dict[str, LinearRows]:
    """Return the targets of a layer that packs several projections: each part, and all of them as one. A part is given
    as (the features held here, the number of features in the checkpoint)."""
    targets: dict[str, LinearRows] = {}
    runs, count, to = [], 0, 0
    for part, (features, whole) in parts.items():
        run = RowRun(features.start, len(features), to)
        targets[f"{name}.{part}"] = LinearRows(linear, whole, linear.in_features, (run,), 0, bias, bias)
        runs.append(replace(run, first=count + run.first))
        count, to = count + whole, to + len(features)
    targets[name] = LinearRows(linear, count, linear.in_features, tuple(runs), 0, bias, bias)
    return targets


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it."""

    file: Path
    name: str  # in that file
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * _ITEM_SIZES[self.dtype]


def read_headers(files: Iterable[Path], known_as: Callable[[str], str] = str) -> dict[str, StoredTensor]:
    """Return the tensors in the files by name. `known_as` translates names that older files use."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  a file handle, not a mapping
                known = known_as(name)
                if known in stored:
                    raise WeightsError(f"{known} is in {stored[known].file.name} and again in {file.name}")
                header = tensors.get_slice(name)
                stored[known] = StoredTensor(file, name, tuple(header.get_shape()), header.get_dtype())
    return stored


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    if is_gguf(file):
        yield GgufTensors(GgufFile.open_alone(file))
        return
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read; it may be truncated or damaged: {error}") from error


def check_tensors(
    needed: Iterable[Placement],
    stored: Mapping[str, StoredTensor],
    ignored: Iterable[str] = (),
    hint: str = "",
) -> None:
    """Raise unless every needed tensor is stored in its shape, and nothing else but what matches `ignored`.

    `hint` names a likely cause.
    """
    # A config may claim millions of tensors. If there are more than are stored, some of the first ones are missing.
    needed = islice(needed, len(stored) + _MAX_MISSING)
    placements = {placement.name: placement for placement in needed}
    missing = [name for name in placements if name not in stored]
    if missing:
        raise WeightsError(f"the weights lack {_shorten(missing)}, required by config.json{hint}")
    for name, placement in placements.items():
        tensor = stored[name]
        where = f"{name} in {tensor.file.name}"
        if tensor.shape not in (placement.shape, *placement.also):
            raise WeightsError(
                f"{where} has shape {list(tensor.shape)}: config.json requires {list(placement.shape)}"
            )
        if tensor.dtype not in placement.dtypes:
            allowed = ", ".join(placement.dtypes)
            one_of = "one of " if len(placement.dtypes) > 1 else ""
            raise WeightsError(f"{where} is stored as {tensor.dtype}: it must be {one_of}{allowed}")
    unused = [re.compile(pattern) for pattern in ignored]
    surplus = [name for name in stored if name not in placements and not any(p.search(name) for p in unused)]
    if surplus:
        raise WeightsError(
            f"the weights have {_shorten(surplus)}, which config.json does not account for{hint}"
        )


def layers_hint(num_layers: int, stored: Iterable[str]) -> str:
    """Return the most common cause of missing or surplus tensors: another number of layers."""
    layers = {match[1] for name in stored if (match := re.search(r"\b(?:layers?|blk)\.(\d+)\.", name))}
    if len(layers) == num_layers:
        return ""
    return f" (num_hidden_layers is {num_layers}, the weights have {len(layers)} layers)"


def fill(
    placements: Mapping[str, Placement],
    stored: Mapping[str, StoredTensor],
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> None:
    """Copy every tensor to its place, file by file. Tensors that are converted go to `device` first."""
    total = sum(stored[name].num_bytes for name in placements)
    done = 0
    names: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        names.setdefault(tensor.file, []).append(name)
    for file, names_in_file in names.items():
        with open_tensors(file) as tensors:
            for name in filter(placements.__contains__, names_in_file):
                placement, read = placements[name], tensors.get_tensor(stored[name].name)
                if placement.needed:  # nothing else is read from the mapped file
                    read = read[placement.needed if len(placement.needed) > 1 else placement.needed[0]]
                placement.store(read.to(device) if placement.on_device else read, placement.first)
                done += stored[name].num_bytes
                if progress is not None:
                    progress(done, total)


def fill_random(
    placements: Iterable[Placement], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> None:
    """Fill in dummy weights: normally distributed unless a placement says otherwise, reproducible by `seed`.

    Slices of one block of random numbers are copied, so that filling runs at the speed of copying.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(_DUMMY_VALUES, generator=generator) * _DUMMY_STD
    values = values.to(dtype).to(device)
    for placement in placements:
        if placement.dummy is not None:
            placement.store(torch.full(placement.shape, placement.dummy), 0)
            continue
        num_rows, width = placement.shape[0], torch.Size(placement.shape[1:]).numel()
        step = max(1, len(values) // (2 * width))
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            size = count * width
            # Derived from the name, so that a rank with some of the tensors gets the same as one with all.
            start = crc32(f"{placement.name} {first}".encode()) % max(1, len(values) - size + 1)
            rows = values[start : start + size]
            if size > len(values):
                rows = rows.repeat(-(-size // len(values)))[:size]
            if placement.dummy_scale != 1.0:
                rows = rows * placement.dummy_scale
            placement.store(rows.view(count, *placement.shape[1:]), first)


def into_tensor(target: Tensor, offset: float = 0.0, first: int = 0) -> Store:
    """Return a store into a plain tensor, adding `offset`. It holds the rows from `first` on; others are skipped."""

    def store(tensor: Weight, start_row: int) -> None:
        start, end = max(start_row, first), min(start_row + len(tensor), first + len(target))
        if start < end:
            rows = target[start - first : end - first].copy_(
                to_tensor(tensor[start - start_row : end - start_row])
            )
            if offset:
                rows.add_(offset)

    return store


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def tensors_of(root: object) -> Iterator[Tensor]:
    """Yield every tensor that the objects of a model hold, once."""
    seen: set[int] = set()
    stack: list[object] = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, dict):
            stack += item.values()
        elif type(item).__module__.partition(".")[0] == __package__.partition(".")[0]:
            stack += _values_of(item)


def _values_of(item: object) -> list[object]:
    names = [name for base in type(item).__mro__ for name in getattr(base, "__slots__", ())]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in names)]
