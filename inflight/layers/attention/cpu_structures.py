"""The structures that compiled attention is called with. Layouts are checked, since the library trusts its pointers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.attention.backend import AttentionInputs, AttentionLayer, LayerCache, halves
from inflight.layers.native.library import Library
from inflight.layers.native_linears import vector_pointer


def describe_heads(library: Library, layer: AttentionLayer, cache: LayerCache) -> Any:
    """Return a layer's `Heads`. Queries and keys are both normalised, or neither."""
    q_norm, k_norm, v_norm, table = layer.q_norm, layer.k_norm, layer.v_norm, layer.cos_sin
    if layer.has_kv and (q_norm is None or k_norm is None):
        q_norm = k_norm = None
    size, num_heads = layer.head_dim, layer.num_heads
    blocks, scales = halves(cache)
    _check_cache(layer, cache)
    return library.heads(
        query_norm=vector_pointer(q_norm, size),
        key_norm=vector_pointer(k_norm, size),
        value_norm=vector_pointer(v_norm, size),
        cos_sin=_rotary_table(table, size),
        sinks=vector_pointer(layer.sinks, num_heads, "the vector of sinks"),
        rotary_dim=0 if table is None else table.shape[1],
        heads=num_heads,
        kv_heads=blocks.shape[1],
        dim=size,
        window=layer.window or 0,
        table=layer.table,
        eps=layer.eps,
        scale=layer.scale,
        softcap=layer.softcap or 0.0,
        memory=blocks.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        block_size=blocks.shape[4],
        block_stride=blocks.stride(0),
    )


def describe_step(library: Library, inputs: AttentionInputs, num_tokens: int) -> Any:
    """Return the `Step` of a batch."""
    _check_step(num_tokens, inputs)
    tables = inputs.block_tables
    return library.step(
        positions=inputs.positions.data_ptr(),
        query_starts=inputs.query_starts.data_ptr(),
        context_lens=inputs.context_lens.data_ptr(),
        rows=inputs.rows.data_ptr(),
        tables=tables.data_ptr(),
        slot_mapping=inputs.slot_mapping.data_ptr(),
        entries=inputs.rows.shape[0],
        tokens=num_tokens,
        table_size=tables.stride(0),
        table_stride=tables.stride(1),
    )


def _rotary_table(table: Tensor | None, head_dim: int) -> int | None:
    if table is None:
        return None
    rotary_dim = table.shape[1]
    if rotary_dim > head_dim or rotary_dim % 2 or table.dtype != torch.float32 or not table.is_contiguous():
        raise ConfigError(
            f"cannot rotate heads of {head_dim} features by a table {table.dtype} {list(table.shape)}"
        )
    return table.data_ptr()


def _check_cache(layer: AttentionLayer, cache: LayerCache) -> None:
    num_heads, head_dim = layer.num_heads, layer.head_dim
    blocks, scales = halves(cache)
    num_kv_heads, block_size = blocks.shape[1], blocks.shape[4]
    if layer.has_kv and num_kv_heads != layer.num_kv_heads:
        raise ConfigError(f"{layer.num_kv_heads} KV heads and a cache of {num_kv_heads} do not match")
    half = head_dim * block_size
    is_dense = blocks.stride()[1:] == (2 * half, half, block_size, 1) or blocks[0].is_contiguous()
    if blocks.shape[3] != head_dim or not is_dense or num_heads % num_kv_heads:
        raise ConfigError(
            f"{num_heads} query heads of {head_dim} features and cache {list(blocks.shape)} do not match"
        )
    if scales is not None and (
        scales.shape[1:] != (num_kv_heads, block_size)
        or scales.dtype != torch.int32
        or blocks.dtype != torch.int8
        or not scales[0].is_contiguous()
        or scales.stride(0) * 4 != blocks.stride(0)
    ):
        raise ConfigError(
            f"codes {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} {list(scales.shape)} do not match"
        )


def _check_step(num_tokens: int, inputs: AttentionInputs) -> None:
    starts, lens, rows, tables = inputs.query_starts, inputs.context_lens, inputs.rows, inputs.block_tables
    num_entries = rows.shape[0]
    narrow = starts.dtype == lens.dtype == rows.dtype == tables.dtype == torch.int32
    dense = starts.is_contiguous() and lens.is_contiguous() and rows.is_contiguous() and tables.stride(2) == 1
    if not narrow or not dense or starts.shape != (num_entries + 1,) or lens.shape != (num_entries,):
        raise ConfigError("query_starts, context_lens, rows and block_tables must be contiguous int32")
    positions, slot_mapping = inputs.positions, inputs.slot_mapping
    if positions.shape != (num_tokens,) or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ConfigError(
            f"positions are {positions.dtype} {list(positions.shape)}: they must be contiguous int64 [{num_tokens}]"
        )
    fits = slot_mapping.shape == (len(tables), num_tokens) and slot_mapping.is_contiguous()
    if slot_mapping.dtype != torch.int64 or not fits:
        raise ConfigError("slot_mapping must be contiguous int64, one for each table and token")
