"""Plain decoder layers in one call of the compiled library, without Python between two operations of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import GATES, FusableLayer
from inflight.layers.native_linears import NativeLinear, Slabs, dense, vector_pointer


@runtime_checkable
class CompiledAttention(Protocol):
    """An attention backend over the compiled library."""

    def heads(self, layer: Any, cache: Any) -> Any:
        """Return the library's `Heads` of a layer."""

    def step(self, inputs: Any, num_tokens: int) -> Any:
        """Return the library's `Step` of a batch."""

    def addresses(self, caches: Sequence[Any]) -> list[int]:
        """Return where the caches of layers are."""


class NativeLayers:
    """Implements `FusedLayers`: the first layers, up to one that is not made of whole products of the library. The bits
    are those of the operations one by one."""

    def __init__(self, slabs: Slabs, layers: Sequence[FusableLayer], attention: CompiledAttention) -> None:
        self._slabs = slabs
        self._library = slabs.library
        self._attention = attention
        self._layers = list(takewhile(_is_fusable, layers))
        self.count = len(self._layers)
        self._array: Any = None
        self._places: list[int] = []  # where the weights and caches are that the array leads to

    def run(self, x: Tensor, caches: Sequence[Any], inputs: Any, count: int) -> Tensor:
        """In place."""
        x = dense(x)
        num_tokens, width = x.shape
        hidden = self._layers[0].qkv.in_features
        if width != hidden:
            raise ConfigError(f"the residual is {list(x.shape)}: it must be [{num_tokens}, {hidden}]")
        self._point_to(caches[: self.count])
        step = self._attention.step(inputs, num_tokens)
        if num_tokens:
            self._library.decoder_layers(
                self._array, min(count, self.count), ctypes.byref(step), x.data_ptr(), self._library.threads
            )
        return x

    def _point_to(self, caches: Sequence[Any]) -> None:
        """Let the layers read these caches and their weights, which rarely are elsewhere than in the last step."""
        places = [self._slabs.num_moves, *self._attention.addresses(caches)]
        if places != self._places:
            self._places = []
            described = [self._describe(*pair) for pair in zip(self._layers, caches, strict=True)]
            self._array = self._library.decoder_layer.array(described)
            self._places = places

    def _describe(self, layer: FusableLayer, cache: Any) -> Any:
        qkv, output, gate_up, down = _linears(layer)
        hidden, heads = qkv.in_features, self._attention.heads(layer.heads, cache)
        query = heads.heads * heads.dim
        projected = query + 2 * heads.kv_heads * heads.dim
        if (qkv.out_features, output.in_features) != (projected, query):
            raise ConfigError(
                f"attention projects {hidden} features to {qkv.out_features} and {output.in_features} back: these must "
                f"be {projected} and {query}"
            )
        return self._library.decoder_layer(
            attention_norm=vector_pointer(layer.attention_norm, hidden),
            qkv=qkv.structure(),
            heads=heads,
            output=output.structure(),
            mlp_norm=vector_pointer(layer.mlp_norm, hidden),
            gate_up=gate_up.structure(),
            down=down.structure(),
            gate=self._library.activations[layer.activation],
            eps=layer.eps,
        )


def _linears(layer: FusableLayer) -> list[NativeLinear]:
    linears = layer.qkv, layer.output, layer.gate_up, layer.down
    return [linear for linear in linears if isinstance(linear, NativeLinear)]


def _is_fusable(layer: FusableLayer) -> bool:
    linears = _linears(layer)
    return len(linears) == 4 and not any(linear.reduces for linear in linears) and layer.activation in GATES
