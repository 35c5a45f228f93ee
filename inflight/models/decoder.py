"""The decoder: one for all families, put together from a spec, kernels and an attention backend."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, AttentionInputs, KVShape
from inflight.layers.kernels import Kernels, Linear
from inflight.models.spec import DecoderSpec, QKNorm


class Layer:
    """The weights of one layer. A norm that the spec does not ask for is None."""

    __slots__ = (
        "attention_in_norm",
        "attention_out_norm",
        "cos_sin",
        "down",
        "gate_up",
        "k_norm",
        "mlp_in_norm",
        "mlp_out_norm",
        "output",
        "q_norm",
        "qkv",
        "window",
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
        self.cos_sin = cos_sin  # [max_position, rotary_dim], shared between layers
        self.window = window


class Decoder:
    """Token ids to hidden states to logits. Holds weights, never the KV cache.

    `dtype` is what weights are stored as; `max_position`, the longest context that will be served, sizes
    the rotary tables (and picks the factors of those that differ between long and short contexts).
    """

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: Kernels,
        attention: AttentionBackend,
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
        # The norm that follows each layer: the next layer's first, or the final one.
        self._next_norms = [layer.attention_in_norm for layer in self.layers[1:]] + [self.final_norm]

    def kv_shape(self, block_size: int) -> KVShape:
        spec = self.spec
        return KVShape(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, self.kernels.compute_dtype
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, caches: list[Tensor], inputs: AttentionInputs
    ) -> Tensor:
        """[T] int64 ids and positions -> [T, hidden_size] in the compute dtype, final norm applied."""
        rms_norm, eps = self.kernels.rms_norm, self.spec.norm_eps
        residual = self._embed(token_ids)
        first = self.layers[0].attention_in_norm
        x = residual if first is None else rms_norm(residual, first, eps)
        for layer, cache, next_norm in zip(self.layers, caches, self._next_norms, strict=True):
            x = self._attend(layer, x, positions, cache, inputs)
            if layer.attention_out_norm is not None:
                x = rms_norm(x, layer.attention_out_norm, eps)
            x, residual = self._join(x, residual, layer.mlp_in_norm)
            x = layer.down(self.kernels.gate(layer.gate_up(x), self.spec.activation))
            if layer.mlp_out_norm is not None:
                x = rms_norm(x, layer.mlp_out_norm, eps)
            x, residual = self._join(x, residual, next_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32."""
        logits = self.head(hidden).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]"""
        if self.embedding is None:
            x = self.head.rows(token_ids)
        else:
            x = self.embedding[token_ids].to(self.kernels.compute_dtype)
        return x if self._embedding_scale == 1.0 else x * self._embedding_scale

    def _join(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """Back into the residual stream: (what the next block reads, the stream)."""
        if norm is None:
            x = x + residual
            return x, x
        return self.kernels.add_rms_norm(x, residual, norm, self.spec.norm_eps)

    def _attend(
        self, layer: Layer, x: Tensor, positions: Tensor, cache: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        spec, kernels = self.spec, self.kernels
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, spec.head_dim)
        value = qkv[:, heads + kv_heads :]
        if layer.q_norm is None or layer.k_norm is None:
            turned = kernels.rotate(qkv[:, : heads + kv_heads], positions, layer.cos_sin)
            query, key = turned[:, :heads], turned[:, heads:]
        else:
            query = self._normalise(qkv[:, :heads], layer.q_norm)
            key = self._normalise(qkv[:, heads : heads + kv_heads], layer.k_norm)
            query = kernels.rotate(query, positions, layer.cos_sin)
            key = kernels.rotate(key, positions, layer.cos_sin)
        out = self.attention.attend(query, key, value, cache, inputs, spec.attention_scale, layer.window)
        return layer.output(out.reshape(-1, spec.query_size))

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, heads, head_dim], over each head or over all of them together."""
        if self.spec.qk_norm is QKNorm.HEAD:
            return self.kernels.rms_norm(x, weight, self.spec.norm_eps)
        return self.kernels.rms_norm(x.flatten(1), weight, self.spec.norm_eps).view(x.shape)
