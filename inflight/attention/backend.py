"""The interfaces between models and attention: over the paged KV cache in decoders, within sequences in encoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one model's KV cache, equal for all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the keys and values of one block in all layers."""
        values = self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.block_size
        return values * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The parameters of attention in one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None  # [head_dim] float32
    k_norm: Tensor | None  # [head_dim] float32
    eps: float
    cos_sin: Tensor  # [max_position, rotary_dim] float32: cos in the first half, sin in the second
    scale: float
    window: int | None  # a query at position p sees keys in (p - window, p]; None: all up to p
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
    block_tables: Tensor  # [max_rows, max_blocks] int32, permanent
    slot_mapping: Tensor  # [T] int64, where the KV of each token goes: block_id * block_size + offset


InputsT = TypeVar("InputsT", contravariant=True)


class AttentionBackend(Protocol[InputsT]):
    """Attention that owns the layout of the cache and defines the inputs that it reads a step from."""

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> list[Tensor]:
        """Return one cache tensor per layer."""

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
