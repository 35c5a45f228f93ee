"""The encoder, one class for all families, built from a spec, kernels and attention within sequences; its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.checkpoint.checkpoint import Checkpoint
from inflight.layers.attention.backend import SequenceAttention, SequenceLayer, Sequences
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.encoders.families import EncoderHead
from inflight.models.encoders.spec import EncoderSpec
from inflight.models.heads import Head, LayeredHead, LayerNorm, Pooler, module_headers
from inflight.models.tensors import (
    Placement,
    Progress,
    StoredTensor,
    Target,
    check_tensors,
    fill,
    fill_random,
    into_tensor,
    layers_hint,
    packed_rows,
    read_headers,
    whole_rows,
)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """B texts side by side, T tokens in total."""

    token_ids: Tensor  # [T] int64, on GPUs int32, like the others
    positions: Tensor  # [T] from 0 in each text
    segments: Tensor | None  # [T] which text of a pair a token belongs to; None: always the first
    sequences: Sequences


class EncoderLayer:
    """Attention, then an MLP. Norms come before each, or after each over the sum with its input."""

    def __init__(
        self,
        spec: EncoderSpec,
        index: int,
        kernels: Kernels,
        attention: SequenceAttention,
        dtype: torch.dtype,
        device: torch.device,
        cos_sin: Tensor | None,
    ) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._spec, self._kernels, self._attention = spec, kernels, attention
        self._layer = SequenceLayer(
            spec.num_heads, spec.head_dim, spec.head_dim**-0.5, spec.windows[index], cos_sin
        )
        self._qkv: Linear = kernels.linear(hidden, 3 * hidden, dtype, spec.attention_bias)
        self._output: Linear = kernels.linear(hidden, hidden, dtype, spec.attention_bias)
        self._up: Linear = kernels.linear(hidden, 2 * inner if spec.gated else inner, dtype, spec.mlp_bias)
        self._down: Linear = kernels.linear(inner, hidden, dtype, spec.mlp_bias)
        self._attention_norm: LayerNorm | None = None
        if spec.has_attention_norm(index):
            self._attention_norm = LayerNorm(kernels, hidden, spec.norm_eps, spec.norm_bias, device)
        self._mlp_norm = LayerNorm(kernels, hidden, spec.norm_eps, spec.norm_bias, device)

    def __call__(self, x: Tensor, texts: TextBatch, picked: Tensor | None) -> Tensor:
        """[T, hidden] -> [T, hidden]; with `picked` [B], token indices, only their rows. May overwrite x."""
        return (
            self._norm_first(x, texts, picked) if self._spec.norm_first else self._norm_last(x, texts, picked)
        )

    def _norm_last(self, x: Tensor, texts: TextBatch, picked: Tensor | None) -> Tensor:
        assert self._attention_norm is not None
        attended = self._attend(x, texts)
        if picked is not None:
            x, attended = x[picked], attended[picked]
        x = self._attention_norm.of_sum(x, self._output(attended))
        return self._mlp_norm.of_sum(x, self._down(self._inner(x)))

    def _norm_first(self, x: Tensor, texts: TextBatch, picked: Tensor | None) -> Tensor:
        normed = x if self._attention_norm is None else self._attention_norm(x)
        attended = self._attend(normed, texts)
        if picked is not None:
            x, attended = x[picked], attended[picked]
        x = self._output.add_to(Residual(x, None), attended, None, 0.0, None).x
        return self._down.add_to(Residual(x, None), self._inner(self._mlp_norm(x)), None, 0.0, None).x

    def _attend(self, x: Tensor, texts: TextBatch) -> Tensor:
        return self._attention.attend(self._qkv(x), self._layer, texts.sequences, texts.positions)

    def _inner(self, x: Tensor) -> Tensor:
        activation = self._spec.activation
        return (
            self._kernels.gate(self._up(x), activation)
            if self._spec.gated
            else self._up.activated(x, activation)
        )

    def targets(self) -> dict[str, Target]:
        """Return the load targets by the names that `EncoderNames.layer` uses."""
        spec = self._spec
        part = range(spec.hidden_size), spec.hidden_size
        targets: dict[str, Target] = {
            **packed_rows(self._qkv, "qkv", {"q": part, "k": part, "v": part}, spec.attention_bias),
            "output": whole_rows(self._output, spec.attention_bias),
            "up": whole_rows(self._up, spec.mlp_bias),
            "down": whole_rows(self._down, spec.mlp_bias),
            "mlp_norm": self._mlp_norm.target,
        }
        if self._attention_norm is not None:
            targets["attention_norm"] = self._attention_norm.target
        return targets


class Encoder:
    """Texts to hidden states. `dtype` is the storage type of the weights; `max_position`, the longest text that will be
    served, sizes the rotary tables."""

    def __init__(
        self,
        spec: EncoderSpec,
        kernels: Kernels,
        attention: SequenceAttention,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int,
    ) -> None:
        self.spec, self.kernels, self.attention = spec, kernels, attention
        self.dtype, self.device = dtype, device
        hidden = spec.hidden_size
        self._tokens = torch.empty(spec.vocab_size, hidden, dtype=dtype, device=device)
        self._positions = torch.empty(spec.num_positions, hidden, dtype=dtype, device=device)
        self._segments = torch.empty(spec.num_segments, hidden, dtype=dtype, device=device)
        self._embedding_norm = self._norm()
        tables = [rope.table(max_position, device) for rope in spec.ropes]
        self._layers = [
            EncoderLayer(
                spec, index, kernels, attention, dtype, device, None if rope is None else tables[rope]
            )
            for index, rope in enumerate(spec.layer_ropes)
        ]
        self._final_norm = self._norm() if spec.names.final_norm else None

    def _norm(self) -> LayerNorm:
        spec = self.spec
        return LayerNorm(self.kernels, spec.hidden_size, spec.norm_eps, spec.norm_bias, self.device)

    def forward(self, texts: TextBatch, picked: Tensor | None = None) -> Tensor:
        """Return the hidden states [T, hidden_size]; with `picked` [B], token indices, only theirs: the last layer's
        output for other tokens is not needed."""
        x = self._embed(texts)
        last_layer = self._layers[-1]
        for layer in self._layers:
            x = layer(x, texts, picked if layer is last_layer else None)
        return x if self._final_norm is None else self._final_norm(x)

    def _embed(self, texts: TextBatch) -> Tensor:
        """[T, hidden_size]"""
        spec, kernels = self.spec, self.kernels
        x = kernels.embed(self._tokens, texts.token_ids)
        added = []
        if spec.num_positions:
            added.append(kernels.embed(self._positions[spec.first_position :], texts.positions))
        if spec.num_segments > 1 and texts.segments is not None:
            added.append(kernels.embed(self._segments, texts.segments))
        elif spec.num_segments:
            added.append(self._segments[:1].to(kernels.compute_dtype).expand_as(x))
        if not added:
            return self._embedding_norm(x)
        for part in added[:-1]:
            x = kernels.add(x, part)
        return self._embedding_norm.of_sum(x, added[-1].contiguous())

    def placements(self, prefix: str) -> Iterator[Placement]:
        """Yield every tensor that the encoder needs, from a checkpoint whose names begin with `prefix`."""
        names = self.spec.names
        tables = {
            names.tokens: self._tokens,
            names.positions: self._positions,
            names.segments: self._segments,
        }
        for name, table in tables.items():
            if len(table):
                yield Placement(f"{prefix}{name}.weight", tuple(table.shape), into_tensor(table))
        yield from self._embedding_norm.target.placements(prefix + names.embedding_norm)
        for index, layer in enumerate(self._layers):
            targets = layer.targets()
            for module, target in names.layer.items():
                if target != "attention_norm" or self.spec.has_attention_norm(index):
                    yield from targets[target].placements(f"{prefix}{names.layers}.{index}.{module}")
        if self._final_norm is not None:
            yield from self._final_norm.target.placements(prefix + names.final_norm)


@dataclass(frozen=True, slots=True)
class PoolingEncoder:
    """An encoder and its head: one vector per text."""

    encoder: Encoder
    pooler: Pooler
    head: Head

    @property
    def dtype(self) -> torch.dtype:
        return self.encoder.dtype

    def vectors(self, texts: TextBatch) -> Tensor:
        """[B, head.size] float32"""
        picked = self.pooler.picked(texts.sequences, len(texts.token_ids))
        hidden = self.encoder.forward(texts, picked)
        return self.head(hidden if picked is not None else self.pooler(hidden, texts.sequences))


def load_encoder(
    checkpoint: Checkpoint,
    spec: EncoderSpec,
    head: EncoderHead,
    kernels: Kernels,
    attention: SequenceAttention,
    head_kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_position: int,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> PoolingEncoder:
    """Return the checkpoint's encoder and head with their weights loaded. Nothing is allocated before the headers are
    known to hold exactly the tensors that are needed."""
    dummy = load_format == "dummy"
    stored = {} if dummy else _read_headers(checkpoint, head)
    prefix = _prefix(spec, stored)

    def make(kernels: Kernels, head_kernels: Kernels, device: torch.device) -> tuple[Encoder, LayeredHead]:
        in_features = spec.hidden_size * len(head.pooling)
        layers = LayeredHead(in_features, head.layers, head_kernels, head_kernels.compute_dtype, device)
        return Encoder(spec, kernels, attention, dtype, device, max_position), layers

    if not dummy:
        meta = TorchKernels(device="meta")
        encoder, layers = make(meta, meta, torch.device("meta"))
        needed = (*encoder.placements(prefix), *layers.placements())
        ignored = (*spec.names.ignored, *head.unused)
        check_tensors(needed, stored, ignored, layers_hint(spec.num_layers, stored))
    encoder, layers = make(kernels, head_kernels, device)
    placed = [*encoder.placements(prefix), *layers.placements()]
    if dummy:
        fill_random(placed, dtype, device, seed)
    else:
        fill({placement.name: placement for placement in placed}, stored, progress)
    return PoolingEncoder(encoder, Pooler(head.pooling), layers)


def _read_headers(checkpoint: Checkpoint, head: EncoderHead) -> dict[str, StoredTensor]:
    """Read the headers of the encoder's files and of the head layers' folders, whose names begin with the folder's."""
    stored = read_headers(checkpoint.weight_files, _known_as)
    folders = (layer.module.partition("/")[0] for layer in head.layers if "/" in layer.module)
    return stored | module_headers(checkpoint, folders)


def _known_as(name: str) -> str:
    """Translate the norms of early checkpoints, which are named gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _prefix(spec: EncoderSpec, stored: dict[str, StoredTensor]) -> str:
    names = spec.names
    present = (prefix for prefix in names.prefixes if f"{prefix}{names.tokens}.weight" in stored)
    return next(present, names.prefixes[0])
