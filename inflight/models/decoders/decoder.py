"""The decoder: one class for all families, built from a spec, kernels and an attention backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, KVShape
from inflight.errors import EngineError
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.models.decoders.layer import DenseMlp, Layer, SelfAttention
from inflight.models.decoders.shard import GatheringCollective, Shard, whole_shard
from inflight.models.decoders.spec import DecoderSpec
from inflight.models.pooling_head import Head


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
        tables = [rope.table(max_position or spec.default_context, device) for rope in spec.ropes]
        self.layers = [
            Layer(
                SelfAttention(shard, kernels, attention, dtype, device, tables[rope], window),
                DenseMlp(shard, kernels, dtype, device),
            )
            for rope, window in zip(spec.layer_ropes, spec.windows, strict=True)
        ]
        self.final_norm = torch.empty(spec.hidden_size, dtype=torch.float32, device=device)
        self.head: Linear | None = None
        if spec.has_lm_head and shard.is_last:
            self.head = kernels.linear(spec.hidden_size, len(shard.vocab), dtype, False)
        self.classifier: Linear | None = None
        if spec.num_labels and shard.is_last:
            self.classifier = kernels.linear(spec.hidden_size, spec.num_labels, dtype, False)
        # Applied to the hidden state of a text's last token in models that embed, classify or rerank.
        self.pooling_head: Head | None = None
        # Tied embeddings are read from the LM head, so the table is held once.
        self.embedding: Tensor | None = None
        if shard.is_first and (self.head is None or not spec.tied_embeddings):
            self.embedding = torch.empty(len(shard.vocab), spec.hidden_size, dtype=dtype, device=device)
        # Models that scale their embedding were trained with a factor in the precision of the weights.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()

    @property
    def generates(self) -> bool:
        return self.spec.has_lm_head

    def kv_shape(self, block_size: int) -> KVShape:
        spec = self.spec
        return KVShape(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, self.kernels.compute_dtype
        )

    def forward(
        self, token_ids: Tensor, caches: list[Tensor], inputs: Any, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [T, hidden_size] of token ids [T]. `inputs` is the step as the attention backend
        reads it.

        With `wanted` [W], token indices, return theirs alone, [W, hidden_size]. The last layer then computes only keys
        and values for the other tokens, which saves a prompt most of a layer.
        """
        return self.run_layers(self.embed(token_ids), caches, inputs, wanted)

    def run_layers(
        self, x: Tensor, caches: list[Tensor], inputs: Any, wanted: Tensor | None = None
    ) -> Tensor:
        """Run this stage's layers over hidden states [T, hidden_size], which may be overwritten."""
        in_norms = [layer.attention.in_norm for layer in self.layers]
        residual = Residual(x, in_norms[0])
        last = self.layers[-1]
        for layer, cache, next_norm in zip(self.layers, caches, [*in_norms[1:], None], strict=True):
            tokens = wanted if layer is last else None
            residual = layer.attention(residual, cache, inputs, layer.mlp.in_norm, tokens)
            if tokens is not None and not len(tokens):
                break
            residual = layer.mlp(residual, next_norm)
        return residual.x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32, on all ranks."""
        logits, collective = self.own_logits(hidden), self.shard.collective
        if collective is None:
            return logits
        assert isinstance(collective, GatheringCollective), "CPU ranks do not gather logits"
        return collective.gather(logits, self.shard.vocab_sizes)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's part of the vocabulary."""
        logits = self._lm_head().logits(hidden, self.final_norm, self.spec.norm_eps)
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

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
