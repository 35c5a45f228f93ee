"""Plain decoder layers in one call of the compiled library, without Python between two operations of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from inflight.attention.backend import AttentionInputs, LayerCache, PlainLayer, halves
from inflight.attention.cpu_checks import (
    check_cache,
    check_positions,
    check_step,
    preparation_of,
    vector_pointer,
)
from inflight.errors import ConfigError
from inflight.layers.native_linears import CompiledLinear, dense
from inflight.native.library import GATE_NUMBERS, DecoderLayer, DecoderStep, Library, LinearMatrix


def fuse_layers(library: Library, layers: Sequence[PlainLayer]) -> NativeLayers | None:
    """Return the first layers, up to one that is not made of single products of the library."""
    described: list[DecoderLayer] = []
    for layer in layers:
        own = _describe(layer)
        if own is None:
            break
        described.append(own)
    return NativeLayers(library, layers, described) if described else None


class NativeLayers:
    """Implements `FusedLayers`. The bits are those of the operations one by one."""

    def __init__(
        self, library: Library, layers: Sequence[PlainLayer], described: Sequence[DecoderLayer]
    ) -> None:
        self.count = len(described)
        self._library = library
        self._layers = layers[: self.count]  # they keep the memory alive that is pointed to
        self._hidden = layers[0].qkv.in_features
        self._array = (DecoderLayer * self.count)(*described)
        self._caches: list[int] = []  # where the caches are that the array points to

    def run(self, x: Tensor, caches: Sequence[LayerCache], inputs: AttentionInputs, count: int) -> Tensor:
        """In place."""
        x = dense(x)
        num_tokens, width = x.shape
        if width != self._hidden:
            raise ConfigError(f"the residual is {list(x.shape)}: it must be [{num_tokens}, {self._hidden}]")
        self._point_to(caches[: self.count])
        check_step(num_tokens, inputs)
        check_positions(inputs, num_tokens)
        tables = inputs.block_tables
        step = DecoderStep(
            inputs.positions.data_ptr(),
            inputs.query_starts.data_ptr(),
            inputs.context_lens.data_ptr(),
            inputs.rows.data_ptr(),
            tables.data_ptr(),
            inputs.slot_mapping.data_ptr(),
            inputs.rows.shape[0],
            num_tokens,
            tables.stride(0),
            tables.stride(1),
        )
        if num_tokens:
            self._library.decoder_layers(
                self._array, min(count, self.count), ctypes.byref(step), x.data_ptr(), self._library.threads
            )
        return x

    def _point_to(self, caches: Sequence[LayerCache]) -> None:
        """Let the layers read these caches, which rarely are others than in the last step."""
        pointers = [halves(cache)[0].data_ptr() for cache in caches]
        if pointers == self._caches:
            return
        self._caches = []
        for layer, own, cache in zip(self._layers, self._array, caches, strict=True):
            check_cache(layer.heads.num_heads, layer.heads.head_dim, cache)
            blocks, scales = halves(cache)
            if blocks.shape[1] != layer.heads.num_kv_heads:
                raise ConfigError(
                    f"{layer.heads.num_kv_heads} KV heads and a cache of {blocks.shape[1]} do not match"
                )
            own.cache, own.scales = blocks.data_ptr(), None if scales is None else scales.data_ptr()
            own.block_size, own.block_stride = blocks.shape[4], blocks.stride(0)
        self._caches = pointers


def _describe(layer: PlainLayer) -> DecoderLayer | None:
    matrices = [_matrix(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    heads, hidden = layer.heads, layer.qkv.in_features
    if None in matrices or layer.activation not in GATE_NUMBERS or not heads.has_kv:
        return None
    expected = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, heads.num_heads * heads.head_dim
    if (layer.qkv.out_features, layer.output.in_features) != expected:
        return None
    return DecoderLayer(
        vector_pointer(layer.attention_norm, hidden),
        vector_pointer(layer.mlp_norm, hidden),
        *matrices,
        *preparation_of(heads, None),
        vector_pointer(heads.sinks, heads.num_heads, "sinks are"),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        heads.window or 0,
        heads.table,
        heads.scale,
        heads.softcap or 0.0,
        GATE_NUMBERS[layer.activation],
        layer.eps,
    )


def _matrix(linear: object) -> LinearMatrix | None:
    return linear.matrix() if isinstance(linear, CompiledLinear) else None
