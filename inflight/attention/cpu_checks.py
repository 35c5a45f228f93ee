"""Checks of the layouts that compiled attention is called with, since the library trusts its pointers."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.attention.backend import AttentionInputs, AttentionLayer, LayerCache, halves
from inflight.errors import ConfigError

# Norms of queries, keys and values, rotary table, positions, rotary_dim, eps.
Preparation = tuple[int | None, int | None, int | None, int | None, int | None, int, float]


def vector_pointer(vector: Tensor | None, size: int, name: str = "a norm is") -> int | None:
    """Return the address of a float32 vector of this size. `name` begins the error message."""
    if vector is None:
        return None
    if vector.shape != (size,) or vector.dtype != torch.float32 or not vector.is_contiguous():
        raise ConfigError(f"{name} {vector.dtype} {list(vector.shape)}: only float32 [{size}] is allowed")
    return vector.data_ptr()


def preparation_of(layer: AttentionLayer, positions: int | None) -> Preparation:
    """Return how heads are normalised and rotated. Queries and keys are both normalised, or neither."""
    q_norm, k_norm, v_norm = layer.q_norm, layer.k_norm, layer.v_norm
    if layer.has_kv and (q_norm is None or k_norm is None):
        q_norm = k_norm = None
    size, table = layer.head_dim, layer.cos_sin
    norms = vector_pointer(q_norm, size), vector_pointer(k_norm, size), vector_pointer(v_norm, size)
    if table is None:
        return *norms, None, None, 0, layer.eps
    rotary_dim = table.shape[1]
    if rotary_dim > size or rotary_dim % 2 or table.dtype != torch.float32 or not table.is_contiguous():
        raise ConfigError(
            f"cannot rotate heads of {size} features by a table {table.dtype} {list(table.shape)}"
        )
    return *norms, table.data_ptr(), positions, rotary_dim, layer.eps


def check_positions(inputs: AttentionInputs, num_tokens: int) -> None:
    positions = inputs.positions
    if positions.shape != (num_tokens,) or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ConfigError(
            f"positions are {positions.dtype} {list(positions.shape)}: they must be contiguous int64 [{num_tokens}]"
        )


def check_cache(num_heads: int, head_dim: int, cache: LayerCache) -> None:
    blocks, scales = halves(cache)
    num_kv_heads, block_size = blocks.shape[1], blocks.shape[4]
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


def check_step(num_tokens: int, inputs: AttentionInputs) -> None:
    starts, lens, rows, tables = inputs.query_starts, inputs.context_lens, inputs.rows, inputs.block_tables
    num_entries = rows.shape[0]
    narrow = starts.dtype == lens.dtype == rows.dtype == tables.dtype == torch.int32
    dense = starts.is_contiguous() and lens.is_contiguous() and rows.is_contiguous() and tables.stride(2) == 1
    if not narrow or not dense or starts.shape != (num_entries + 1,) or lens.shape != (num_entries,):
        raise ConfigError("query_starts, context_lens, rows and block_tables must be contiguous int32")
    slot_mapping = inputs.slot_mapping
    fits = slot_mapping.shape == (len(tables), num_tokens) and slot_mapping.is_contiguous()
    if slot_mapping.dtype != torch.int64 or not fits:
        raise ConfigError("slot_mapping must be contiguous int64, one for each table and token")
