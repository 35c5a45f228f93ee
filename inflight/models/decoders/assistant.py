"""Gemma 4's assistants: a few layers that read the keys and values of the model that they draft for, and keep none.

They guess from the model's last hidden state and the token behind it, and then from their own output, all of it at the
position of that token. Some have centroids: only the tokens of the likeliest ones are scored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.checkpoint.fields import Fields
from inflight.errors import ConfigError
from inflight.layers.attention.backend import AttentionLayer
from inflight.layers.kernels import Linear
from inflight.models.decoders.attention import AttentionSpec
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.predictor import NEVER
from inflight.models.decoders.spec import DecoderSpec, KVCaches, shard_of
from inflight.models.decoders.sublayers import LayerBuilder, MixerStep
from inflight.models.decoders.weight_names import GEMMA4
from inflight.models.tensors import Target, whole_rows, whole_tensor

# Tensors beside those of the layers.
_OTHERS = r"^(pre_projection|post_projection|masked_embedding)\."


@dataclass(frozen=True, slots=True)
class AssistantSpec:
    """Implements `PredictorSpec`."""

    decoder: DecoderSpec
    hidden_size: int  # of the model
    num_centroids: int  # 0: there are none
    num_likely: int  # centroids whose tokens are scored

    def layer_of(self, decoder: DecoderSpec) -> DecoderSpec:  # noqa: ARG002
        return self.decoder

    def with_quantized_kv(self, dtype: str) -> AssistantSpec:  # noqa: ARG002
        return self

    def build(self, decoder: DecoderSpec, layer: LayerBuilder, caches: KVCaches) -> Assistant:  # noqa: ARG002
        return Assistant(self, layer, caches)


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` describes an assistant."""
    return config.get("model_type") == "gemma4_assistant"


def assistant_spec(config: Mapping[str, Any], decoder: DecoderSpec) -> AssistantSpec:
    """Return what the `config.json` of an assistant describes. Raises if it is none of this model."""
    fields = Fields(config, "config.json of the draft")
    text = {**fields.part("text_config").values, "architectures": ["Gemma4ForCausalLM"]}
    text |= {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "tie_word_embeddings": True}
    spec = decoder_spec(text)
    hidden_size = fields.integer("backbone_hidden_size")
    problem = ""
    if spec.vocab_size != decoder.vocab_size:
        problem = f"the vocabulary has {spec.vocab_size} tokens, that of the model {decoder.vocab_size}"
    elif hidden_size != decoder.hidden_size:
        problem = f"backbone_hidden_size is {hidden_size}, hidden_size of the model is {decoder.hidden_size}"
    mixers = [_reading(mixer, decoder) for mixer in spec.mixers if isinstance(mixer, AttentionSpec)]
    if not problem and None in mixers:
        problem = "no layer of the model has heads like those of its layers"
    count, likely = 0, 0
    if fields.boolean("use_ordered_embeddings", False):
        count, likely = fields.integer("num_centroids"), fields.integer("centroid_intermediate_top_k")
        if spec.vocab_size % count or likely > count:
            problem = f"num_centroids is {count}: it must divide the vocabulary"
    if problem:
        raise ConfigError(f"speculative_config: the draft does not fit the model: {problem}")
    names = replace(GEMMA4, ignored=(*GEMMA4.ignored, _OTHERS, r"^lm_head\.weight$"))
    return AssistantSpec(replace(spec, mixers=tuple(mixers), names=names), hidden_size, count, likely)


def _reading(mixer: AttentionSpec, decoder: DecoderSpec) -> AttentionSpec | None:
    """Return the same attention over the keys and values of the model's last layer of its kind; None: there is none."""
    assert mixer.kv is not None
    kind = mixer.kv.window is None, mixer.kv.num_heads, mixer.kv.key_dim
    for index, other in reversed(decoder.kv_layers.items()):
        if other.kv is not None and (other.kv.window is None, other.kv.num_heads, other.kv.key_dim) == kind:
            return replace(mixer, kv_source=index)
    return None


class Assistant:
    """Implements `Predictor`."""

    inner_layers = ()
    reads_tokens = False
    keeps_tokens = False

    def __init__(self, spec: AssistantSpec, layer: LayerBuilder, caches: KVCaches) -> None:
        kernels, dtype, hidden = layer.kernels, layer.dtype, spec.decoder.hidden_size
        shard = shard_of(spec.decoder, layer.shard.rank, layer.shard.size, collective=layer.shard.collective)
        self.decoder = Decoder(
            spec.decoder, kernels, layer.attention, dtype, layer.device, layer.max_position, shard, caches
        )
        self.final_norm, self.eps = self.decoder.final_norm, spec.decoder.norm_eps
        self._kernels = kernels
        self._num_likely = spec.num_likely
        self.before: Linear = kernels.linear(2 * spec.hidden_size, hidden, dtype, False)
        self.after: Linear = kernels.linear(hidden, spec.hidden_size, dtype, False)
        self.centroids: Linear | None = None
        self.order: Tensor | None = None  # [vocab_size] int64: the tokens of each centroid
        if spec.num_centroids:
            self.centroids = kernels.linear(hidden, spec.num_centroids, dtype, False)
            self.order = torch.empty(spec.decoder.vocab_size, dtype=torch.int64, device=layer.device)

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return self.decoder.attention_layers

    def first_states(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor | None:  # noqa: ARG002
        return None

    def __call__(
        self, embedded: Tensor, states: Tensor, step: MixerStep, output_tokens: Tensor | None = None
    ) -> Tensor:
        x = self.before(torch.cat((embedded, states), dim=1))
        return self.decoder.run_layers(x, step.caches, step.inputs, output_tokens)

    def next_states(self, hidden: Tensor) -> Tensor:
        return self.after(self._kernels.rms_norm(hidden, self.final_norm, self.eps))

    def logits(self, hidden: Tensor) -> Tensor | None:
        decoder = self.decoder
        if self.centroids is None or self.order is None:
            return decoder.logits(hidden)
        states = self._kernels.rms_norm(hidden, self.final_norm, self.eps)
        likely = self.centroids(states).topk(self._num_likely, dim=1).indices
        token_ids = self.order.view(self.centroids.out_features, -1)[likely].flatten(1)
        token_ids = token_ids.clamp(0, decoder.spec.vocab_size - 1)  # [S, tokens of the likely centroids]
        rows = decoder.head_rows(token_ids.flatten()).view(*token_ids.shape, -1)
        scores = torch.einsum("sh,sth->st", states.float(), rows.float())
        if decoder.spec.logit_softcap is not None:
            scores = self._kernels.softcap(scores, decoder.spec.logit_softcap)
        return scores.new_full((len(hidden), decoder.spec.vocab_size), NEVER).scatter_(1, token_ids, scores)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Yield the modules and tensors beside the layers', and where they are loaded."""
        yield "pre_projection", whole_rows(self.before, bias=False)
        yield "post_projection", whole_rows(self.after, bias=False)
        if self.centroids is not None and self.order is not None:
            yield "masked_embedding.centroids", whole_rows(self.centroids, bias=False)
            order = replace(whole_tensor(self.order, dummy=0.0), dtypes=("I64", "I32"))
            yield "masked_embedding.token_ordering", order
