"""Weights into a decoder, one tensor at a time: from safetensors files, or made up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inflight.attention.backend import AttentionBackend
from inflight.errors import WeightsError
from inflight.layers.kernels import Kernels
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoder import Decoder
from inflight.models.families import decoder_spec
from inflight.models.placement import Placement, placements
from inflight.models.spec import DecoderSpec

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

_ITEM_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
_DUMMY_VALUES = 1 << 20
_DUMMY_STD = 0.02
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor as the header of its file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_decoder(
    checkpoint: Checkpoint,
    kernels: Kernels,
    attention: AttentionBackend[Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_position: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> Decoder:
    """The checkpoint's decoder with its weights in place."""
    spec = decoder_spec(checkpoint.config)
    if load_format != "dummy":
        _check_sizes(spec, _read_headers(checkpoint.weight_files))
    decoder = Decoder(spec, kernels, attention, dtype, device, max_position)
    if load_format == "dummy":
        fill_dummy(decoder, seed)
    else:
        load_weights(decoder, checkpoint, progress)
    return decoder


def load_weights(decoder: Decoder, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Fill the decoder from the checkpoint's files.

    Headers are compared with what the decoder needs before any weight is read, so that a checkpoint that
    does not fit its config fails at once. Files are mapped, not read: weights are never held twice.
    """
    stored = _read_headers(checkpoint.weight_files)
    variant = _variant(decoder.spec, stored)
    wanted = {placement.name: placement for placement in placements(decoder, variant)}
    _compare(decoder.spec, wanted, stored)
    total = sum(_num_bytes(stored[name]) for name in wanted)
    done = 0
    for file in checkpoint.weight_files:
        with _open(file) as tensors:
            for name, found in stored.items():
                if found.file != file or name not in wanted:
                    continue
                wanted[name].store(tensors.get_tensor(name), 0)
                done += _num_bytes(found)
                if progress is not None:
                    progress(done, total)


def fill_dummy(decoder: Decoder, seed: int = 0) -> None:
    """Random weights: norms of 1, all else normal with a small deviation. The same seed, the same model.

    One block of random numbers is cut at ever other places, so that filling runs at the speed of copying.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(_DUMMY_VALUES, generator=generator) * _DUMMY_STD
    values = values.to(decoder.dtype).to(decoder.device)
    start = 0
    for placement in placements(decoder):
        if placement.is_norm:
            placement.store(torch.full(placement.shape, 1.0 - decoder.spec.norm_offset), 0)
            continue
        num_rows, width = placement.shape[0], torch.Size(placement.shape[1:]).numel()
        step = max(1, len(values) // (2 * width))
        for first in range(0, num_rows, step):
            count = min(step, num_rows - first)
            start = (start + 7919) % (len(values) - count * width + 1)
            rows = values[start : start + count * width]
            placement.store(rows.view(count, *placement.shape[1:]), first)


def _read_headers(files: tuple[Path, ...]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  a file handle, not a mapping
                if name in stored:
                    raise WeightsError(f"{name} is in {stored[name].file.name} and again in {file.name}")
                header = tensors.get_slice(name)
                stored[name] = _Stored(file, tuple(header.get_shape()), header.get_dtype())
    return stored


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read, it may be truncated or damaged: {error}") from error


def _check_sizes(spec: DecoderSpec, stored: dict[str, _Stored]) -> None:
    """Every matrix that a config calls for is there in its size. Before any memory is taken for it: a config may
    claim anything, and the headers show what is there. What is left for later (norms, biases) is small."""
    query, kv, hidden, inner = spec.query_size, spec.kv_size, spec.hidden_size, spec.intermediate_size
    shapes = {
        "attention.qkv": (query + 2 * kv, hidden),
        "attention.qkv.q": (query, hidden),
        "attention.qkv.k": (kv, hidden),
        "attention.qkv.v": (kv, hidden),
        "attention.output": (hidden, query),
        "mlp.gate_up": (2 * inner, hidden),
        "mlp.gate_up.gate": (inner, hidden),
        "mlp.gate_up.up": (inner, hidden),
        "mlp.down": (hidden, inner),
    }
    prefix = spec.names.prefixes[_variant(spec, stored)]
    modules = [(module, shapes[target]) for module, target in spec.names.layer.items() if target in shapes]
    wanted = {prefix + spec.names.embedding: (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        wanted |= {f"{prefix}layers.{index}.{module}.weight": shape for module, shape in modules}
    _check_shapes(spec, wanted, stored)


def _check_shapes(
    spec: DecoderSpec, wanted: Mapping[str, tuple[int, ...]], stored: dict[str, _Stored]
) -> None:
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise WeightsError(
            f"the weights lack {_some(missing)} that config.json calls for{_layers(spec, stored)}"
        )
    for name, shape in wanted.items():
        found = stored[name]
        if found.shape != shape:
            raise WeightsError(
                f"{name} in {found.file.name} has shape {list(found.shape)}: config.json calls for {list(shape)}"
            )


def _variant(spec: DecoderSpec, stored: dict[str, _Stored]) -> int:
    names = spec.names
    present = (i for i, prefix in enumerate(names.prefixes) if prefix + names.embedding in stored)
    return next(present, 0)


def _compare(spec: DecoderSpec, wanted: dict[str, Placement], stored: dict[str, _Stored]) -> None:
    """Every wanted tensor is there in the right shape, and nothing is there that the config does not know."""
    _check_shapes(spec, {name: placement.shape for name, placement in wanted.items()}, stored)
    for name in wanted:
        found = stored[name]
        if found.dtype not in _ITEM_SIZES:
            raise WeightsError(
                f"{name} in {found.file.name} is stored as {found.dtype}: known are {', '.join(_ITEM_SIZES)}"
            )
    copies = set(spec.names.heads) if spec.tied_embeddings else set()
    ignored = re.compile("|".join(spec.names.ignored))
    surplus = [
        name for name in stored if name not in wanted and name not in copies and not ignored.search(name)
    ]
    if surplus:
        raise WeightsError(f"the weights have {_some(surplus)} unknown to config.json{_layers(spec, stored)}")
    for name in copies & stored.keys():
        _check_copy(next(iter(wanted)), name, stored)


def _check_copy(embedding: str, head: str, stored: dict[str, _Stored]) -> None:
    """A tied checkpoint may hold the table twice, if both say the same."""
    with _open(stored[embedding].file) as first, _open(stored[head].file) as second:
        alike = stored[embedding].dtype == stored[head].dtype
        if not alike or not torch.equal(first.get_tensor(embedding), second.get_tensor(head)):
            raise WeightsError(
                f"config.json ties {head} to {embedding}, but the weights have both and they differ: "
                'set "tie_word_embeddings" to false'
            )


def _layers(spec: DecoderSpec, stored: dict[str, _Stored]) -> str:
    """A hint for the most common cause."""
    found = {int(match[1]) for name in stored if (match := re.search(r"\blayers\.(\d+)\.", name))}
    said = spec.num_layers
    return (
        f" (num_hidden_layers is {said}, the weights have {len(found)} layers)" if len(found) != said else ""
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _num_bytes(found: _Stored) -> int:
    return torch.Size(found.shape).numel() * _ITEM_SIZES[found.dtype]
