"""The interfaces between models and attention: over the paged KV cache in decoders, within sequences in encoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from inflight.kv.layout import KVLayout, KVPlace, LayerKV, place_layers
from inflight.layers.recurrent import StateInputs

BlockShape = Callable[[LayerKV], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV memory of one rank: its attention layers, and their places among the slots and tables (`kv/layout.py`)."""

    layers: tuple[LayerKV, ...]
    places: tuple[KVPlace, ...]  # of each layer; slots are those of the whole model
    windows: tuple[int | None, ...]  # of each block table of the whole model
    block_size: int
    dtype: torch.dtype
    snapshot_blocks: int = 0  # blocks that a snapshot of this rank's recurrent states takes

    @classmethod
    def of(
        cls, layers: Sequence[LayerKV], block_size: int, dtype: torch.dtype, own: range | None = None
    ) -> KVShape:
        """Place all layers of a model; `own` are those of this rank, by default all."""
        places, windows = place_layers(layers)
        part = slice(None) if own is None else slice(own.start, own.stop)
        return cls(tuple(layers[part]), tuple(places[part]), windows, block_size, dtype)

    @property
    def slots(self) -> range:
        """The slots that this rank has: those of its layers, and at least one, for snapshots."""
        used = [place.slot for place in self.places]
        return range(min(used, default=0), max(used, default=0) + 1)

    @property
    def values_per_part(self) -> int:
        """Values of a block in one slot."""
        return self.block_size * max((layer.size for layer in self.layers), default=1)

    @property
    def bytes_per_part(self) -> int:
        return self.values_per_part * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in all slots."""
        return len(self.slots) * self.bytes_per_part

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.block_size, self.windows, self.snapshot_blocks)


@dataclass(slots=True)
class KVCache:
    """The KV memory: one tensor per slot, and the part of it that belongs to each attention layer."""

    slots: list[Tensor]  # [num_blocks, values_per_part]
    layers: list[Tensor]  # [num_blocks, ...], as the backend lays out a block; blocks may be apart

    @classmethod
    def divide(cls, slots: list[Tensor], shape: KVShape, block_shape: BlockShape) -> KVCache:
        """Divide slots among the layers. `block_shape` returns the shape of a layer's block."""
        layers, first_slot = [], shape.slots.start
        for layer, place in zip(shape.layers, shape.places, strict=True):
            size = layer.size * shape.block_size
            part = slots[place.slot - first_slot][:, place.part * size : (place.part + 1) * size]
            layers.append(part.view(len(part), *block_shape(layer)))
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


InputsT = TypeVar("InputsT", contravariant=True)


class AttentionBackend(Protocol[InputsT]):
    """Attention that owns the layout of the cache and defines the inputs that it reads a step from."""

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> KVCache:
        """Allocate the KV memory."""

    def attend(
        self,
        qkv: Tensor,  # [T, (num_heads + 2 * num_kv_heads) * head_dim], as projected; may be overwritten
        layer: AttentionLayer,
        cache: Tensor,
        inputs: InputsT,
    ) -> Tensor:  # [T, num_heads * head_dim]
        """Normalise and rotate queries and keys, write this step's keys and values for all entries, then attend. So an
        entry may read blocks that another entry of the same step fills."""

    def live(self, inputs: InputsT) -> Tensor | None:
        """Return a tensor [T] that is negative for padding tokens; None if there are none."""

    def state_inputs(self, inputs: InputsT) -> Any:
        """Return the step as recurrent layers read it."""


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
