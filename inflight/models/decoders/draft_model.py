"""Any small decoder with the same tokens drafts for a larger one: its layers are behind those of the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.attention.backend import AttentionLayer
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.predictor import NEVER
from inflight.models.decoders.spec import DecoderSpec, KVCaches, shard_of
from inflight.models.decoders.sublayers import LayerBuilder, MixerStep


@dataclass(frozen=True, slots=True)
class DraftModelSpec:
    """Implements `PredictorSpec`."""

    decoder: DecoderSpec
    vocab_size: int  # of the model that it drafts for; vocabularies may be padded differently

    def layer_of(self, decoder: DecoderSpec) -> DecoderSpec:  # noqa: ARG002
        return self.decoder

    def with_quantized_kv(self, dtype: str) -> DraftModelSpec:
        mixers = (
            mixer if mixer is None or mixer.kv is None else mixer.with_quantized_kv(dtype)
            for mixer in self.decoder.mixers
        )
        return replace(self, decoder=replace(self.decoder, mixers=tuple(mixers)))

    def build(self, decoder: DecoderSpec, layer: LayerBuilder, caches: KVCaches) -> DraftModel:
        kept = enumerate(self.decoder.kv_layers, decoder.num_layers)
        return DraftModel(self, layer, {index: caches[behind] for behind, index in kept})


def draft_model_spec(draft: DecoderSpec, decoder: DecoderSpec) -> DraftModelSpec:
    """Return the draft model of a decoder. Raises if it cannot be one."""
    problem = ""
    if not draft.has_lm_head:
        problem = "it has no LM head"
    elif draft.has_states:
        problem = "it has recurrent layers, which could not take guesses back"
    elif draft.layer_inputs is not None:
        problem = "its layers have their own inputs"
    elif abs(draft.vocab_size - decoder.vocab_size) > MAX_PADDING:
        problem = f"its vocabulary has {draft.vocab_size} tokens, that of the model {decoder.vocab_size}"
    if problem:
        raise ConfigError(f"speculative_config: {draft.architecture} cannot draft for the model: {problem}")
    return DraftModelSpec(draft, decoder.vocab_size)


MAX_PADDING = 1024  # tokens by which padded vocabularies of the same tokenizer may differ


class DraftModel:
    """Implements `Predictor`."""

    inner_layers = ()
    reads_tokens = True
    keeps_tokens = True

    def __init__(self, spec: DraftModelSpec, layer: LayerBuilder, caches: KVCaches) -> None:
        shard = shard_of(spec.decoder, layer.shard.rank, layer.shard.size, collective=layer.shard.collective)
        self.decoder = Decoder(
            spec.decoder,
            layer.kernels,
            layer.attention,
            layer.dtype,
            layer.device,
            layer.max_position,
            shard,
            caches,
        )
        self.final_norm, self.eps = self.decoder.final_norm, spec.decoder.norm_eps
        self._vocab_size = spec.vocab_size

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return self.decoder.attention_layers

    def first_states(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor | None:
        return self.decoder.embed(token_ids.clamp(max=self.decoder.spec.vocab_size - 1))

    def __call__(
        self,
        embedded: Tensor,
        states: Tensor,  # noqa: ARG002
        step: MixerStep,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        return self.decoder.run_layers(embedded, step.caches, step.inputs, output_tokens)

    def next_states(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor | None:
        logits = self.decoder.logits(hidden)[:, : self._vocab_size]
        num_missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, num_missing), value=NEVER) if num_missing else logits.contiguous()
