"""The interfaces between models and attention: over the paged KV cache in decoders, within sequences in encoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from inflight.kv.layout import KVLayout, KVPlace, LayerKV, place_layers
from inflight.layers.recurrent import StateInputs

_ALIGNMENT = 16  # bytes, of blocks in slots with quantized layers

BlockShape = Callable[[LayerKV], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV memory of one rank: its attention layers, and their places among the slots and tables (`kv/layout.py`)."""

    layers: tuple[LayerKV, ...]
    places: tuple[KVPlace, ...]  # of each layer; slots are those of the whole model
    windows: tuple[int | None, ...]  # of each block table of the whole model
    block_size: int
    dtype: torch.dtype  # of layers that are not quantized
    snapshot_blocks: int = 0  # blocks that a snapshot of this rank's recurrent states takes

    @classmethod
    def from_layers(
        cls, layers: Sequence[LayerKV], block_size: int, dtype: torch.dtype, own: range | None = None
    ) -> KVShape:
        """Place all layers of a model; `own` are those of this rank, by default all."""
        places, windows = place_layers(layers, dtype.itemsize)
        part = slice(None) if own is None else slice(own.start, own.stop)
        return cls(tuple(layers[part]), tuple(places[part]), windows, block_size, dtype)

    @property
    def slots(self) -> range:
        """The slots that this rank has: those of its layers, and at least one, for snapshots."""
        used = [place.slot for place in self.places]
        return range(min(used, default=0), max(used, default=0) + 1)

    @property
    def slot_dtype(self) -> torch.dtype:
        """The dtype of the slots: bytes if some layers are quantized."""
        return torch.uint8 if any(layer.is_quantized for layer in self.layers) else self.dtype

    @property
    def values_per_part(self) -> int:
        """Values of `slot_dtype` of a block in one slot."""
        return self.bytes_per_part // self.slot_dtype.itemsize

    @property
    def bytes_per_part(self) -> int:
        """Bytes of a block in one slot."""
        width = self.dtype.itemsize
        ends = [
            (place.part + 1) * layer.block_bytes(self.block_size, width)
            for layer, place in zip(self.layers, self.places, strict=True)
        ]
        most = max(ends, default=self.block_size * width)
        return most if self.slot_dtype == self.dtype else -(-most // _ALIGNMENT) * _ALIGNMENT

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all slots."""
        return len(self.slots) * self.bytes_per_part

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.block_size, self.windows, self.snapshot_blocks)


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """The quantized keys and values of one layer, block by block, each followed by its scales.

    Products of codes and scales are exact in float32: scales of fp8 are powers of two, and those of int8 have 8 bits.
    The scale of a key is the lower half of a word and that of its value the upper half, both in bfloat16.
    """

    codes: Tensor  # [num_blocks, ...] int8, or uint8 for e4m3, as the backend lays out a block
    scales: Tensor  # [num_blocks, num_kv_heads, block_size] int32


LayerCache = Tensor | QuantizedKV


def halves(cache: LayerCache) -> tuple[Tensor, Tensor | None]:
    """Return a layer's values or codes, and the scales of codes."""
    return (cache.codes, cache.scales) if isinstance(cache, QuantizedKV) else (cache, None)


@dataclass(slots=True)
class KVCache:
    """The KV memory: one tensor per slot, and the part of it that belongs to each attention layer."""

    slots: list[Tensor]  # [num_blocks, values_per_part] of `slot_dtype`
    # A LayerCache each, [num_blocks, ...], as the backend lays out a block; blocks may be apart.
    layers: list[Any]

    @classmethod
    def divide(cls, slots: list[Tensor], shape: KVShape, block_shape: BlockShape) -> KVCache:
        """Divide slots among the layers. `block_shape` returns the shape of a layer's block."""
        layers: list[LayerCache] = []
        first_slot, block_size = shape.slots.start, shape.block_size
        for layer, place in zip(shape.layers, shape.places, strict=True):
            slot = slots[place.slot - first_slot]
            size = layer.block_bytes(block_size, shape.dtype.itemsize) // slot.dtype.itemsize
            part = slot[:, place.part * size : (place.part + 1) * size]
            if layer.is_quantized:
                num_codes, num_blocks = layer.size * block_size, len(part)
                kind = torch.int8 if layer.quantized == "int8" else torch.uint8
                codes = part[:, :num_codes].view(kind).view(num_blocks, *block_shape(layer))
                words = part[:, num_codes:].view(torch.int32)
                layers.append(QuantizedKV(codes, words.view(num_blocks, layer.num_heads, block_size)))
            else:
                layers.append(part.view(shape.dtype).view(len(part), *block_shape(layer)))
        return cls(slots, layers)

    def clear(self) -> None:
        self.slots.clear()
        self.layers.clear()


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The parameters of attention in one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None  # [head_dim] float32
    k_norm: Tensor | None  # [head_dim] float32
    eps: float
    # [max_position, rotary_dim] float32: cos in the first half, sin in the second; None: nothing is rotated
    cos_sin: Tensor | None
    scale: float
    window: int | None  # a query at position p sees keys in (p - window, p]; None: all up to p
    table: int = 0  # the block table that leads to its keys and values
    sinks: Tensor | None = None  # [num_heads] float32: exp(sink) is added to the softmax denominator, once
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    v_norm: Tensor | None = None  # [head_dim] float32
    # Whether it has keys and values of its own; otherwise an earlier layer's are in its cache.
    has_kv: bool = True


@dataclass(slots=True)
class AttentionInputs:
    """Where the T tokens of one step's B entries are. An entry is a request's share of the step.

    Entry i's queries are the last `query_starts[i+1] - query_starts[i]` of its `context_lens[i]` tokens: its KV is
    complete once this step's keys and values are written.
    """

    positions: Tensor  # [T] int64
    query_starts: Tensor  # [B + 1] int32, from 0 to T
    context_lens: Tensor  # [B] int32, tokens with KV after this step
    rows: Tensor  # [B] int32, index into block_tables
    # [num_tables, max_rows, max_blocks] int32, permanent. Entries before a table's window may be anything.
    block_tables: Tensor
    # [num_tables, T] int64, where the KV of each token goes: block_id * block_size + offset
    slot_mapping: Tensor
    state: StateInputs | None = None  # None: no layer is recurrent
    live: None = None  # steps are not padded


class BackendStep(Protocol):
    """What every backend's step has beside the inputs of its attention."""

    @property
    def live(self) -> Tensor | None:
        """[T], negative for padding tokens; None if there are none."""

    @property
    def state(self) -> Any:
        """The step as recurrent layers read it."""


InputsT = TypeVar("InputsT", bound=BackendStep, contravariant=True)


class AttentionBackend(Protocol[InputsT]):
    """Attention that owns the layout of the cache and defines the inputs that it reads a step from."""

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        """Allocate the KV memory."""

    def attend(
        self,
        # [T, (num_heads + 2 * num_kv_heads) * head_dim], as projected, or queries only; may be overwritten
        qkv: Tensor,
        layer: AttentionLayer,
        cache: LayerCache,
        inputs: InputsT,
    ) -> Tensor:  # [T, num_heads * head_dim]
        """Normalise and rotate queries and keys, normalise values, write this step's keys and values for all entries,
        then attend. So an entry may read blocks that another entry of the same step fills.

        A layer without keys and values of its own reads those that an earlier layer of the step wrote to `cache`.
        """


@dataclass(frozen=True, slots=True)
class Sequences:
    """The B sequences of one step, T tokens side by side without padding."""

    starts: Tensor  # [B + 1] int32, from 0 to T, on the device
    lengths: list[int] | None  # [B]; None: only the device knows, and B and T are capacities


@dataclass(frozen=True, slots=True)
class SequenceLayer:
    """The parameters of an encoder's attention in one layer."""

    num_heads: int
    head_dim: int
    scale: float
    window: int | None  # a token at i sees those at j with |i - j| <= window; None: all of its sequence
    # [max_position, rotary_dim] float32: cos in the first half, sin in the second; None: nothing is rotated
    cos_sin: Tensor | None = None


class SequenceAttention(Protocol):
    """Attention of encoders: every token of a sequence sees every other, and nothing is kept for later steps."""

    def attend(
        self,
        qkv: Tensor,  # [T, 3 * num_heads * head_dim], as projected; may be overwritten
        layer: SequenceLayer,
        sequences: Sequences,
        positions: Tensor,  # [T] int64, from 0 in each sequence
    ) -> Tensor:  # [T, num_heads * head_dim]
        """Rotate queries and keys, and attend within each sequence."""
