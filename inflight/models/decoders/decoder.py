"""The decoder: one class for all families, built from a spec, kernels and an attention backend.

Each layer is attention, then an MLP; each reads the residual and adds to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, AttentionLayer, KVShape
from inflight.errors import EngineError
from inflight.kv.layout import LayerKV
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.layers.rotary import Rope
from inflight.models.decoders.mlps import Mlp, SchemeOf, build_mlp, empty_norm, norm_targets
from inflight.models.decoders.spec import (
    AttentionSpec,
    DecoderSpec,
    GatheringCollective,
    QKNorm,
    Shard,
    whole_shard,
)
from inflight.models.heads import Head
from inflight.models.tensors import Target, packed_rows, summed_columns


class SelfAttention:
    """Norm, queries, keys and values in one product, attention over the KV cache, output projection."""

    def __init__(
        self,
        shard: Shard,
        whole: AttentionSpec,
        kernels: Kernels,
        backend: AttentionBackend[Any],
        dtype: torch.dtype,
        device: torch.device,
        cos_sin: Tensor,
        table: int,
        scheme_of: SchemeOf,
    ) -> None:
        spec, own = shard.whole, shard.attention(whole)
        hidden = spec.hidden_size
        self._spec = spec
        self._shard = shard
        self._whole, self._own = whole, own
        self._kernels = kernels
        self._backend = backend
        self.qkv: Linear = kernels.linear(
            hidden,
            own.query_size + 2 * own.kv_size,
            dtype,
            own.qkv_bias,
            scheme=scheme_of("attention.qkv"),
        )
        has_bias = own.output_bias and shard.rank == 0
        scheme = scheme_of("attention.output")
        self.output: Linear = kernels.linear(
            own.query_size, hidden, dtype, has_bias, shard.collective, scheme
        )
        self.in_norm = empty_norm(spec.norm_placement.before, hidden, device)
        self.out_norm = empty_norm(spec.norm_placement.after, hidden, device)
        of_all, any_norm = own.qk_norm is QKNorm.WHOLE, own.qk_norm is not QKNorm.NONE
        self.q_norm = empty_norm(any_norm, own.query_size if of_all else own.head_dim, device)
        self.k_norm = empty_norm(any_norm, own.kv_size if of_all else own.head_dim, device)
        self._heads = AttentionLayer(
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            # Norms of the whole projection are applied in _normalise_whole.
            q_norm=None if of_all else self.q_norm,
            k_norm=None if of_all else self.k_norm,
            eps=spec.norm_eps,
            cos_sin=cos_sin,  # shared between layers
            scale=own.scale,
            window=own.window,
            table=table,
        )

    def __call__(
        self,
        residual: Residual,
        cache: Tensor,
        inputs: Any,
        next_norm: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Residual:
        """Return the residual plus attention's output, to be read through `next_norm`.

        With `output_tokens` [W], token indices, only their rows are returned: other tokens get only keys and values.
        """
        spec = self._spec
        qkv = self.qkv.normed(residual, spec.norm_eps)
        if self._own.qk_norm is QKNorm.WHOLE:
            qkv = self._normalise_whole(qkv)
        attended = self._backend.attend(qkv, self._heads, cache, inputs)
        if spec.attention_output_scale != 1.0:
            attended = attended * spec.attention_output_scale
        if output_tokens is not None:
            residual, attended = Residual(residual.x[output_tokens], None), attended[output_tokens]
            if not len(output_tokens):
                return residual
        return self.output.add_to(residual, attended, self.out_norm, spec.norm_eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        shard, whole = self._shard, self._whole
        query = features_of(shard.query_heads(whole), whole.head_dim), whole.query_size
        kv = features_of(shard.kv_heads(whole), whole.head_dim), whole.kv_size
        linears = {
            **packed_rows(self.qkv, "qkv", {"q": query, "k": kv, "v": kv}, whole.qkv_bias),
            "output": summed_columns(self.output, *query, whole.output_bias, shard.rank == 0),
        }
        # As llama.cpp rotates them: the two halves of a head alternate.
        for part in ("q", "k"):
            linears[f"qkv.{part}.interleaved"] = replace(linears[f"qkv.{part}"], head_dim=whole.head_dim)
        norms = norm_targets(
            self._spec, in_norm=self.in_norm, out_norm=self.out_norm, q_norm=self.q_norm, k_norm=self.k_norm
        )
        if whole.qk_norm is QKNorm.WHOLE:
            norms["q_norm"] = replace(norms["q_norm"], count=query[1], first=query[0].start)
            norms["k_norm"] = replace(norms["k_norm"], count=kv[1], first=kv[0].start)
        return linears | norms

    def _normalise_whole(self, qkv: Tensor) -> Tensor:
        """Normalise all query heads together and all key heads together."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        sizes = [len(self.q_norm), len(self.k_norm), self._own.kv_size]
        query, key, value = torch.split(qkv, sizes, dim=1)
        collective = self._shard.collective
        if collective is None:
            query = self._kernels.rms_norm(query, self.q_norm, self._spec.norm_eps)
            key = self._kernels.rms_norm(key, self.k_norm, self._spec.norm_eps)
            return torch.cat((query, key, value), dim=1)
        # The mean square is over all ranks' features; keys that several ranks hold count once.
        whole, query, key = self._whole, query.float(), key.float()
        shares = query.square().sum(1), key.square().sum(1) / self._shard.kv_copies(whole)
        squares = collective.sum(torch.stack(shares, dim=1))  # [T, 2]
        eps = self._spec.norm_eps
        query = query * (squares[:, :1] / whole.query_size + eps).rsqrt() * self.q_norm
        key = key * (squares[:, 1:] / whole.kv_size + eps).rsqrt() * self.k_norm
        return torch.cat((query.to(qkv.dtype), key.to(qkv.dtype), value), dim=1)


