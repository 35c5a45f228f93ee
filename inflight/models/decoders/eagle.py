"""EAGLE-3: a layer from another checkpoint guesses tokens from hidden states inside the decoder.

Its attention reads the next token's embedding and the state side by side. The state is at first a projection of the
residual before some of the decoder's layers, and then the layer's own output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.checkpoint.fields import Fields
from inflight.errors import ConfigError
from inflight.layers.attention.backend import AttentionLayer
from inflight.layers.kernels import Linear, Residual
from inflight.models.decoders.attention import AttentionSpec, SelfAttention
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.layer import Layer
from inflight.models.decoders.mlps import DenseMlp
from inflight.models.decoders.predictor import NEVER
from inflight.models.decoders.spec import DecoderSpec, KVCaches
from inflight.models.decoders.sublayers import LayerBuilder, MixerStep
from inflight.models.decoders.weight_names import LLAMA
from inflight.models.tensors import NormWeight, Target, whole_rows, whole_tensor

# Tensors that are not needed: the inverse of d2t, and the rotary tables.
IGNORED = (r"^t2d$", r"rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """Implements `PredictorSpec`."""

    layer: DecoderSpec
    mixer: AttentionSpec
    inner_layers: tuple[int, ...]  # it reads the residual before these layers of the decoder
    draft_vocab_size: int
    norm_before_residual: bool  # whether the state that attention adds to is normalised
    norm_output: bool  # whether the state that the next pass reads is
    has_embedding: bool  # whether it has its own
    has_head: bool

    def layer_of(self, decoder: DecoderSpec) -> DecoderSpec:  # noqa: ARG002
        return replace(self.layer, mixers=(self.mixer,))

    def with_quantized_kv(self, dtype: str) -> EagleSpec:
        return replace(self, mixer=self.mixer.with_quantized_kv(dtype))

    def build(self, decoder: DecoderSpec, layer: LayerBuilder, caches: KVCaches) -> Eagle:  # noqa: ARG002
        return Eagle(self, decoder, layer)


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` says that it describes EAGLE-3."""
    names = config.get("architectures")
    named = isinstance(names, list) and any("Eagle3" in str(name) for name in names)
    return named or config.get("speculators_model_type") == "eagle3"


def eagle_spec(config: Mapping[str, Any], names: Collection[str], decoder: DecoderSpec) -> EagleSpec:
    """Return what the `config.json` of an EAGLE-3 checkpoint and the names of its tensors describe.

    There are two layouts of configs: that of the authors, and that of speculators. Without `names`, it has a layer, a
    head and nothing else.
    """
    fields = Fields(config, "config.json of the draft")
    is_nested = "transformer_layer_config" in fields
    inner = fields.part("transformer_layer_config") if is_nested else fields
    llama = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    layer = decoder_spec({**inner.values, **llama, "quantization_config": None})
    mixer = layer.mixers[0]
    assert isinstance(mixer, AttentionSpec)
    layers = "midlayer" if any(name.startswith("midlayer.") for name in names) else "layers.0"
    layer_names = replace(
        LLAMA, prefixes=("",), layers=layers, first_layer=None, final_norm="norm", ignored=IGNORED
    )
    spec = EagleSpec(
        replace(layer, names=layer_names, vocab_size=decoder.vocab_size),
        replace(mixer, input_size=2 * layer.hidden_size),
        _inner_layers(fields, decoder.num_layers),
        fields.integer("draft_vocab_size", layer.vocab_size),
        fields.boolean("norm_before_residual", is_nested),
        fields.boolean("norm_output", False),
        "embed_tokens.weight" in names,
        "lm_head.weight" in names or not names,
    )
    _check(spec, layer, fields, decoder)
    return spec


