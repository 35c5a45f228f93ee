"""The decoder: one class for all families, built from a spec, kernels and an attention backend.

Each layer is a mixer, such as attention, then an MLP, or one of the two; each reads the residual and adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from inflight.errors import EngineError
from inflight.kv.layout import LayerKV
from inflight.layers.attention.backend import AttentionBackend, AttentionLayer, KVShape, LayerCache
from inflight.layers.kernels import FusableLayer, FusedLayers, Kernels, Linear, Residual
from inflight.layers.recurrent import DeltaNetLayer, LayerStates, blocks_per_snapshot
from inflight.layers.rotary import Rope
from inflight.models.decoders.delta_net import DeltaNet
from inflight.models.decoders.layer import Layer
from inflight.models.decoders.layer_inputs import LayerInputs
from inflight.models.decoders.mlps import ExpertsMlp
from inflight.models.decoders.predictor import Predictor
from inflight.models.decoders.spec import DecoderSpec, KVCaches, Shard, whole_shard
from inflight.models.decoders.sublayers import LayerBuilder, MixerStep
from inflight.models.heads import Head


class Decoder:
    """Token ids to hidden states to logits. Holds the weights, never the KV cache.

    `dtype` is the storage type of the weights; `max_position`, the longest context that will be served, sizes the
    rotary tables (and selects the factors of those that distinguish long and short contexts). With several ranks, each
    has a decoder over its own `shard`, and `spec` describes the part computed here.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: Kernels,
        attention: AttentionBackend[Any],
        dtype: torch.dtype,
        device: torch.device,
        max_position: int | None = None,
        shard: Shard | None = None,
        kv_caches: KVCaches | None = None,
    ) -> None:
        self.shard = shard = whole_shard(spec) if shard is None else shard
        self.spec = spec = shard.spec
        self.kernels = kernels
        self.attention = attention
        self.dtype = dtype
        self.device = device
        self._max_position = max_position or spec.default_context
        # By layer. A decoder that drafts for another one has them among those of the other.
        self._caches = self._own_caches() if kv_caches is None else kv_caches
        builders = list(self._builders())
        self.layers = [Layer.build(layer) for layer in builders[: len(shard.layers)]]
        self.predictor: Predictor | None = None  # guesses the token after the next
        if shard.whole.predictor is not None and len(builders) > len(shard.layers):
            self.predictor = shard.whole.predictor.build(shard.whole, builders[-1], self._caches)
        self.final_norm = torch.empty(spec.hidden_size, dtype=torch.float32, device=device)
        self.head: Linear | None = None
        if spec.has_lm_head and shard.is_last:
            scheme = shard.whole.head_format.scheme
            self.head = kernels.linear(spec.hidden_size, len(shard.vocab), dtype, False, scheme=scheme)
        self.classifier: Linear | None = None
        if spec.num_labels and shard.is_last:
            self.classifier = kernels.linear(spec.hidden_size, spec.num_labels, dtype, False)
        # Applied to the hidden state of a text's last token in models that embed, classify or rerank.
        self.pooling_head: Head | None = None
        # Tied embeddings are read from the LM head, so the table is held once.
        self.embedding: Tensor | None = None
        if shard.is_first and (self.head is None or not spec.tied_embeddings):
            self.embedding = torch.empty(len(shard.vocab), spec.hidden_size, dtype=dtype, device=device)
        self.layer_inputs: LayerInputs | None = None
        if spec.layer_inputs is not None:
            self.layer_inputs = LayerInputs(shard, spec.layer_inputs, kernels, dtype, device)
        # Models that scale their embedding were trained with a factor in the precision of the weights.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()

    @property
    def generates(self) -> bool:
        return self.spec.has_lm_head

    def _own_caches(self) -> KVCaches:
        """Return where the layers of this stage keep keys and values, and behind them those of the predictor."""
        shard = self.shard
        num_further = 0 if shard.predictor is None else len(shard.predictor.whole.kv_layers)
        further = range(shard.whole.num_layers, shard.whole.num_layers + num_further * shard.is_last)
        kept = [*(index for index in shard.whole.kv_layers if index in shard.layers), *further]
        places = self.kv_shape(1).places
        return {index: (cache, places[cache].table) for cache, index in enumerate(kept)}

    def _builders(self) -> Iterator[LayerBuilder]:
        """Yield what creates each layer, the predictor's first one last, and knows where the layer keeps its memory."""
        shard, whole = self.shard, self.shard.whole
        rotary_tables: dict[Rope, Tensor] = {}

        def builder(part: Shard, index: int, source: int, state: int) -> LayerBuilder:
            cache, table = self._caches.get(source, (0, 0))
            return LayerBuilder(
                part,
                index,
                self.kernels,
                self.attention,
                self.dtype,
                self.device,
                self._max_position,
                table,
                cache,
                state,
                rotary_tables,
            )

        num_states = 0
        for index in shard.layers:
            mixer = whole.mixers[index]
            source = index if mixer is None or mixer.kv_source is None else mixer.kv_source
            yield builder(shard, index, source, num_states)
            num_states += mixer is not None and mixer.state_size > 0
        if shard.predictor is not None and shard.is_last:
            yield builder(shard.predictor, 0, whole.num_layers, num_states)

    def kv_shape(self, block_size: int) -> KVShape:
        """Return the shape of the memory for keys and values, and for snapshots of recurrent states."""
        shard, kv_layers = self.shard, self.shard.whole.kv_layers
        further = [] if shard.predictor is None else [*shard.predictor.whole.kv_layers.values()]
        kv_layers.update(enumerate(further, shard.whole.num_layers))  # behind the others
        kept = [self._kept(mixer.shard(shard).kv) for mixer in kv_layers.values()]
        layers = range(shard.layers.start, shard.layers.stop + shard.is_last * len(further))
        before = sum(index < layers.start for index in kv_layers)
        rank_layers = range(before, before + sum(index in layers for index in kv_layers))
        shape = KVShape.from_layers(kept, block_size, self.kernels.compute_dtype, rank_layers)
        num_blocks = blocks_per_snapshot(self.state_sizes, len(shape.lanes), shape.bytes_per_part)
        return replace(shape, snapshot_blocks=num_blocks)

    def _kept(self, kv: LayerKV | None) -> LayerKV:
        """Return what a layer keeps. A window that no context is longer than is none."""
        assert kv is not None
        return kv if kv.window is None or kv.window < self._max_position else replace(kv, window=None)

    @property
    def state_sizes(self) -> list[int]:
        """The number of values of a request's state in each recurrent layer."""
        sizes = [mixer.state_size for mixer in self.spec.mixers if mixer is not None]
        return [size for size in sizes if size]

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The parameters of attention in each layer that attends, the predictor's last."""
        predicting = [] if self.predictor is None else self.predictor.attention_layers
        return [*chain.from_iterable(layer.attention_layers for layer in self.layers), *predicting]

    @property
    def recurrent_layers(self) -> list[DeltaNetLayer]:
        """The parameters of each recurrent layer."""
        return [layer.mixer.layer for layer in self.layers if isinstance(layer.mixer, DeltaNet)]

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[LayerCache],
        inputs: Any,
        output_tokens: Tensor | None = None,
        states: Sequence[LayerStates] = (),
        inner: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the hidden states [T, hidden_size] of token ids [T].

        `inputs` is the step as the attention backend reads it. There is a cache for each layer that keeps keys and
        values, and states for each recurrent layer.

        With `output_tokens` [W], token indices, return only theirs, [W, hidden_size]. The last layer then computes only
        keys and values for the other tokens, which saves a prompt most of a layer. Negative indices are padding.

        The residual before the layers that a predictor reads is appended to `inner`, if there is such a list.
        """
        x = self.embed(token_ids)
        own_inputs = None
        if self.layer_inputs is not None:
            own_inputs = self.layer_inputs(x, self._rows_of(self.layer_inputs.embed, token_ids))
        return self.run_layers(x, caches, inputs, output_tokens, states, own_inputs, inner)

    def run_layers(
        self,
        x: Tensor,
        caches: Sequence[LayerCache],
        inputs: Any,
        output_tokens: Tensor | None = None,
        states: Sequence[LayerStates] = (),
        layer_inputs: Tensor | None = None,
        inner: list[Tensor] | None = None,
    ) -> Tensor:
        """Run this stage's layers over hidden states [T, hidden_size], which may be overwritten: on a CPU the first
        plain ones in one compiled call (layers/native_kernels.py), and others one by one.

        `layer_inputs` are [T, num_layers, size].
        """
        # Only the layers up to this one need all tokens.
        last_mixing = len(self.layers) if output_tokens is None else self._last_mixing
        num_fused = 0
        read = () if inner is None or self.predictor is None else self.predictor.inner_layers
        if self._fused is not None:
            last = min(self._fused.count, max(0, last_mixing))
            for end in (*(index for index in read if index < last), last):
                x = self._fused.run(x, caches[self._first_cache :], inputs, num_fused, end)
                num_fused = end
                if inner is not None and end < last:
                    inner.append(x.clone())
            if num_fused == len(self.layers):
                return x
        norms = [*(layer.in_norm for layer in self.layers), None]
        residual = Residual(x, norms[num_fused])
        step, padding_mask = MixerStep(inputs, caches, states), inputs.padding_mask
        kept_tokens: Tensor | None = None  # tokens, if some have been dropped
        if last_mixing < 0 and output_tokens is not None:
            kept_tokens, residual = output_tokens, Residual(x[output_tokens], norms[0])
        for index, layer in islice(enumerate(self.layers), num_fused, None):
            next_norm = norms[index + 1]
            if inner is not None and index in read:
                inner.append(residual.x.clone())
            if layer.mixer is not None:
                kept_tokens = output_tokens if index == last_mixing else None
                mlp_norm = next_norm if layer.mlp is None else layer.mlp.in_norm
                residual = layer.mixer(residual, step, mlp_norm, kept_tokens)
            if kept_tokens is not None and not len(kept_tokens):
                break
            if layer.mlp is not None:
                residual = layer.mlp(
                    residual, next_norm, padding_mask if kept_tokens is None else kept_tokens
                )
            if layer.input_gate is not None and layer_inputs is not None:
                layer_input = (
                    layer_inputs[:, index] if kept_tokens is None else layer_inputs[kept_tokens, index]
                )
                residual = layer.input_gate(residual, layer_input, next_norm)
            if layer.scale is not None:
                residual = Residual(residual.x * layer.scale, next_norm)
        return residual.x

    def predict(
        self,
        token_ids: Tensor,
        states: Tensor,
        caches: Sequence[LayerCache],
        inputs: Any,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the predictor's hidden states, for `predicted_logits` and the next pass.

        For the token at position p, `inputs` is that of the step which computes it, `states` are those behind it, and
        `token_ids` holds the token at p + 1: the logits are about the one at p + 2. With `output_tokens` as in
        `forward`. May overwrite the states.
        """
        predictor = self.predictor
        assert predictor is not None
        embedded = predictor.embed(token_ids)
        embedded = self.embed(token_ids) if embedded is None else embedded
        return predictor(embedded, states, MixerStep(inputs, caches, ()), output_tokens)

    def first_states(self, hidden: Tensor, inner: Sequence[Tensor]) -> Tensor:
        """Return what the predictor first reads, given the results of `forward`."""
        predictor = self.predictor
        assert predictor is not None
        if predictor.reads_tokens:
            return hidden
        if predictor.inner_layers:
            return predictor.first_states(torch.cat(list(inner), dim=1))
        return predictor.first_states(self.kernels.rms_norm(hidden, self.final_norm, self.spec.norm_eps))

    @property
    def _first_cache(self) -> int:
        return min((cache for cache, _ in self._caches.values()), default=0)

    @property
    def _last_mixing(self) -> int:
        """The last layer here in which tokens learn of others; -1 if there is none."""
        return max((index for index, layer in enumerate(self.layers) if layer.mixer is not None), default=-1)

    @cached_property
    def _fused(self) -> FusedLayers | None:
        """The leading layers that run as one call. Computed on the first step, when the weights are loaded."""
        fusable: list[FusableLayer] = []
        for layer in self.layers:
            fusable_layer = layer.fusable()
            if fusable_layer is None:
                break
            fusable.append(fusable_layer)
        return self.kernels.fuse(fusable, self.attention)

    @property
    def expert_tokens(self) -> list[Tensor]:
        """For each layer with experts, how many tokens each of them has received so far, [num_experts] int64."""
        mlps = [layer.mlp for layer in self.layers]
        return [mlp.experts.tokens for mlp in mlps if isinstance(mlp, ExpertsMlp)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32, on all ranks."""
        return self._logits(hidden, self.final_norm, self.spec.norm_eps)

    def predicted_logits(self, hidden: Tensor, num_tokens: int | None = None) -> Tensor:
        """Return the logits that follow a predictor's hidden states. Ranks that hold the whole vocabulary may compute
        those of its first tokens alone, [S, num_tokens]. Tokens that it does not know are very unlikely."""
        predictor = self.predictor
        assert predictor is not None
        logits = predictor.logits(hidden)
        return (
            self._logits(hidden, predictor.final_norm, predictor.eps, num_tokens)
            if logits is None
            else logits
        )

    def _logits(self, hidden: Tensor, norm: Tensor, eps: float, num_tokens: int | None = None) -> Tensor:
        logits = self._lm_head().logits(hidden, norm, eps, num_tokens)
        if self.spec.logit_divisor != 1.0:
            logits.div_(self.spec.logit_divisor)
        if self.spec.logit_softcap is not None:
            logits = self.kernels.softcap(logits, self.spec.logit_softcap)
        shard = self.shard
        return logits if shard.collective is None else shard.collective.gather(logits, shard.vocab_sizes)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]"""
        table = self.embedding
        if table is None:
            x = self._rows_of(self._lm_head().embed, token_ids)
        else:
            x = self._rows_of(partial(self.kernels.embed, table), token_ids)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Return the LM head's rows [N, hidden_size] of these tokens."""
        return self._rows_of(self._lm_head().embed, token_ids)

    def _rows_of(self, look_up: Callable[[Tensor], Tensor], token_ids: Tensor) -> Tensor:
        """Look up rows of a table over the vocabulary. With several ranks, one has the row and the others add zeros."""
        shard = self.shard
        if shard.collective is None:
            return look_up(token_ids)
        ids = token_ids.long() - shard.vocab.start
        elsewhere = (ids < 0) | (ids >= len(shard.vocab))
        rows = look_up(ids.masked_fill(elsewhere, 0))
        return shard.collective.sum(rows.masked_fill_(elsewhere[:, None], 0.0))

    def _lm_head(self) -> Linear:
        if self.head is None:
            raise EngineError("the model has no language-model head, so it has no logits")
        return self.head
