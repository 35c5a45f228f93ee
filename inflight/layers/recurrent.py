"""The interface of layers that keep a state of fixed size for each request, instead of keys and values of its tokens.

The states of running requests are rows of one tensor per layer, [max_rows, state_size] float32, which the backend that
computes the layer lays out as it likes. The row of an entry that starts at position 0 may hold anything: the entry
starts from zeros.

A snapshot is a copy of a row's states in all recurrent layers, in some blocks of the KV memory. A block has a part in
each lane of that memory (one cache tensor per lane), and the recurrent layers are dealt out to the lanes in turn: the
states of a lane's layers lie one behind the other, across the parts that the snapshot's blocks have there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

InputsT = TypeVar("InputsT", contravariant=True)

PIECE = 64  # tokens of a prompt that a GPU computes at once


def max_captures(num_tokens: int, num_entries: int, interval: int) -> int:
    """Return the most states that a step captures inside its entries: one every `interval` tokens, and three more."""
    return num_tokens // interval + 3 * num_entries


def max_pieces(num_tokens: int, num_entries: int, num_captures: int) -> int:
    """Return the most pieces that a step can have: each ends with its entry, where a state is captured, or full."""
    return num_tokens // PIECE + num_entries + num_captures


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """The sizes of a gated delta net: `num_value_heads // num_key_heads` value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # features of a key head, and of a query head
    value_dim: int  # features of a value head
    kernel: int  # tokens that the convolution sees, the current one included

    @property
    def conv_size(self) -> int:
        """The number of convolved features: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def projected_size(self) -> int:
        """The number of features that a token is projected to: see `RecurrentBackend.delta_net`."""
        return self.conv_size + self.value_size + 2 * self.num_value_heads

    @property
    def state_size(self) -> int:
        """The number of values of a state: the last inputs of the convolution, and a matrix per value head."""
        return (self.kernel - 1) * self.conv_size + self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaNetLayer:
    """The parameters of one gated delta net, without its projections."""

    shape: DeltaNetShape
    conv_weight: Tensor  # [conv_size, kernel] float32, the oldest token first
    a_log: Tensor  # [num_value_heads] float32: a state decays by exp(-exp(a_log) * softplus(a + dt_bias)) per token
    dt_bias: Tensor  # [num_value_heads] float32
    norm: Tensor  # [value_dim] float32
    eps: float


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one recurrent layer: those of all rows, and the place of its part of a snapshot."""

    rows: Tensor  # [max_rows, state_size] float32
    blocks: Tensor  # [num_blocks, values of a block's part] float32: a lane of the KV memory
    offset: int  # where the layer's values begin in the lane's part of a snapshot
    # On GPUs that verify drafts: the inputs of a step's decodes, as projected and convolved, [tokens, features] each.
    kept: tuple[Tensor, Tensor] | None = None

    def save(self, row: int, block_ids: Sequence[int]) -> None:
        """Copy the state of a row into a snapshot."""
        for values, part in self._parts(row, block_ids):
            part.copy_(values)

    def restore(self, row: int, block_ids: Sequence[int]) -> None:
        """Copy the state of a row from a snapshot."""
        for values, part in self._parts(row, block_ids):
            values.copy_(part)

    def _parts(self, row: int, block_ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut the row's state at the borders of blocks: values of the row, and their place in a block."""
        state, size = self.rows[row], self.blocks.shape[1]
        first = 0
        while first < len(state):
            block, begin = divmod(self.offset + first, size)
            count = min(size - begin, len(state) - first)
            yield state[first : first + count], self.blocks[block_ids[block], begin : begin + count]
            first += count


def allocate_states(state_sizes: Sequence[int], caches: Sequence[Tensor], max_rows: int) -> list[LayerStates]:
    """Return the states of recurrent layers with these sizes, given the KV memory's lanes, [num_blocks, ...] each."""
    states, ends = [], [0] * len(caches)
    for index, size in enumerate(state_sizes):
        lane = index % len(caches)
        cache = caches[lane]
        rows = torch.zeros(max_rows, size, dtype=torch.float32, device=cache.device)
        blocks = cache.view(len(cache), -1).view(torch.float32)
        states.append(LayerStates(rows, blocks, ends[lane]))
        ends[lane] += size
    return states


def blocks_per_snapshot(state_sizes: Sequence[int], num_lanes: int, bytes_per_part: int) -> int:
    """Return how many blocks a snapshot takes, if a block has this many bytes in each lane."""
    largest = max((sum(state_sizes[lane::num_lanes]) for lane in range(num_lanes)), default=0)
    return -(-largest * torch.float32.itemsize // bytes_per_part)


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The T tokens of one step's B entries, as recurrent layers on a CPU read them."""

    query_starts: Tensor  # [B + 1] int32, from 0 to T
    rows: Tensor  # [B], of the states
    starts: Tensor  # [B]: entry i begins at this position; at 0, its row's state counts as zeros
    # (entry, position, block ids): the state after `position` tokens, inside the entry, goes into a snapshot.
    captures: Sequence[tuple[int, int, Sequence[int]]] = ()
    kept: KeptTokens | None = None  # of entries with drafts; None: there are none

    def take_back(self, counts: Sequence[int]) -> None:
        """Return the states to those after the first `counts[entry]` tokens of each entry with drafts."""
        if self.kept is not None:
            self.kept.take_back(counts)


class KeptTokens:
    """States before a step and the inputs of its layers, from which recurrent layers on a CPU take back refused drafts.

    The tokens before the first refused one are computed again from there, so the bits are those of a step without
    drafts.
    """

    def __init__(self, drafts: Collection[int], query_starts: Sequence[int], rows: Sequence[int]) -> None:
        """`drafts`: the entries that have some."""
        self._places = [
            (entry, rows[entry], query_starts[entry], query_starts[entry + 1]) for entry in drafts
        ]
        self._layers: list[
            tuple[RecurrentBackend[StateInputs], DeltaNetLayer, LayerStates, list[tuple[Tensor, Tensor]]]
        ] = []

    def keep(
        self,
        backend: RecurrentBackend[StateInputs],
        projected: Tensor,
        layer: DeltaNetLayer,
        states: LayerStates,
    ) -> None:
        """Keep what a layer is about to compute."""
        kept = [
            (states.rows[row].clone(), projected[begin:end].clone()) for _, row, begin, end in self._places
        ]
        self._layers.append((backend, layer, states, kept))

    def take_back(self, counts: Sequence[int]) -> None:
        for backend, layer, states, kept in self._layers:
            for (entry, row, begin, end), (before, projected) in zip(self._places, kept, strict=True):
                count = counts[entry]
                if count < end - begin:
                    states.rows[row] = before
                    inputs = StateInputs(torch.tensor([0, count]), torch.tensor([row]), torch.tensor([1]))
                    backend.delta_net(projected[:count], layer, states, inputs)


class RecurrentBackend(Protocol[InputsT]):
    """Computes recurrent layers, and defines the inputs that it reads a step from."""

    def delta_net(
        self, projected: Tensor, layer: DeltaNetLayer, states: LayerStates, inputs: InputsT
    ) -> Tensor:
        """Convolve, apply the gated delta rule, normalise and gate.

        Update the states of the step's rows, and save the states that the step captures inside its entries.

        projected [T, projected_size]: queries, keys and values, then the gate z [value_size], then b and a
        [num_value_heads each]. Returns [T, value_size].

        For every token, with queries and keys of unit length and queries divided by the root of key_dim:

            state = state * decay                                      [key_dim, value_dim] per value head
            state += outer(key, sigmoid(b) * (value - key @ state))
            output = rms_norm(query @ state) * norm * silu(z)
        """
