"""Attention on a CPU, over the KV cache and within sequences: compiled, or plain torch without a compiler."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.attention.backend import (
    AttentionInputs,
    AttentionLayer,
    KVCache,
    KVShape,
    LayerCache,
    SequenceAttention,
    SequenceLayer,
    Sequences,
    halves,
)
from inflight.layers.native.library import Library, native_library
from inflight.layers.native_linears import vector_pointer


class HeadAttention(Protocol):
    """Cache write and attention, without norms and rotation: `ComposedAttention` turns it into a backend."""

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        """Allocate the KV memory."""

    def attend(
        self,
        query: Tensor,  # [T, num_heads, head_dim]
        key: Tensor | None,  # [T, num_kv_heads, head_dim]; None: this step's are in the cache
        value: Tensor | None,  # [T, num_kv_heads, head_dim]
        layer: AttentionLayer,
        cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:  # [T, num_heads, head_dim]
        ...


class Rotation(Protocol):
    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Apply the rotary embedding to x [T, heads, head_dim]: the first rotary_dim features of each head, in halves
        (feature i rotates with feature i + rotary_dim / 2). May work in place."""


class HeadKernels(Rotation, Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension of a tensor of any rank."""


class ComposedAttention:
    """Implements `AttentionBackend[AttentionInputs]`: norms and rotation of heads, then a `HeadAttention`."""

    def __init__(self, kernels: HeadKernels, heads: HeadAttention) -> None:
        self._kernels = kernels
        self._heads = heads

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        return self._heads.allocate(shape, num_blocks, device)

    def attend(
        self, qkv: Tensor, layer: AttentionLayer, cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        kernels, positions, cos_sin = self._kernels, inputs.positions, layer.cos_sin
        num_heads, num_rotated = layer.num_heads, layer.num_heads + layer.num_kv_heads
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        if not layer.has_kv:
            query = heads if layer.q_norm is None else kernels.rms_norm(heads, layer.q_norm, layer.eps)
            if cos_sin is not None:
                query = kernels.rotate(query, positions, cos_sin)
            return self._heads.attend(query, None, None, layer, cache, inputs).reshape(len(qkv), -1)
        if layer.q_norm is None or layer.k_norm is None:
            rotated = heads[:, :num_rotated]
            if cos_sin is not None:
                rotated = kernels.rotate(rotated, positions, cos_sin)
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        else:
            query = kernels.rms_norm(heads[:, :num_heads], layer.q_norm, layer.eps)
            key = kernels.rms_norm(heads[:, num_heads:num_rotated], layer.k_norm, layer.eps)
            if cos_sin is not None:
                query = kernels.rotate(query, positions, cos_sin)
                key = kernels.rotate(key, positions, cos_sin)
        value = heads[:, num_rotated:]
        if layer.v_norm is not None:
            value = kernels.rms_norm(value, layer.v_norm, layer.eps)
        out = self._heads.attend(query, key, value, layer, cache, inputs)
        return out.reshape(len(qkv), -1)


def cpu_backend(kernels: HeadKernels) -> ComposedAttention | NativeAttention:
    """Return the compiled backend, or plain torch if it is not available."""
    library = native_library()
    return ComposedAttention(kernels, TorchCpuAttention()) if library is None else NativeAttention(library)


class NativeAttention:
    """Implements `AttentionBackend[AttentionInputs]` and `CompiledAttention` in one call of the compiled library, in
    float32: between two products of a step all threads but one wait. The cache is float32 or int8.

    A layer's cache is [num_blocks, num_kv_heads, 2, head_dim, block_size]: keys in this layout, and values in their
    half as [block_size, head_dim]. A query's result is bit-identical in any batch, however its prompt was chunked.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        # The latest structures of each layer, which rarely change, and of the step, which all layers share.
        self._layers: dict[int, tuple[AttentionLayer, tuple[object, ...], Any]] = {}
        self._step: tuple[AttentionInputs, int, Any] | None = None

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        if shape.dtype != torch.float32 or device.type != "cpu":
            raise ConfigError(f"the KV cache is {shape.dtype} on {device}: it must be torch.float32 on cpu")
        if any(layer.quantized == "fp8" for layer in shape.layers):
            raise ConfigError("the KV cache is fp8 on a CPU: it must be float32 or int8")
        # Not initialised, so a large cache takes memory only as its blocks are written.
        lanes = [torch.empty(num_blocks, shape.values_per_part, dtype=shape.lane_dtype) for _ in shape.lanes]
        size = shape.block_size
        return KVCache.divide(lanes, shape, lambda layer: (layer.num_heads, 2, layer.key_dim, size))

    def attend(
        self, qkv: Tensor, layer: AttentionLayer, cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        qkv = qkv.to(torch.float32)
        if qkv.stride(-1) != 1:
            qkv = qkv.contiguous()
        num_tokens, width = qkv.shape
        query_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        expected = query_size + 2 * kv_size * layer.has_kv
        if width != expected:
            raise ConfigError(f"qkv is {list(qkv.shape)}: it must be [{num_tokens}, {expected}]")
        query = qkv.data_ptr()
        key = value = None
        if layer.has_kv:
            key = query + 4 * query_size
            value = key + 4 * kv_size
        out = torch.empty(num_tokens, query_size)
        self._library.attend(
            ctypes.byref(self.heads(layer, cache)), ctypes.byref(self.step(inputs, num_tokens)),
            query, key, value, qkv.stride(0), out.data_ptr(), self._library.threads,
        )  # fmt: skip
        return out

    def heads(self, layer: AttentionLayer, cache: LayerCache) -> Any:
        """Return the library's structure of a layer and its cache."""
        blocks, scales = halves(cache)
        place = blocks.data_ptr(), blocks.shape, blocks.stride(0), scales is None or scales.shape
        known = self._layers.get(id(layer))
        if known is None or known[0] is not layer or known[1] != place:
            known = self._layers[id(layer)] = layer, place, _describe_heads(self._library, layer, cache)
        return known[2]

    def step(self, inputs: AttentionInputs, num_tokens: int) -> Any:
        """Return the library's structure of a step."""
        known = self._step
        if known is None or known[0] is not inputs or known[1] != num_tokens:
            known = self._step = inputs, num_tokens, _describe_step(self._library, inputs, num_tokens)
        return known[2]

    def addresses(self, caches: Sequence[LayerCache]) -> list[int]:
        """Return where the caches of layers are."""
        return [halves(cache)[0].data_ptr() for cache in caches]


# ---- the structures of the library, whose layouts are checked, since it trusts its pointers ----


def _describe_heads(library: Library, layer: AttentionLayer, cache: LayerCache) -> Any:
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


def _describe_step(library: Library, inputs: AttentionInputs, num_tokens: int) -> Any:
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


# ---- without a compiler ----


class TorchCpuAttention:
    """Implements `HeadAttention` in torch, equal to the compiled one up to rounding.

    A layer's cache is [num_blocks, 2, block_size, num_kv_heads, head_dim], and so are the codes of a quantized one.
    """

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        lanes = [
            torch.empty(num_blocks, shape.values_per_part, dtype=shape.lane_dtype, device=device)
            for _ in shape.lanes
        ]
        size = shape.block_size
        return KVCache.divide(lanes, shape, lambda layer: (2, size, layer.num_heads, layer.key_dim))

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        layer: AttentionLayer,
        cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        block_size, window = halves(cache)[0].shape[2], layer.window
        tables, slot_mapping = inputs.block_tables[layer.table], inputs.slot_mapping[layer.table]
        if key is not None and value is not None:
            kv = torch.stack((key, value), 1)
            _write(cache, kv, slot_mapping // block_size, slot_mapping % block_size)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts = inputs.query_starts.tolist()
        for entry, (context_len, row) in enumerate(
            zip(inputs.context_lens.tolist(), inputs.rows.tolist(), strict=True)
        ):
            first, end = starts[entry], starts[entry + 1]
            position = context_len - (end - first)
            # Only slots that some query of the entry sees: others may hold anything.
            lowest = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(lowest, context_len, device=query.device)
            read = _read(cache, tables[row, seen // block_size].long(), seen % block_size)
            keys, values = read.permute(1, 2, 0, 3)  # [num_kv_heads, n, head_dim]
            positions = torch.arange(position, context_len, device=query.device).unsqueeze(1)
            mask = seen <= positions
            if window is not None:
                mask &= seen > positions - window
            keys, values = keys.to(query.dtype), values.to(query.dtype)
            out[first:end] = _attend(query[first:end].transpose(0, 1), keys, values, mask, layer).transpose(
                0, 1
            )
        return out


def _write(cache: LayerCache, kv: Tensor, blocks: Tensor, places: Tensor) -> None:
    """Write keys and values [T, 2, num_kv_heads, head_dim] to places of blocks, both [T]."""
    if isinstance(cache, Tensor):
        cache[blocks, :, places] = kv.to(cache.dtype)
        return
    if cache.codes.dtype == torch.int8:
        scales = _int8_scales(kv)
        codes = (kv.float() / scales.unsqueeze(-1)).round().nan_to_num(0.0).to(torch.int8)
    else:
        scales = _fp8_scales(kv)
        codes = (kv.float() / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    cache.codes[blocks, :, places] = codes.view(cache.codes.dtype)
    pairs = torch.stack(scales.to(torch.bfloat16).unbind(1), dim=-1)  # [T, num_kv_heads, 2]
    cache.scales[blocks, :, places] = pairs.view(torch.int32).squeeze(-1)


def _int8_scales(kv: Tensor) -> Tensor:
    """[..., head_dim] -> [...]: the smallest numbers of bfloat16 that scale all numbers to at most 127."""
    largest = kv.float().abs().amax(-1)
    rounded_up = ((largest / 127).view(torch.int32) + 0xFFFF) & ~0xFFFF
    return rounded_up.view(torch.float32).where(largest.isfinite(), torch.nan)


def _fp8_scales(kv: Tensor) -> Tensor:
    """[..., head_dim] -> [...]: the smallest powers of two that scale all numbers to at most 448, the largest e4m3."""
    # All products must be numbers of the dtype.
    least, most = (-15, 7) if kv.dtype == torch.float16 else (-100, 118)
    # 0.5 <= mantissa < 1, and 448 = 0.875 * 2^9.
    mantissas, exponents = torch.frexp(kv.float().abs().amax(-1))
    exponents = (exponents - 9 + (mantissas > 0.875)).clamp(least, most)
    return torch.ldexp(torch.ones_like(mantissas), exponents).where(mantissas.isfinite(), torch.inf)


def _read(cache: LayerCache, blocks: Tensor, places: Tensor) -> Tensor:
    """Return keys and values [n, 2, num_kv_heads, head_dim] at places of blocks, both [n]."""
    if isinstance(cache, Tensor):
        return cache[blocks, :, places]
    codes = cache.codes[blocks, :, places]
    if codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    scales = cache.scales[blocks, :, places].unsqueeze(-1).view(torch.bfloat16).mT  # [n, 2, num_kv_heads]
    return codes.float() * scales.float().unsqueeze(-1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, layer: AttentionLayer) -> Tensor:
    """query [num_heads, m, head_dim], keys and values [num_kv_heads, n, head_dim], mask [m, n] -> like query."""
    if layer.sinks is None and layer.softcap is None:
        attended = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, scale=layer.scale, enable_gqa=True
        )
        return attended.squeeze(0)
    group = layer.num_heads // layer.num_kv_heads
    keys, values = keys.repeat_interleave(group, dim=0), values.repeat_interleave(group, dim=0)
    scores = (query @ keys.mT).float() * layer.scale
    if layer.softcap is not None:
        scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    scores.masked_fill_(~mask, -torch.inf)
    if layer.sinks is not None:
        sinks = layer.sinks[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return weights.to(values.dtype) @ values


# ---- within sequences ----


class TorchSequenceAttention:
    """Implements `SequenceAttention` in torch, one sequence at a time: the reference, for any device."""

    def __init__(self, kernels: Rotation) -> None:
        self._kernels = kernels

    def attend(self, qkv: Tensor, layer: SequenceLayer, sequences: Sequences, positions: Tensor) -> Tensor:
        heads = qkv.view(len(qkv), 3, layer.num_heads, layer.head_dim)
        query, key, value = heads.unbind(1)  # [T, num_heads, head_dim]
        if layer.cos_sin is not None:
            query = self._kernels.rotate(query, positions, layer.cos_sin)
            key = self._kernels.rotate(key, positions, layer.cos_sin)
        assert sequences.lengths is not None
        out = torch.empty(query.shape, dtype=qkv.dtype, device=qkv.device)
        first = 0
        for length in sequences.lengths:
            here = slice(first, first + length)
            first += length
            out[here] = F.scaled_dot_product_attention(
                _batched(query[here]),
                _batched(key[here]),
                _batched(value[here]),
                attn_mask=_near(length, layer.window, qkv.device),
                scale=layer.scale,
            )[0].transpose(0, 1)
        return out.view(len(qkv), -1)


def _batched(heads: Tensor) -> Tensor:
    """[n, num_heads, head_dim] -> [1, num_heads, n, head_dim]"""
    return heads.transpose(0, 1).unsqueeze(0)


def _near(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask [length, length] of the tokens that each token sees, or None if all see all."""
    if window is None or window >= length - 1:
        return None
    positions = torch.arange(length, device=device)
    return (positions.unsqueeze(1) - positions).abs() <= window


def cpu_sequence_attention(kernels: Rotation) -> SequenceAttention:
    """Return the compiled attention, or plain torch if it is not available."""
    library = native_library()
    return TorchSequenceAttention(kernels) if library is None else NativeSequenceAttention(library, kernels)


class NativeSequenceAttention:
    """Implements `SequenceAttention` in float32. A sequence's result is bit-identical in any batch."""

    def __init__(self, library: Library, kernels: Rotation) -> None:
        """`kernels` rotate in place."""
        self._library = library
        self._kernels = kernels

    def attend(self, qkv: Tensor, layer: SequenceLayer, sequences: Sequences, positions: Tensor) -> Tensor:
        qkv = qkv.to(torch.float32).contiguous()
        num_heads, head_dim, window = layer.num_heads, layer.head_dim, layer.window
        _check_sequences(qkv, num_heads, head_dim, sequences)
        if layer.cos_sin is not None:
            queries_and_keys = qkv.view(len(qkv), -1, head_dim)[:, : 2 * num_heads]
            self._kernels.rotate(queries_and_keys, positions, layer.cos_sin)
        out = torch.empty(len(qkv), num_heads * head_dim)
        self._library.attend_sequences(
            qkv.data_ptr(), out.data_ptr(), sequences.starts.data_ptr(), len(sequences.starts) - 1, num_heads,
            head_dim, -1 if window is None else window, layer.scale, self._library.threads,
        )  # fmt: skip
        return out


def _check_sequences(qkv: Tensor, num_heads: int, head_dim: int, sequences: Sequences) -> None:
    """Check the layout of the tensors: the library trusts its pointers."""
    starts, lengths = sequences.starts, sequences.lengths
    if qkv.dim() != 2 or qkv.shape[1] != 3 * num_heads * head_dim:
        raise ConfigError(f"qkv is {list(qkv.shape)}: it must be [tokens, 3 * {num_heads} * {head_dim}]")
    if starts.dtype != torch.int32 or lengths is None or starts.shape != (len(lengths) + 1,):
        raise ConfigError("starts must be int32, with one more entry than there are sequences")
    numbers = starts.tolist()  # in one call: each operation on a tensor takes microseconds, in every layer
    if not starts.is_contiguous() or (numbers[0], numbers[-1]) != (0, len(qkv)) or numbers != sorted(numbers):
        raise ConfigError(f"starts must be contiguous and rise from 0 to {len(qkv)} tokens")
