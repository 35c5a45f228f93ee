"""Tensors in safetensors files and where they go: what the loading of every model is made of.

Headers are compared with what a model needs before any memory is taken for it: a config may claim anything, and the
headers show what is there. Files are mapped, not read: weights are never held twice.
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

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

# (a tensor, or a run of its rows; the first of these rows)
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
    dummy: float | None = None  # what a made-up one is filled with; None: random numbers


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
    """What is in the files, by name. `known_as`: how a name that older files use is written now."""
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
        raise WeightsError(f"{file} cannot be read, it may be truncated or damaged: {error}") from error


def check_shapes(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor], hint: str = ""
) -> None:
    """Every wanted tensor is there in its shape. `hint`: what may be the cause if one is not."""
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise WeightsError(f"the weights lack {_some(missing)} that config.json calls for{hint}")
    for name, shape in wanted.items():
        found = stored[name]
        if found.shape != shape:
            raise WeightsError(
                f"{name} in {found.file.name} has shape {list(found.shape)}: config.json calls for {list(shape)}"
            )


def check_dtypes(wanted: Iterable[str], stored: Mapping[str, StoredTensor]) -> None:
    for name in wanted:
        found = stored[name]
        if found.dtype not in _ITEM_SIZES:
            raise WeightsError(
                f"{name} in {found.file.name} is stored as {found.dtype}: known are {', '.join(_ITEM_SIZES)}"
            )


def check_surplus(surplus: list[str], hint: str = "") -> None:
    if surplus:
        raise WeightsError(f"the weights have {_some(surplus)} unknown to config.json{hint}")


def layers_hint(said: int, stored: Iterable[str]) -> str:
    """The most common cause of tensors that are missing or too many."""
    found = {match[1] for name in stored if (match := re.search(r"\blayers?\.(\d+)\.", name))}
    if len(found) == said:
        return ""
    return f" (num_hidden_layers is {said}, the weights have {len(found)} layers)"


def fill(
    wanted: Mapping[str, Placement], stored: Mapping[str, StoredTensor], progress: Progress | None = None
) -> None:
    """Copy every wanted tensor to its place, file by file."""
    total = sum(stored[name].num_bytes for name in wanted)
    done = 0
    for file in dict.fromkeys(found.file for found in stored.values()):
        with open_tensors(file) as tensors:
            for name, found in stored.items():
                if found.file != file or name not in wanted:
                    continue
                wanted[name].store(tensors.get_tensor(found.name), 0)
                done += found.num_bytes
                if progress is not None:
                    progress(done, total)


def fill_random(
    placements: Iterable[Placement], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> None:
    """Made-up weights: normal with a small deviation, but for what says otherwise. The same seed, the same model.

    One block of random numbers is cut at ever other places, so that filling runs at the speed of copying.
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
            # By the name, so that a rank that has some of the tensors gets the same as one that has all.
            start = crc32(f"{placement.name} {first}".encode()) % (len(values) - count * width + 1)
            rows = values[start : start + count * width]
            placement.store(rows.view(count, *placement.shape[1:]), first)


def into_rows(load: Callable[[Tensor, int], None], base: int) -> Store:
    """Into rows of a linear layer, or of its bias, from `base` on."""
    return lambda tensor, first: load(tensor, base + first)


def into_tensor(target: Tensor, offset: float = 0.0, first: int = 0) -> Store:
    """Into a tensor as it is, `offset` added. It has the rows from `first` on, and others are passed over."""

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
