"""The encoder: one class for all families, built from a spec, kernels and attention within sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.backend import SequenceAttention, SequenceLayer, Sequences
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.models.encoders.spec import EncoderSpec
from inflight.models.pooling_head import Head, Pooler
from inflight.models.tensors import Store, into_rows, into_tensor


@dataclass(frozen=True, slots=True)
class TextBatch:
    """B texts side by side, T tokens in total."""

    token_ids: Tensor  # [T] int64, on GPUs int32, like the others
    positions: Tensor  # [T] from 0 in each text
    segments: Tensor | None  # [T] which text of a pair a token belongs to; None: always the first
    sequences: Sequences


class Norm:
    """The weight and the bias, if any, of a layer norm."""

    def __init__(self, kernels: Kernels, size: int, eps: float, bias: bool, device: torch.device) -> None:
        self._kernels, self._eps = kernels, eps
        self._weight = torch.empty(size, dtype=torch.float32, device=device)
        self._bias = torch.empty_like(self._weight) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.layer_norm(x, self._weight, self._bias, self._eps)

    def of_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return the norm of residual + x. May overwrite the residual."""
        return self._kernels.add_layer_norm(residual, x, self._weight, self._bias, self._eps)

    def stores(self, name: str) -> dict[str, Store]:
        stores = {f"{name}.weight": into_tensor(self._weight)}
        return stores if self._bias is None else stores | {f"{name}.bias": into_tensor(self._bias)}


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
        self._attention_norm: Norm | None = None
        if spec.has_attention_norm(index):
            self._attention_norm = Norm(kernels, hidden, spec.norm_eps, spec.norm_bias, device)
        self._mlp_norm = Norm(kernels, hidden, spec.norm_eps, spec.norm_bias, device)

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

    def stores(self) -> dict[str, Store]:
        hidden, stores = self._spec.hidden_size, self._mlp_norm.stores("mlp_norm")
        if self._attention_norm is not None:
            stores |= self._attention_norm.stores("attention_norm")
        linears = {
            "qkv": (self._qkv, 0),
            "qkv.q": (self._qkv, 0),
            "qkv.k": (self._qkv, hidden),
            "qkv.v": (self._qkv, 2 * hidden),
            "output": (self._output, 0),
            "up": (self._up, 0),
            "down": (self._down, 0),
        }
        for name, (linear, first_row) in linears.items():
            stores[f"{name}.weight"] = into_rows(linear.load, first_row)
            stores[f"{name}.bias"] = into_rows(linear.load_bias, first_row)
        return stores


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

    def _norm(self) -> Norm:
        spec = self.spec
        return Norm(self.kernels, spec.hidden_size, spec.norm_eps, spec.norm_bias, self.device)

    def forward(self, texts: TextBatch, picked: Tensor | None = None) -> Tensor:
        """Return the hidden states [T, hidden_size]; with `picked` [B], token indices, only theirs: the last layer's
        output for other tokens is not needed."""
        x = self._embed(texts)
        last = self._layers[-1]
        for layer in self._layers:
            x = layer(x, texts, picked if layer is last else None)
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

    def stores(self) -> Mapping[str, Store]:
        """Return where each tensor goes, by target (`EncoderSpec.tensors`)."""
        stores = {
            "tokens": into_tensor(self._tokens),
            "positions": into_tensor(self._positions),
            "segments": into_tensor(self._segments),
            **self._embedding_norm.stores("embedding_norm"),
        }
        for index, layer in enumerate(self._layers):
            stores |= {f"layers.{index}.{target}": store for target, store in layer.stores().items()}
        return stores if self._final_norm is None else stores | self._final_norm.stores("final_norm")


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
