"""Layers that guess further tokens. In multi-token prediction (MTP), it is one more layer of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from inflight.layers.attention.backend import AttentionLayer
from inflight.layers.kernels import Linear, Residual
from inflight.models.decoders.layer import Layer
from inflight.models.decoders.spec import DecoderSpec, KVCaches, MixerSpec, MlpSpec, WeightNames
from inflight.models.decoders.sublayers import LayerBuilder, MixerStep
from inflight.models.tensors import NormWeight, Target, whole_rows

NEVER = -1e30  # the logit of tokens that a predictor does not know


class Predictor(Protocol):
    """Further layers behind a decoder. Ranks share them as they share the decoder's; each has all that is beside them.

    What it computes for the token at position p, which is where its keys and values go, is about the token at p + 2. It
    reads the embedding of the token at p + 1, and states: first the decoder's, then its own.
    """

    final_norm: Tensor  # [hidden_size] float32, before the LM head
    eps: float  # of its norms

    @property
    def inner_layers(self) -> Sequence[int]:
        """It reads the residual before these layers of the decoder; empty: behind the last."""

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The parameters of attention in each of its layers."""

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads only tokens, no states: each at its own position, of which it is about the next."""

    @property
    def keeps_tokens(self) -> bool:
        """Whether it keeps keys and values; otherwise it reads the decoder's, and only what precedes a guess."""

    def first_states(self, hidden: Tensor) -> Tensor:
        """Return the states for the decoder's normalised hidden states [T, hidden_size], or for the inner ones, side by
        side."""

    def embed(self, token_ids: Tensor) -> Tensor | None:
        """Return its own embeddings of tokens; None: they are the decoder's."""

    def __call__(
        self, embedded: Tensor, states: Tensor, step: MixerStep, output_tokens: Tensor | None = None
    ) -> Tensor:
        """Return hidden states [T, hidden_size]; with `output_tokens` [W], token indices, only theirs. May overwrite
        the states."""

    def next_states(self, hidden: Tensor) -> Tensor:
        """Return the states that the next pass reads."""

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return the logits of all tokens by its own LM head; None: the decoder's continues from `final_norm`."""


# ---- multi-token prediction ----


@dataclass(frozen=True, slots=True)
class MtpNames:
    """How a checkpoint names the tensors of a layer for MTP, with full names of modules."""

    layer: WeightNames  # and of its final norm
    projection: str
    embedding_norm: str
    hidden_norm: str


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """Implements `PredictorSpec`: a layer of the same checkpoint. Embedding and LM head are the decoder's."""

    mixer: MixerSpec
    mlp: MlpSpec
    names: MtpNames

    def layer_of(self, decoder: DecoderSpec) -> DecoderSpec:
        return replace(
            decoder,
            mixers=(self.mixer,),
            mlps=(self.mlp,),
            names=self.names.layer,
            has_layer_scales=False,
            layer_inputs=None,
            predictor=None,
        )

    def with_quantized_kv(self, dtype: str) -> MtpSpec:
        return replace(self, mixer=self.mixer.with_quantized_kv(dtype))

    def build(self, decoder: DecoderSpec, layer: LayerBuilder, caches: KVCaches) -> Mtp:  # noqa: ARG002
        return Mtp(self, decoder, layer)


class Mtp:
    """Implements `Predictor`: the layer, behind the projection of what it reads, and before its final norm."""

    inner_layers = ()
    reads_tokens = False
    keeps_tokens = True

    def __init__(self, spec: MtpSpec, whole: DecoderSpec, builder: LayerBuilder) -> None:
        hidden = whole.hidden_size
        self.names = spec.names.layer
        self._names = spec.names
        self._kernels = builder.kernels
        self.eps, self._norm_offset = whole.norm_eps, whole.norm_offset
        self.embedding_norm, self.hidden_norm, self.final_norm = (builder.empty(hidden) for _ in range(3))
        scheme = builder.spec.format_of(spec.names.projection).scheme
        self.projection: Linear = builder.kernels.linear(
            2 * hidden, hidden, builder.dtype, False, scheme=scheme
        )
        self.layer = Layer.build(builder)

    def __call__(
        self, embedded: Tensor, states: Tensor, step: MixerStep, output_tokens: Tensor | None = None
    ) -> Tensor:
        kernels, eps, layer = self._kernels, self.eps, self.layer
        both = (
            kernels.rms_norm(embedded, self.embedding_norm, eps),
            kernels.rms_norm(states, self.hidden_norm, eps),
        )
        residual = Residual(self.projection(torch.cat(both, dim=1)), layer.in_norm)
        assert layer.mixer is not None
        assert layer.mlp is not None
        residual = layer.mixer(residual, step, layer.mlp.in_norm, output_tokens)
        if output_tokens is None:
            output_tokens = step.inputs.padding_mask
        elif not len(output_tokens):
            return residual.x
        return layer.mlp(residual, None, output_tokens).x

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return self.layer.attention_layers

    def first_states(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor | None:  # noqa: ARG002
        return None

    def logits(self, hidden: Tensor) -> Tensor | None:  # noqa: ARG002
        return None

    def next_states(self, hidden: Tensor) -> Tensor:
        return self._kernels.rms_norm(hidden, self.final_norm, self.eps)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Yield the modules beside the layer's, and where they are loaded."""
        names = self._names
        yield names.projection, whole_rows(self.projection, bias=False)
        norms = {
            names.embedding_norm: self.embedding_norm,
            names.hidden_norm: self.hidden_norm,
            names.layer.final_norm: self.final_norm,
        }
        for name, norm in norms.items():
            yield name, NormWeight(norm, len(norm), offset=self._norm_offset)
