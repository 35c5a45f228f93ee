"""The decoder: one class for all families, built from a spec, kernels and an attention backend.

Each layer is attention or another mixer, then an MLP; each reads the residual and adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, FusedLayers, KVShape, LayerCache, PlainLayer
from inflight.errors import EngineError
from inflight.kv.layout import LayerKV
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.layers.recurrent import LayerStates, blocks_per_snapshot
from inflight.models.decoders.layer_inputs import InputGate, LayerInputs
from inflight.models.decoders.mixers import DeltaNet, Mixer, SelfAttention
from inflight.models.decoders.mlps import DenseMlp, ExpertsMlp, Mlp, build_mlp
from inflight.models.decoders.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    Shard,
    whole_shard,
)
from inflight.models.heads import Head
from inflight.models.tensors import PlainTensor, Target


@dataclass(frozen=True, slots=True)
class Layer:
    mixer: Mixer
    mlp: Mlp
    scale: Tensor | None = None  # [1], multiplies the residual at the end
    input_gate: InputGate | None = None  # reads the layer's own input

    def plain(self) -> PlainLayer | None:
        """Return the layer as a backend may fuse it, or None if it is not only attention and a dense MLP."""
        mixer, mlp = self.mixer, self.mlp
        if self.scale is not None or self.input_gate is not None:
            return None
        return mixer.plain(mlp) if isinstance(mixer, SelfAttention) and isinstance(mlp, DenseMlp) else None

    def targets(self) -> Mapping[str, Target]:
        """Return the load targets by the names that `WeightNames.layer` uses."""
        parts = {"attention": self.mixer.targets(), "mlp": self.mlp.targets()}
        if self.input_gate is not None:
            parts["input"] = self.input_gate.targets()
        targets = {f"{part}.{name}": to for part, own in parts.items() for name, to in own.items()}
        return targets if self.scale is None else {**targets, "scale": PlainTensor(self.scale, dummy=1.0)}


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
    ) -> None:
        self.shard = shard = whole_shard(spec) if shard is None else shard
        self.spec = spec = shard.spec
        self.kernels = kernels
        self.attention = attention
        self.dtype = dtype
        self.device = device
        self._max_position = length = max_position or spec.default_context
        ropes = {layer.rope for layer in spec.attentions if layer.rope is not None}
        tables = {rope: rope.table(length, device) for rope in ropes}
        kv_layers = [index for index in shard.whole.kv_layers if index in shard.layers]
        tables_of = {
            index: place.table for index, place in zip(kv_layers, self.kv_shape(1).places, strict=True)
        }
        self.layers: list[Layer] = []
        for index, mlp in zip(shard.layers, spec.mlps, strict=True):
            mixer: Mixer
            whole, scheme_of = shard.whole.mixers[index], partial(shard.whole.scheme, index)
            if isinstance(whole, AttentionSpec):
                cos_sin = None if whole.rope is None else tables[whole.rope]  # shared between layers
                table = tables_of[index if whole.kv_source is None else whole.kv_source]
                mixer = SelfAttention(
                    shard, whole, kernels, attention, dtype, device, cos_sin, table, scheme_of
                )
            else:
                mixer = DeltaNet(shard, whole, kernels, dtype, device, scheme_of)
            scale = None
            if spec.has_layer_scales:
                scale = torch.empty(1, dtype=kernels.compute_dtype, device=device)
            own_mlp = build_mlp(shard, mlp, kernels, dtype, device, scheme_of)
            gate = None
            if spec.layer_inputs is not None:
                gate = InputGate(spec, spec.layer_inputs, kernels, dtype, device, scheme_of)
            self.layers.append(Layer(mixer, own_mlp, scale, gate))
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

    def kv_shape(self, block_size: int) -> KVShape:
        """Return the shape of the memory for keys and values, and for snapshots of recurrent states."""
        shard, kv_layers = self.shard, self.shard.whole.kv_layers
        layers = [shard.attention(layer) for layer in kv_layers.values()]
        kept = [
            LayerKV(
                layer.num_kv_heads,
                layer.head_dim,
                layer.head_dim,
                self._shorter_window(layer.window),
                layer.quantized_kv,
            )
            for layer in layers
        ]
        before = sum(index < shard.layers.start for index in kv_layers)
        own = range(before, before + sum(index in shard.layers for index in kv_layers))
        shape = KVShape.of(kept, block_size, self.kernels.compute_dtype, own)
        num_blocks = blocks_per_snapshot(self.state_sizes, len(shape.slots), shape.bytes_per_part)
        return replace(shape, snapshot_blocks=num_blocks)

    def _shorter_window(self, window: int | None) -> int | None:
        """Return the window, or None if all tokens of the longest context are in it."""
        return None if window is None or window >= self._max_position else window

    @property
    def state_sizes(self) -> list[int]:
        """The number of values of a request's state in each recurrent layer."""
        return [mixer.shape.state_size for mixer in self.spec.mixers if isinstance(mixer, DeltaNetSpec)]

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[LayerCache],
        inputs: Any,
        output_tokens: Tensor | None = None,
        states: Sequence[LayerStates] = (),
    ) -> Tensor:
        """Return the hidden states [T, hidden_size] of token ids [T].

        `inputs` is the step as the attention backend reads it. There is a cache for each layer that keeps keys and
        values, and states for each recurrent layer.

        With `output_tokens` [W], token indices, return only theirs, [W, hidden_size]. The last layer then computes only
        keys and values for the other tokens, which saves a prompt most of a layer. Negative indices are padding.
        """
        x = self.embed(token_ids)
        own_inputs = None
        if self.layer_inputs is not None:
            own_inputs = self.layer_inputs(x, self._rows_of(self.layer_inputs.embed, token_ids))
        return self.run_layers(x, caches, inputs, output_tokens, states, own_inputs)

    def run_layers(
        self,
        x: Tensor,
        caches: Sequence[LayerCache],
        inputs: Any,
        output_tokens: Tensor | None = None,
        states: Sequence[LayerStates] = (),
        layer_inputs: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's layers over hidden states [T, hidden_size], which may be overwritten. `layer_inputs` are
        [T, num_layers, size]."""
        num_fused = 0
        if self._fused is not None:
            num_fused = min(self._fused.count, len(self.layers) - (output_tokens is not None))
            x = self._fused.run(x, caches, inputs, num_fused)
            if num_fused == len(self.layers):
                return x
        in_norms = [layer.mixer.in_norm for layer in self.layers]
        residual = Residual(x, in_norms[num_fused])
        last, live = self.layers[-1], self.attention.live(inputs)
        memories = self._memories(caches, states, inputs)
        layers = zip(self.layers, memories, [*in_norms[1:], None], strict=True)
        for index, (layer, memory, next_norm) in islice(enumerate(layers), num_fused, None):
            tokens = output_tokens if layer is last else None
            residual = layer.mixer(residual, *memory, layer.mlp.in_norm, tokens)
            if tokens is not None and not len(tokens):
                break
            residual = layer.mlp(residual, next_norm, live if tokens is None else tokens)
            if layer.input_gate is not None and layer_inputs is not None:
                own = layer_inputs[:, index] if tokens is None else layer_inputs[tokens, index]
                residual = layer.input_gate(residual, own, next_norm)
            if layer.scale is not None:
                residual = Residual(residual.x * layer.scale, next_norm)
        return residual.x

    @cached_property
    def _fused(self) -> FusedLayers[Any] | None:
        """The first layers in one call, known with the first step: the weights are loaded by then."""
        plain: list[PlainLayer] = []
        for layer in self.layers:
            own = layer.plain()
            if own is None:
                break
            plain.append(own)
        return self.attention.fuse(plain)

    def _memories(
        self, caches: Sequence[LayerCache], states: Sequence[LayerStates], inputs: Any
    ) -> Iterator[tuple[LayerCache | LayerStates, Any]]:
        """Yield the memory of each layer, and the step as the layer reads it."""
        own_caches, own_states = iter(caches), iter(states)
        of_layers: dict[int, LayerCache] = {}
        for index, mixer in zip(self.shard.layers, self.spec.mixers, strict=True):
            if not isinstance(mixer, AttentionSpec):
                yield next(own_states), self.attention.state_inputs(inputs)
                continue
            source = mixer.kv_source
            of_layers[index] = next(own_caches) if source is None else of_layers[source]
            yield of_layers[index], inputs

    @property
    def expert_tokens(self) -> list[Tensor]:
        """For each layer with experts, how many tokens each of them has received so far, [num_experts] int64."""
        mlps = [layer.mlp for layer in self.layers]
        return [mlp.experts.tokens for mlp in mlps if isinstance(mlp, ExpertsMlp)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32, on all ranks."""
        logits = self._lm_head().logits(hidden, self.final_norm, self.spec.norm_eps)
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
