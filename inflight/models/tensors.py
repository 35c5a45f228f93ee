"""Copy tensors from safetensors files into a model; shared by the loaders of all models.

Headers are compared with what the model needs before any memory is allocated: a config may claim anything, but the
headers show what is there. Files are memory-mapped, so weights are never held twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.errors import WeightsError

Progress = Callable[[int, int], None]  # (bytes done, total bytes)

# (a tensor or a run of its rows, the index of the first of these rows)
Store = Callable[[Tensor, int], None]

_ITEM_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
_DUMMY_VALUES = 1 << 20
_DUMMY_STD = 0.02
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor that a model needs."""

    name: str
    shape: tuple[int, ...]
    store: Store
    dummy: float | None = None  # fill value of dummy weights; None: random numbers


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
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read; it may be truncated or damaged: {error}") from error


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor], hint: str = ""
) -> None:
    """Raise unless every tensor is stored in its shape. `hint` names a likely cause."""
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise WeightsError(f"the weights lack {_some(missing)}, required by config.json{hint}")
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise WeightsError(
                f"{name} in {tensor.file.name} has shape {list(tensor.shape)}: config.json requires {list(shape)}"
            )


def check_dtypes(names: Iterable[str], stored: Mapping[str, StoredTensor]) -> None:
    for name in names:
        tensor = stored[name]
        if tensor.dtype not in _ITEM_SIZES:
            raise WeightsError(
                f"{name} in {tensor.file.name} is stored as {tensor.dtype}: it must be one of {', '.join(_ITEM_SIZES)}"
            )


def check_surplus(surplus: list[str], hint: str = "") -> None:
    if surplus:
        raise WeightsError(f"the weights have {_some(surplus)}, which config.json does not account for{hint}")


def layers_hint(num_layers: int, stored: Iterable[str]) -> str:
    """Return the most common cause of missing or surplus tensors: another number of layers."""
    layers = {match[1] for name in stored if (match := re.search(r"\blayers?\.(\d+)\.", name))}
    if len(layers) == num_layers:
        return ""
    return f" (num_hidden_layers is {num_layers}, the weights have {len(layers)} layers)"


def fill(
    placements: Mapping[str, Placement], stored: Mapping[str, StoredTensor], progress: Progress | None = None
) -> None:
    """Copy every tensor to its place, file by file."""
    total = sum(stored[name].num_bytes for name in placements)
    done = 0
    for file in dict.fromkeys(tensor.file for tensor in stored.values()):
        with open_tensors(file) as tensors:
            for name, tensor in stored.items():
                if tensor.file != file or name not in placements:
                    continue
                placements[name].store(tensors.get_tensor(tensor.name), 0)
                done += tensor.num_bytes
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
            # Derived from the name, so that a rank with some of the tensors gets the same as one with all.
            start = crc32(f"{placement.name} {first}".encode()) % (len(values) - count * width + 1)
            rows = values[start : start + count * width]
            placement.store(rows.view(count, *placement.shape[1:]), first)


def into_rows(load: Callable[[Tensor, int], None], base: int) -> Store:
    """Return a store into the rows of a linear layer, or of its bias, from `base` on."""
    return lambda tensor, first: load(tensor, base + first)


def into_tensor(target: Tensor, offset: float = 0.0, first: int = 0) -> Store:
    """Return a store into a plain tensor, adding `offset`. It holds the rows from `first` on; others are skipped."""

    def store(tensor: Tensor, at: int) -> None:
        start, end = max(at, first), min(at + len(tensor), first + len(target))
        if start < end:
            rows = target[start - first : end - first].copy_(tensor[start - at : end - at])
            if offset:
                rows.add_(offset)

    return store


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
