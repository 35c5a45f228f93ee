"""The attention backend for GPUs: a few launches per layer, all of which a CUDA graph can capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.layers.attention.backend import AttentionLayer, KVCache, KVShape, LayerCache, QuantizedKV
from inflight.layers.attention.triton.chunk import chunk_attention
from inflight.layers.attention.triton.decode import decode_attention, prefix_attention
from inflight.layers.attention.triton.rope_write import rope_write
from inflight.layers.attention.triton.softmax import AttentionWorkspace, Items
from inflight.layers.attention.triton.tuning import HeadShape, Tuning, choose
from inflight.layers.triton.recurrent import RecurrentStep
from inflight.layers.triton_utils.padding import padded_empty

PIECE = 2 << 20  # bytes


@dataclass(frozen=True, slots=True)
class TableInputs:
    """A step as the layers of one block table read it. Kernels whose items are None are not launched."""

    tuning: Tuning  # the tiles that the items are planned for
    # [T] int32, where each token's KV goes: block_id * block_size + offset; below 0: padding
    slot_mapping: Tensor
    block_tables: Tensor  # [max_rows, max_blocks] int32
    decodes: Items  # DecodePlan.items
    prefixes: Items | None  # PrefixPlan.items
    members: Tensor | None  # PrefixPlan.members(), int32, max_members rows; with prefixes only
    chunks: Items | None  # ChunkPlan.items


@dataclass(frozen=True, slots=True)
class TritonInputs:
    """One step in device memory; all contents may change between replays of a graph."""

    positions: Tensor  # [T] int32; any valid position for padding
    padding_mask: Tensor  # [T] int32; below 0: padding
    tables: tuple[TableInputs | None, ...]  # None: no layer here has keys and values in this table
    short_context: bool  # DecodeWork.short_context
    workspace: AttentionWorkspace
    state: RecurrentStep | None = None  # None: no layer is recurrent


class TritonAttention:
    """Implements `AttentionBackend[TritonInputs]`.

    A layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_dim]: index 0 keys, 1 values. So are the codes of
    a quantized one.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def tuning_for(self, heads: HeadShape) -> Tuning:
        """Return the tiles for layers with such heads."""
        return choose(self._dtype, heads.head_dim, heads.group, self._device)

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        dtype = shape.lane_dtype
        num_elements, width = num_blocks * shape.values_per_part, dtype.itemsize
        # Torch allocates device memory in such pieces and puts other tensors into the rest of a piece: the KV cache
        # could then not be released for as long as they live.
        rounded = -(-num_elements * width // PIECE) * PIECE // width
        lanes = [
            torch.empty(rounded, dtype=dtype, device=device)[:num_elements].view(num_blocks, -1)
            for _ in shape.lanes
        ]
        size = shape.block_size
        return KVCache.divide(lanes, shape, lambda layer: (2, layer.num_heads, size, layer.key_dim))

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: LayerCache, inputs: TritonInputs) -> Tensor:
        """Attend. Rows of the result that belong to no item are undefined."""
        step = inputs.tables[layer.table]
        assert step is not None
        tuning = step.tuning
        rope_write(qkv, inputs.positions, step.slot_mapping, layer, cache, tuning.pdl)
        tables, workspace, pdl = step.block_tables, inputs.workspace, tuning.pdl
        out = padded_empty(len(qkv), layer.num_heads * layer.head_dim, qkv.dtype, qkv.device)
        if step.prefixes is not None and step.members is not None:
            prefix_attention(
                qkv, cache, tables, step.prefixes, step.members, workspace, layer, tuning.prefix, pdl
            )
        tile = tuning.decode_for(len(qkv), inputs.short_context, isinstance(cache, QuantizedKV))
        decode_attention(qkv, cache, tables, step.decodes, workspace, layer, tile, pdl, out)
        if step.chunks is not None:
            tile, tma = tuning.chunk, tuning.descriptors
            chunk_attention(qkv, cache, tables, step.chunks, workspace, layer, tile, tma, pdl, out)
        return out