def _inner_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input is read. Some configs name the layer before each, whose output that is: then the
    first is 1."""
    name = "eagle_aux_hidden_state_layer_ids"
    part = fields.part("eagle_config") if "eagle_config" in fields else fields
    if name not in part:
        return tuple(sorted({2, num_layers // 2, max(num_layers - 3, 0)}))
    listed = part.integers(name)
    layers = tuple(index + (listed[0] == 1) for index in listed)
    if not layers or sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise part.error(name, f"ascending numbers of the {num_layers} layers")
    return layers


def _check(spec: EagleSpec, layer: DecoderSpec, fields: Fields, decoder: DecoderSpec) -> None:
    """Raise unless the layer fits the decoder."""
    vocab_size, hidden, draft_hidden = decoder.vocab_size, decoder.hidden_size, layer.hidden_size
    target_hidden = fields.integer("target_hidden_size", hidden)
    problem = ""
    if layer.vocab_size != vocab_size:
        problem = f"the vocabulary has {layer.vocab_size} tokens, that of the model {vocab_size}"
    elif target_hidden != hidden:
        problem = f"target_hidden_size is {target_hidden}, hidden_size of the model is {hidden}"
    elif draft_hidden != hidden and not (spec.has_embedding and spec.has_head):
        problem = (
            f"hidden_size is {draft_hidden}, that of the model {hidden}, whose embedding or head it shares"
        )
    elif not spec.has_head and spec.draft_vocab_size != vocab_size:
        problem = f"draft_vocab_size is {spec.draft_vocab_size}, but there is no lm_head"
    elif spec.draft_vocab_size > vocab_size:
        problem = f"draft_vocab_size is {spec.draft_vocab_size}, the model has {vocab_size} tokens"
    elif fields.boolean("norm_before_fc", False):
        problem = "norm_before_fc is true, which is not supported"
    if problem:
        raise ConfigError(f"speculative_config: the draft does not fit the model: {problem}")


class Eagle:
    """Implements `Predictor`."""

    reads_tokens = False
    keeps_tokens = True

    def __init__(self, spec: EagleSpec, whole: DecoderSpec, builder: LayerBuilder) -> None:
        hidden, dtype, kernels = builder.spec.hidden_size, builder.dtype, builder.kernels
        self.inner_layers = spec.inner_layers
        self.names = builder.spec.names
        self._spec = spec
        self._kernels = kernels
        self.eps = builder.spec.norm_eps
        self.layer = Layer.build(builder)
        self.projection: Linear = kernels.linear(
            len(spec.inner_layers) * whole.hidden_size, hidden, dtype, False
        )
        self.hidden_norm, self.final_norm = builder.empty(hidden), builder.empty(hidden)
        self.embedding: Tensor | None = None
        if spec.has_embedding:
            self.embedding = torch.empty(whole.vocab_size, hidden, dtype=dtype, device=builder.device)
        self.head: Linear | None = None
        self.offsets: Tensor | None = (
            None  # [draft_vocab_size] int64: how many tokens were left out before each
        )
        if spec.has_head:
            self.head = kernels.linear(hidden, spec.draft_vocab_size, dtype, False)
        if spec.draft_vocab_size < whole.vocab_size:
            self.offsets = torch.empty(spec.draft_vocab_size, dtype=torch.int64, device=builder.device)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return self.layer.attention_layers

    def first_states(self, hidden: Tensor) -> Tensor:
        return self.projection(hidden)

    def embed(self, token_ids: Tensor) -> Tensor | None:
        return None if self.embedding is None else self._kernels.embed(self.embedding, token_ids)

    def __call__(
        self, embedded: Tensor, states: Tensor, step: MixerStep, output_tokens: Tensor | None = None
    ) -> Tensor:
        kernels, eps, attention, mlp = self._kernels, self.eps, self.layer.mixer, self.layer.mlp
        assert isinstance(attention, SelfAttention)
        assert isinstance(mlp, DenseMlp)
        assert attention.in_norm is not None
        normed = kernels.rms_norm(states, self.hidden_norm, eps)
        both = torch.cat((kernels.rms_norm(embedded, attention.in_norm, eps), normed), dim=1)
        residual = Residual(normed if self._spec.norm_before_residual else states, None)
        residual = attention.attend(Residual(both, None), residual, step, mlp.in_norm, output_tokens)
        if output_tokens is not None and not len(output_tokens):
            return residual.x
        return mlp(residual, None).x

    def logits(self, hidden: Tensor) -> Tensor | None:
        if self.head is None:
            return None
        logits, offsets, vocab_size = (
            self.head.logits(hidden, self.final_norm, self.eps),
            self.offsets,
            self._spec.layer.vocab_size,
        )
        if offsets is None:
            return logits
        token_ids = (offsets + torch.arange(len(offsets), device=offsets.device)).clamp_(0, vocab_size - 1)
        return logits.new_full((len(logits), vocab_size), NEVER).index_copy_(1, token_ids, logits)

    def next_states(self, hidden: Tensor) -> Tensor:
        if not self._spec.norm_output:
            return hidden
        return self._kernels.rms_norm(hidden, self.final_norm, self.eps)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Yield the modules and tensors beside the layer's, and where they are loaded."""
        layers = self.names.layers
        yield "fc", whole_rows(self.projection, bias=False)
        yield f"{layers}.hidden_norm", NormWeight(self.hidden_norm, len(self.hidden_norm))
        yield "norm", NormWeight(self.final_norm, len(self.final_norm))
        if self.embedding is not None:
            yield "embed_tokens.weight", whole_tensor(self.embedding, dummy=0.0)
        if self.head is not None:
            yield "lm_head", whole_rows(self.head, bias=False)
        if self.offsets is not None:
            yield "d2t", replace(whole_tensor(self.offsets, dummy=0.0), dtypes=("I64",))
