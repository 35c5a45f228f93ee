"""The decoder: one for all families, put together from a spec, kernels and an attention backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, KVShape
from inflight.attention.layer import AttentionLayer
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.models.spec import DecoderSpec, QKNorm


class Layer:
    """The weights of one layer. A norm that the spec does not ask for is None."""

    __slots__ = (
        "attention",
        "attention_in_norm",
        "attention_out_norm",
        "down",
        "gate_up",
        "k_norm",
        "mlp_in_norm",
        "mlp_out_norm",
        "output",
        "q_norm",
        "qkv",
    )

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        cos_sin: Tensor,
        window: int | None,
    ) -> None:
        def norm(wanted: bool, size: int) -> Tensor | None:
            return torch.empty(size, dtype=torch.float32, device=device) if wanted else None

        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.qkv: Linear = kernels.linear(hidden, spec.query_size + 2 * spec.kv_size, dtype, spec.qkv_bias)
        self.output: Linear = kernels.linear(spec.query_size, hidden, dtype, spec.output_bias)
        self.gate_up: Linear = kernels.linear(hidden, 2 * inner, dtype, spec.mlp_bias)
        self.down: Linear = kernels.linear(inner, hidden, dtype, spec.mlp_bias)
        before, after = spec.norm_placement.before, spec.norm_placement.after
        self.attention_in_norm = norm(before, hidden)
        self.attention_out_norm = norm(after, hidden)
        self.mlp_in_norm = norm(before, hidden)
        self.mlp_out_norm = norm(after, hidden)
        whole, any_norm = spec.qk_norm is QKNorm.WHOLE, spec.qk_norm is not QKNorm.NONE
        self.q_norm = norm(any_norm, spec.query_size if whole else spec.head_dim)
        self.k_norm = norm(any_norm, spec.kv_size if whole else spec.head_dim)
        self.attention = AttentionLayer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            # Norms of the whole projection are the decoder's work, see _normalise_whole.
            q_norm=None if whole else self.q_norm,
            k_norm=None if whole else self.k_norm,
            eps=spec.norm_eps,
            cos_sin=cos_sin,  # shared between layers
            scale=spec.attention_scale,
            window=window,
        )


class Decoder:
    """Token ids to hidden states to logits. Holds weights, never the KV cache.

    `dtype` is what weights are stored as; `max_position`, the longest context that will be served, sizes
    the rotary tables (and picks the factors of those that differ between long and short contexts).
    """

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: Kernels,
        attention: AttentionBackend[Any],
        dtype: torch.dtype,
        device: torch.device,
        max_position: int | None = None,
    ) -> None:
        self.spec = spec
        self.kernels = kernels
        self.attention = attention
        self.dtype = dtype
        self.device = device
        tables = [rope.table(max_position or spec.default_context, device) for rope in spec.ropes]
        self.layers = [
            Layer(spec, kernels, dtype, device, tables[rope], window)
            for rope, window in zip(spec.layer_ropes, spec.windows, strict=True)
        ]
        self.final_norm = torch.empty(spec.hidden_size, dtype=torch.float32, device=device)
        self.head: Linear = kernels.linear(spec.hidden_size, spec.vocab_size, dtype, False)
        # Tied embeddings read the rows of the head; the table is held once.
        self.embedding: Tensor | None = None
        if not spec.tied_embeddings:
            self.embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        # Models that scale their embedding were trained with a factor of the weights' own precision.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()

    def kv_shape(self, block_size: int) -> KVShape:
        spec = self.spec
        return KVShape(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, self.kernels.compute_dtype
        )

    def forward(
        self, token_ids: Tensor, caches: list[Tensor], inputs: Any, wanted: Tensor | None = None
    ) -> Tensor:
        """Token ids [T], and the step as the attention backend reads it -> the residual stream [T, hidden_size].

        With `wanted` [W], indices of tokens, it is theirs alone [W, hidden_size]. Nobody reads the last layer's
        result for the others: it ends with their keys and values, which spares a prompt most of a layer.
        """
        kernels, eps, activation = self.kernels, self.spec.norm_eps, self.spec.activation
        in_norms = [layer.attention_in_norm for layer in self.layers]
        stream = Residual(self._embed(token_ids), in_norms[0])
        last = self.layers[-1]
        for layer, cache, next_norm in zip(self.layers, caches, [*in_norms[1:], None], strict=True):
            qkv = kernels.norm_linear(stream, eps, layer.qkv)
            if layer.q_norm is not layer.attention.q_norm:
                qkv = self._normalise_whole(layer, qkv)
            attended = self.attention.attend(qkv, layer.attention, cache, inputs)
            if layer is last and wanted is not None:
                stream, attended = Residual(stream.x[wanted], None), attended[wanted]
                if not len(wanted):
                    return stream.x
            stream = kernels.linear_add(
                attended, layer.output, stream, layer.attention_out_norm, eps, layer.mlp_in_norm
            )
            inner = kernels.norm_gate_up(stream, eps, layer.gate_up, activation)
            stream = kernels.linear_add(inner, layer.down, stream, layer.mlp_out_norm, eps, next_norm)
        return stream.x

    def logits(self, stream: Tensor) -> Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32."""
        logits = self.kernels.logits(stream, self.final_norm, self.spec.norm_eps, self.head)
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]"""
        table = self.embedding
        x = self.head.rows(token_ids) if table is None else self.kernels.rows(table, token_ids)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    def _normalise_whole(self, layer: Layer, qkv: Tensor) -> Tensor:
        """All query heads together and all key heads together, where single heads are not."""
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        sizes = [len(layer.q_norm), len(layer.k_norm), self.spec.kv_size]
        query, key, value = torch.split(qkv, sizes, dim=1)
        query = self.kernels.rms_norm(query, layer.q_norm, self.spec.norm_eps)
        key = self.kernels.rms_norm(key, layer.k_norm, self.spec.norm_eps)
        return torch.cat((query, key, value), dim=1)
