"""The attention backend for GPUs: a few launches a layer, all of which a CUDA graph can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.backend import KVShape
from inflight.attention.layer import AttentionLayer
from inflight.attention.triton.chunk import chunk_attention
from inflight.attention.triton.decode import decode_attention
from inflight.attention.triton.items import Items
from inflight.attention.triton.prefix import prefix_attention
from inflight.attention.triton.rope_write import rope_write
from inflight.attention.triton.tuning import Tuning
from inflight.attention.triton.workspace import Workspace
from inflight.room import empty_tokens


@dataclass(frozen=True, slots=True)
class TritonStep:
    """One step in device memory. What is None is not launched; the rest may change between replays of a graph."""

    positions: Tensor  # [T] int32; any valid position for padding
    slots: Tensor  # [T] int32, token place of each token: block_id * block_size + offset; below 0: padding
    block_tables: Tensor  # [max_rows, max_blocks] int32
    decodes: Items  # DecodePlan.items
    near: bool  # DecodeWork.near
    prefixes: Items | None  # PrefixPlan.items
    members: Tensor | None  # PrefixPlan.members(), int32, max_members rows; with prefixes only
    chunks: Items | None  # ChunkPlan.items
    workspace: Workspace


class TritonAttention:
    """Implements `AttentionBackend[TritonStep]`.

    A layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_dim]: index 0 keys, 1 values.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> list[Tensor]:
        size = (num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        return [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: Tensor, inputs: TritonStep) -> Tensor:
        """Rows of the result that belong to no item hold whatever was in memory."""
        step, tuning = inputs, self.tuning
        rope_write(
            qkv,
            step.positions,
            step.slots,
            layer.cos_sin,
            layer.q_norm,
            layer.k_norm,
            layer.eps,
            cache,
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            tuning.early,
        )
        tables, workspace, early = step.block_tables, step.workspace, tuning.early
        out = empty_tokens(len(qkv), layer.num_heads * layer.head_dim, qkv.dtype, qkv.device)
        if step.prefixes is not None and step.members is not None:
            prefix_attention(
                qkv, cache, tables, step.prefixes, step.members, workspace, layer, tuning.prefix, early
            )
        tile = tuning.decode_for(len(qkv), step.near)
        decode_attention(qkv, cache, tables, step.decodes, workspace, layer, tile, early, out)
        if step.chunks is not None:
            tile, tma = tuning.chunk, tuning.descriptors
            chunk_attention(qkv, cache, tables, step.chunks, workspace, layer, tile, tma, early, out)
        return out
