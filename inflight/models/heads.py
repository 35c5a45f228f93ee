"""Pooling heads: from the hidden states of a text to one vector.

A head is described by data (`HeadLayer`s, read from the checkpoint's files) and then built: BERT's pooler and
classifier, an embedder's `Dense` modules and a decoder's score layer consist of the same few layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.checkpoint.checkpoint import SINGLE, Checkpoint
from inflight.checkpoint.files import inside
from inflight.errors import ModelError, WeightsError
from inflight.layers.attention.backend import Sequences
from inflight.layers.kernels import Kernels, Linear
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.tensors import (
    NormWeight,
    Placement,
    StoredTensor,
    check_tensors,
    fill,
    fill_random,
    read_headers,
    whole_rows,
)

# As sentence-transformers names them.
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """activation(x @ W.T + b)"""

    # The name of its tensors without ".weight" and ".bias"; "2_Dense/linear" is in the folder 2_Dense.
    module: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: str | None = None


@dataclass(frozen=True, slots=True)
class NormLayer:
    """A layer norm."""

    module: str
    in_features: int
    eps: float
    bias: bool = True

    @property
    def out_features(self) -> int:
        return self.in_features


HeadLayer = DenseLayer | NormLayer


def head_size(in_features: int, layers: Sequence[HeadLayer]) -> int:
    """Return the number of outputs of these layers. Raises if their sizes do not match."""
    size = in_features
    for layer in layers:
        if layer.in_features != size:
            raise ModelError(
                f"{layer.module} takes {layer.in_features} features, but the layer before it returns {size}"
            )
        size = layer.out_features
    return size


class Head(Protocol):
    size: int  # numbers in a vector

    def __call__(self, pooled: Tensor) -> Tensor:
        """[B, features] -> [B, size] float32; texts do not affect each other."""


class LayerNorm:
    """The weight and the bias, if any, of a layer norm."""

    def __init__(self, kernels: Kernels, size: int, eps: float, bias: bool, device: torch.device) -> None:
        self._kernels, self._eps = kernels, eps
        self._weight = torch.empty(size, dtype=torch.float32, device=device)
        self._bias = torch.empty(size, dtype=torch.float32, device=device) if bias else None
        self.target = NormWeight(self._weight, size, bias=self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def of_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return the norm of residual + x. May overwrite the residual."""
        return self._kernels.add_layer_norm(residual, x, self._weight, self._bias, self._eps)


class _Dense:
    def __init__(self, layer: DenseLayer, kernels: Kernels, dtype: torch.dtype) -> None:
        self._linear: Linear = kernels.linear(layer.in_features, layer.out_features, dtype, layer.bias)
        self._activation = layer.activation
        self.target = whole_rows(self._linear, layer.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x) if self._activation is None else self._linear.activated(x, self._activation)


