"""Attention written to be obviously right: one query at a time, in float64. For tests and small models."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.layers.attention.backend import AttentionInputs, AttentionLayer, KVCache, KVShape, LayerCache
from inflight.layers.attention.cpu import TorchCpuAttention


class ReferenceAttention:
    """Implements `HeadAttention`. A cache is [num_blocks, 2, block_size, num_kv_heads, head_dim]."""

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        return TorchCpuAttention().allocate(shape, num_blocks, device)

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        assert isinstance(cache, Tensor)
        block_size, window = cache.shape[2], layer.window
        tables = inputs.block_tables[layer.table]
        if key is not None and value is not None:
            for token, slot in enumerate(inputs.slot_mapping[layer.table].tolist()):
                cache[slot // block_size, 0, slot % block_size] = key[token]
                cache[slot // block_size, 1, slot % block_size] = value[token]
        out = torch.empty_like(query)
        starts = inputs.query_starts.tolist()
        entries = zip(starts, starts[1:], inputs.context_lens.tolist(), inputs.rows.tolist(), strict=False)
        for first, end, context_len, row in entries:
            for token in range(first, end):
                position = context_len - (end - token)
                lowest = 0 if window is None else max(0, position - window + 1)
                seen = torch.arange(lowest, position + 1, device=cache.device)
                blocks = tables[row, seen // block_size].long()
                kv = cache[blocks, :, seen % block_size].double()  # [n, 2, num_kv_heads, head_dim]
                out[token] = _attend_one(query[token].double(), kv[:, 0], kv[:, 1], layer)
        return out


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer) -> Tensor:
    """query [num_heads, head_dim], keys and values [n, num_kv_heads, head_dim] -> [num_heads, head_dim]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))  # [n, num_heads, head_dim]
    scores = (query * keys).sum(-1) * layer.scale  # [n, num_heads]
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if layer.sinks is not None:  # like a key with this score, and a value of zeros
        scores = torch.cat((scores, layer.sinks.double()[None]))
    weights = torch.softmax(scores, dim=0)[: len(keys)]
    return (weights.unsqueeze(-1) * values).sum(0)
