"""Attention on the CPU: compiled, or plain torch where nothing can be compiled."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.attention.backend import AttentionInputs, AttentionLayer, KVShape
from inflight.errors import ConfigError
from inflight.native.library import Library, native_library


class HeadAttention(Protocol):
    """Cache write and attention of heads that are ready: what `ComposedAttention` makes a backend of."""

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> list[Tensor]:
        """One cache tensor per layer."""

    def attend(
        self,
        query: Tensor,  # [T, num_heads, head_dim]
        key: Tensor,  # [T, num_kv_heads, head_dim]
        value: Tensor,  # [T, num_kv_heads, head_dim]
        cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int | None,
    ) -> Tensor:  # [T, num_heads, head_dim]
        ...


class HeadKernels(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension, whatever the leading ones."""

    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotary embedding of x [T, heads, head_dim]: the first rotary_dim features of each head, in halves
        (feature i rotates with feature i + rotary_dim / 2). May work in place."""


class ComposedAttention:
    """Implements `AttentionBackend[AttentionInputs]`: norms and rotation of heads, then a `HeadAttention`."""

    def __init__(self, kernels: HeadKernels, heads: HeadAttention) -> None:
        self._kernels = kernels
        self._heads = heads

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> list[Tensor]:
        return self._heads.allocate(shape, num_blocks, device)

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: Tensor, inputs: AttentionInputs) -> Tensor:
        kernels, positions, cos_sin = self._kernels, inputs.positions, layer.cos_sin
        num_heads, num_rotated = layer.num_heads, layer.num_heads + layer.num_kv_heads
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        if layer.q_norm is None or layer.k_norm is None:
            rotated = kernels.rotate(heads[:, :num_rotated], positions, cos_sin)
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        else:
            query = kernels.rms_norm(heads[:, :num_heads], layer.q_norm, layer.eps)
            key = kernels.rms_norm(heads[:, num_heads:num_rotated], layer.k_norm, layer.eps)
            query = kernels.rotate(query, positions, cos_sin)
            key = kernels.rotate(key, positions, cos_sin)
        value = heads[:, num_rotated:]
        out = self._heads.attend(query, key, value, cache, inputs, layer.scale, layer.window)
        return out.reshape(len(qkv), -1)


def cpu_attention() -> HeadAttention:
    """The compiled backend, or plain torch where it cannot be had."""
    library = native_library()
    return TorchCpuAttention() if library is None else CpuAttention(library)


class CpuAttention:
    """Implements `HeadAttention` on the compiled library, in float32.

    A layer's cache is [num_blocks, num_kv_heads, 2, head_dim, block_size]: keys as drawn, and the values in
    their half as [block_size, head_dim]. A query's result is the same bits whatever else is in the batch and
    however its prompt was cut into chunks.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> list[Tensor]:
        if shape.dtype != torch.float32 or device.type != "cpu":
            raise ConfigError(f"the KV cache is {shape.dtype} on {device}: allowed is torch.float32 on cpu")
        size = (num_blocks, shape.num_kv_heads, 2, shape.head_dim, shape.block_size)
        # Never touched as a whole: a large cache takes memory as its blocks are written.
        return [torch.empty(size) for _ in range(shape.num_layers)]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int | None,
    ) -> Tensor:
        query, key, value = _heads(query), _heads(key), _heads(value)
        num_tokens, num_heads, head_dim = query.shape
        _check(query, key, value, cache, inputs)
        out = torch.empty(num_tokens, num_heads, head_dim)
        self._library.attend(
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            key.data_ptr(),
            key.stride(0),
            key.stride(1),
            value.data_ptr(),
            value.stride(0),
            value.stride(1),
            cache.data_ptr(),
            out.data_ptr(),
            inputs.query_starts.data_ptr(),
            inputs.context_lens.data_ptr(),
            inputs.rows.data_ptr(),
            inputs.block_tables.data_ptr(),
            inputs.kv_places.data_ptr(),
            len(inputs.rows),
            num_tokens,
            num_heads,
            cache.shape[1],
            head_dim,
            cache.shape[4],
            inputs.block_tables.stride(0),
            window or 0,
            scale,
            self._library.threads,
        )
        return out


class TorchCpuAttention:
    """Implements `HeadAttention` with torch alone, within rounding of the compiled one.

    A layer's cache is [2, num_blocks, block_size, num_kv_heads, head_dim].
    """

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> list[Tensor]:
        size = (2, num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        return [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int | None,
    ) -> Tensor:
        block_size = cache.shape[2]
        places = cache.view(2, -1, *cache.shape[3:])  # a place for each token of each block
        places[0].index_copy_(0, inputs.kv_places, key.to(cache.dtype))
        places[1].index_copy_(0, inputs.kv_places, value.to(cache.dtype))
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        starts = inputs.query_starts.tolist()
        for entry, (context_len, row) in enumerate(
            zip(inputs.context_lens.tolist(), inputs.rows.tolist(), strict=True)
        ):
            first, end = starts[entry], starts[entry + 1]
            position = context_len - (end - first)
            # Only places that some query of the entry sees: others may hold anything.
            lowest = 0 if window is None else max(0, position - window + 1)
            seen = torch.arange(lowest, context_len, device=query.device)
            seen_places = inputs.block_tables[row, seen // block_size].long() * block_size + seen % block_size
            keys, values = places[:, seen_places].transpose(1, 2)  # [num_kv_heads, n, head_dim]
            asked = torch.arange(position, context_len, device=query.device).unsqueeze(1)
            mask = seen <= asked
            if window is not None:
                mask &= seen > asked - window
            attended = F.scaled_dot_product_attention(
                query[first:end].transpose(0, 1).unsqueeze(0),
                keys.to(query.dtype).unsqueeze(0),
                values.to(query.dtype).unsqueeze(0),
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )
            out[first:end] = attended.squeeze(0).transpose(0, 1)
        return out


def _heads(x: Tensor) -> Tensor:
    """The library reads float32 [T, heads, head_dim] of any strides but a unit one inside."""
    x = x.to(torch.float32)
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(query: Tensor, key: Tensor, value: Tensor, cache: Tensor, inputs: AttentionInputs) -> None:
    """The library trusts its pointers, so what they point to is checked here."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[1]
    expected = (num_tokens, num_kv_heads, head_dim)
    if (
        key.shape != expected
        or value.shape != expected
        or cache.shape[3] != head_dim
        or num_heads % num_kv_heads
    ):
        raise ConfigError(
            f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)} and cache "
            f"{list(cache.shape)} do not belong together"
        )
    num_entries = len(inputs.rows)
    sizes = (
        (inputs.query_starts, num_entries + 1),
        (inputs.context_lens, num_entries),
        (inputs.rows, num_entries),
    )
    narrow = all(len(x) == size and x.dtype == torch.int32 and x.is_contiguous() for x, size in sizes)
    tables, kv_places = inputs.block_tables, inputs.kv_places
    if not narrow or tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ConfigError("query_starts, context_lens, rows and block_tables must be contiguous int32")
    if kv_places.dtype != torch.int64 or len(kv_places) != num_tokens or not kv_places.is_contiguous():
        raise ConfigError("kv_places must be contiguous int64, one per token")