class LayeredHead:
    """Implements `Head`: a sequence of layers, possibly empty."""

    def __init__(
        self,
        in_features: int,
        layers: Sequence[HeadLayer],
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.size = head_size(in_features, layers)
        self._kernels = kernels
        self._modules = [layer.module for layer in layers]
        self._layers = [
            _Dense(layer, kernels, dtype)
            if isinstance(layer, DenseLayer)
            else LayerNorm(kernels, layer.in_features, layer.eps, layer.bias, device)
            for layer in layers
        ]

    def __call__(self, pooled: Tensor) -> Tensor:
        x = pooled.to(self._kernels.compute_dtype)
        for layer in self._layers:
            x = layer(x)
        return x.float()

    def placements(self) -> Iterator[Placement]:
        """Yield every tensor that the head needs."""
        for module, layer in zip(self._modules, self._layers, strict=True):
            yield from layer.target.placements(module)


class Pooler:
    """One vector per sequence: its hidden states pooled by each of `modes`, concatenated in that order."""

    def __init__(self, modes: Sequence[str]) -> None:
        self.modes = tuple(modes)

    def picked(self, sequences: Sequences, num_tokens: int) -> Tensor | None:
        """Return the only tokens [B] int64 whose hidden states are needed, or None if all are."""
        if self.modes == ("cls",):
            return _firsts(sequences, num_tokens)
        return _lasts(sequences) if self.modes == ("lasttoken",) else None

    def __call__(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """[T, hidden] -> [B, len(modes) * hidden] float32"""
        return torch.cat([_POOL[mode](hidden, sequences) for mode in self.modes], dim=1)


def _firsts(sequences: Sequences, num_tokens: int) -> Tensor:
    """Return [B] int64. In a batch with spare capacity, the unused sequences start behind the last token."""
    return sequences.starts[:-1].long().clamp(max=num_tokens - 1)


def _lasts(sequences: Sequences) -> Tensor:
    """[B] int64"""
    return sequences.starts[1:].long() - 1


def _weighted_mean(hidden: Tensor, sequences: Sequences) -> Tensor:
    """Weight token i of a text, counted from 1, by i."""
    starts, lengths = sequences.starts, _lengths(sequences)
    tokens = torch.arange(len(hidden), dtype=starts.dtype, device=hidden.device)
    weights = tokens + 1 - starts[torch.searchsorted(starts[1:], tokens, right=True)]
    return _reduced(hidden.float() * weights.unsqueeze(1), sequences, "sum") / (lengths * (lengths + 1) / 2)


def _lengths(sequences: Sequences) -> Tensor:
    """[B, 1] float32"""
    return sequences.starts.diff().float().unsqueeze(1)


def _reduced(hidden: Tensor, sequences: Sequences, how: str) -> Tensor:
    """Reduce [T, n] -> [B, n] float32 over the tokens of each sequence."""
    wide = hidden.float()
    if sequences.lengths is None:
        return torch.segment_reduce(wide, how, offsets=sequences.starts.long(), axis=0, unsafe=True)
    # One by one, so that nothing depends on the rest of the batch; this is also faster than a segmented sum.
    parts = torch.split(wide, sequences.lengths)
    return torch.stack([part.amax(0) if how == "max" else part.sum(0) for part in parts])


_POOL: dict[str, Callable[[Tensor, Sequences], Tensor]] = {
    "cls": lambda hidden, sequences: hidden[_firsts(sequences, len(hidden))].float(),
    "max": lambda hidden, sequences: _reduced(hidden, sequences, "max"),
    "mean": lambda hidden, sequences: _reduced(hidden, sequences, "sum") / _lengths(sequences),
    "mean_sqrt_len_tokens": lambda hidden, sequences: (
        _reduced(hidden, sequences, "sum") / _lengths(sequences).sqrt()
    ),
    "weightedmean": _weighted_mean,
    "lasttoken": lambda hidden, sequences: hidden[_lasts(sequences)].float(),
}


def load_head(
    checkpoint: Checkpoint,
    in_features: int,
    layers: Sequence[HeadLayer],
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
) -> LayeredHead:
    """Return the head with the checkpoint's weights, or dummy weights if the checkpoint was opened without any."""
    stored: dict[str, StoredTensor] = {}
    if checkpoint.weight_files:
        stored = module_headers(checkpoint, (layer.module.partition("/")[0] for layer in layers))
        meta = torch.device("meta")
        described = LayeredHead(in_features, layers, TorchKernels(device=meta), dtype, meta)
        check_tensors(described.placements(), stored)
    head = LayeredHead(in_features, layers, kernels, dtype, device)
    if checkpoint.weight_files:
        fill({placement.name: placement for placement in head.placements()}, stored)
    else:
        fill_random(head.placements(), dtype, device)
    return head


def module_headers(checkpoint: Checkpoint, folders: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the stored tensors of these modules by "folder/name"."""
    stored: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(folders):
        assert checkpoint.folder is not None, "modules are read from a folder"
        path = f"{name}/{SINGLE}"
        if not inside(checkpoint.folder, path, WeightsError).is_file():
            raise WeightsError(
                f"{checkpoint.folder / path} is named in modules.json but is missing or not a file"
            )
        headers = read_headers([checkpoint.folder / path])
        stored |= {f"{name}/{tensor}": header for tensor, header in headers.items()}
    return stored