def features_of(heads: range, head_dim: int) -> range:
    """Return the features of consecutive heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


@dataclass(frozen=True, slots=True)
class Layer:
    attention: SelfAttention
    mlp: Mlp

    def targets(self) -> Mapping[str, Target]:
        """Return the load targets by the names that `WeightNames.layer` uses."""
        parts = {"attention": self.attention.targets(), "mlp": self.mlp.targets()}
        return {f"{part}.{name}": to for part, targets in parts.items() for name, to in targets.items()}


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
        length = max_position or spec.default_context
        ropes = {layer.rope for layer in spec.attentions}
        tables: dict[Rope | None, Tensor]
        tables = {rope: rope.table(length, device) for rope in ropes if rope is not None}
        whole, own = shard.whole, slice(shard.layers.start, shard.layers.stop)
        schemes = [partial(whole.scheme, index) for index in shard.layers]
        self.layers = [
            Layer(
                SelfAttention(
                    shard,
                    mixer,
                    kernels,
                    attention,
                    dtype,
                    device,
                    tables[mixer.rope],
                    place.table,
                    scheme_of,
                ),
                build_mlp(shard, mlp, kernels, dtype, device, scheme_of),
            )
            for mixer, mlp, place, scheme_of in zip(
                whole.mixers[own], spec.mlps, self.kv_shape(1).places, schemes, strict=True
            )
        ]
        self.final_norm = torch.empty(spec.hidden_size, dtype=torch.float32, device=device)
        self.head: Linear | None = None
        if spec.has_lm_head and shard.is_last:
            scheme = whole.head_format.scheme
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
        # Models that scale their embedding were trained with a factor in the precision of the weights.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()

    @property
    def generates(self) -> bool:
        return self.spec.has_lm_head

    def kv_shape(self, block_size: int) -> KVShape:
        shard = self.shard
        layers = [shard.attention(mixer) for mixer in shard.whole.mixers]
        kept = [LayerKV(layer.num_kv_heads, layer.head_dim) for layer in layers]
        return KVShape.of(kept, block_size, self.kernels.compute_dtype, shard.layers)

    def forward(
        self, token_ids: Tensor, caches: list[Tensor], inputs: Any, output_tokens: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [T, hidden_size] of token ids [T]. `inputs` is the step as the attention backend
        reads it.

        With `output_tokens` [W], token indices, return only theirs, [W, hidden_size]. The last layer then computes only
        keys and values for the other tokens, which saves a prompt most of a layer.
        """
        return self.run_layers(self.embed(token_ids), caches, inputs, output_tokens)

    def run_layers(
        self, x: Tensor, caches: list[Tensor], inputs: Any, output_tokens: Tensor | None = None
    ) -> Tensor:
        """Run this stage's layers over hidden states [T, hidden_size], which may be overwritten."""
        in_norms = [layer.attention.in_norm for layer in self.layers]
        residual = Residual(x, in_norms[0])
        last, live = self.layers[-1], self.attention.live(inputs)
        for layer, cache, next_norm in zip(self.layers, caches, [*in_norms[1:], None], strict=True):
            tokens = output_tokens if layer is last else None
            residual = layer.attention(residual, cache, inputs, layer.mlp.in_norm, tokens)
            if tokens is not None and not len(tokens):
                break
            # The rows of output tokens are not those of the step, and none of them is padding.
            residual = layer.mlp(residual, next_norm, live if tokens is None else None)
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
        if self.spec.logit_divisor != 1.0:
            logits.div_(self.spec.logit_divisor)
        cap = self.spec.logit_softcap
        return logits if cap is None else self.kernels.softcap(logits, cap)

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
