"""Recurrent layers on a GPU: the plan of a step, its launches, and copies between rows and snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from inflight.layers.recurrent import PIECE, DeltaNetLayer, LayerStates
from inflight.layers.triton.delta_rule import (
    ENTRY_FIELDS,
    PIECE_FIELDS,
    RUN_FIELDS,
    accept,
    carry,
    convolve,
    decode,
    finish_decode,
    output,
    prepare,
    verify,
)
from inflight.layers.triton_utils.padding import padded_empty
from inflight.layers.triton_utils.pdl import launch_options

Ints = NDArray[np.int32]

COPIED = 4096  # most values that a program copies


@dataclass(frozen=True, slots=True)
class ColumnTile:
    """How many value features of a head a program takes, with how many warps."""

    values: int
    num_warps: int


# Measured on an H200.
FEW_DECODES, FEW_DECODES_TILE, DECODES_TILE = 16, ColumnTile(128, 8), ColumnTile(32, 2)
CARRY_TILE = ColumnTile(32, 8)
CONVOLVE_WARPS, PREPARE_WARPS, OUTPUT_WARPS = 4, 2, 4
FINISHED_HEADS = 8  # that a program of `finish_decode` takes


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """The pieces of a step's chunks."""

    pieces: Ints  # [num_pieces, PIECE_FIELDS]
    entries: Ints  # [num_entries, ENTRY_FIELDS]


@dataclass(frozen=True, slots=True)
class DeviceItems:
    """A table on the device, as a captured graph needs it: capacity for many rows, and how many there are."""

    table: Tensor  # int32, flat
    count: Tensor  # [1] int32
    capacity: int


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """One step in device memory, as recurrent layers read it. All contents may change between replays of a graph.

    The first tokens are decodes, one for each entry; the pieces cover the others.
    """

    token_rows: Tensor  # [T] int32; negative for padding
    num_decodes: Tensor  # [1] int32
    max_decodes: int
    pieces: DeviceItems | None  # PiecePlan.pieces; None: the step has no chunks
    entries: DeviceItems | None  # PiecePlan.entries, with pieces only
    captures: Tensor  # [max_captures, blocks of a snapshot] int32
    runs: DeviceItems | None = (
        None  # of decodes with drafts, as pieces are described; None: decodes have none
    )


@dataclass(frozen=True, slots=True)
class SampledDrafts:
    """The tokens that a step sampled after each of its decodes' tokens. [S] int32 each, in the order of those."""

    drafts: Tensor  # which the sample follows, -1 where it follows none
    token_ids: Tensor
    bad: Tensor  # 0, or why sampling failed


def plan_pieces(
    query_starts: Ints,  # [E + 1] token index of each entry's first query
    starts: Ints,  # [E] the position of that query
    rows: Ints,  # [E]
    captures: Sequence[
        tuple[int, int]
    ] = (),  # (entry, position) in ascending order, inside the entry or at its end
) -> PiecePlan:
    """Cut entries into pieces of at most `PIECE` tokens that end where a state is captured."""
    pieces: list[tuple[int, ...]] = []
    entries: list[tuple[int, ...]] = []
    numbered = [(*capture, index) for index, capture in enumerate(captures)]
    for entry, (token, position, row) in enumerate(
        zip(query_starts.tolist(), starts.tolist(), rows.tolist(), strict=False)
    ):
        end = int(query_starts[entry + 1])
        fresh, first_piece = int(position == 0), len(pieces)
        ends = {
            token + captured_at - position: index for owner, captured_at, index in numbered if owner == entry
        }
        cuts = sorted({*ends, end})
        begin = token
        for cut in cuts:
            while begin < cut:
                length = min(PIECE, cut - begin)
                capture = ends.get(begin + length, -1)
                pieces.append((begin, length, row, token, fresh, capture))
                begin += length
        entries.append((first_piece, len(pieces) - first_piece, row, fresh, token, end - token))
    return PiecePlan(
        np.array(pieces, dtype=np.int32).reshape(-1, PIECE_FIELDS),
        np.array(entries, dtype=np.int32).reshape(-1, ENTRY_FIELDS),
    )


class TritonRecurrent:
    """Implements `RecurrentBackend[RecurrentStep]`.

    A row's state is the last inputs of the convolution, [kernel - 1, conv_size], the oldest first, then the matrices of
    the value heads, [num_value_heads, key_dim, value_dim].
    """

    def __init__(self, pdl: bool) -> None:
        self._pdl = pdl

    def delta_net(
        self, projected: Tensor, layer: DeltaNetLayer, states: LayerStates, inputs: RecurrentStep
    ) -> Tensor:
        """Rows of the result that belong to no entry are undefined."""
        num_tokens, shape = len(projected), layer.shape
        device, dtype = projected.device, projected.dtype
        mixed = torch.empty(num_tokens, shape.conv_size, dtype=dtype, device=device)
        out = padded_empty(num_tokens, shape.value_size, dtype, device)
        sizes = {
            "KEY_HEADS": shape.num_key_heads,
            "VALUE_HEADS": shape.num_value_heads,
            "KEY_DIM": shape.key_dim,
            "VALUE_DIM": shape.value_dim,
            "PDL": self._pdl,
            **launch_options(self._pdl),
        }
        dims = {
            "KEYS": _padded(shape.key_dim),
            "VALUES": _padded(shape.value_dim),
        }
        if inputs.runs is not None:
            self._verify(projected, mixed, layer, states, inputs, inputs.runs, out, sizes | dims)
        elif inputs.max_decodes:
            self._decode(projected, mixed, layer, states.rows, inputs, out, sizes | dims)
        if inputs.pieces is not None and inputs.entries is not None:
            self._chunks(projected, mixed, layer, states, inputs, out, sizes, dims)
        return out

    def _convolve(
        self,
        projected: Tensor,
        mixed: Tensor,
        layer: DeltaNetLayer,
        rows: Tensor,
        inputs: RecurrentStep,
        pieces: DeviceItems | None,
        sizes: dict[str, Any],
    ) -> None:
        shape = layer.shape
        num_heads = 2 * shape.num_key_heads + shape.num_value_heads
        items = (
            DeviceItems(inputs.token_rows, inputs.num_decodes, inputs.max_decodes)
            if pieces is None
            else pieces
        )
        convolve[(num_heads, items.capacity)](
            projected, rows, layer.conv_weight, items.table, items.count, inputs.token_rows, mixed,
            projected.stride(0), rows.stride(0), KERNEL=shape.kernel, DECODES=pieces is None,
            FIELDS=PIECE_FIELDS, TOKENS=1 if pieces is None else PIECE,
            DIM=triton.next_power_of_2(max(shape.key_dim, shape.value_dim)),
            num_warps=1 if pieces is None else CONVOLVE_WARPS, **sizes,
        )  # fmt: skip

    def _decode(
        self,
        projected: Tensor,
        mixed: Tensor,
        layer: DeltaNetLayer,
        rows: Tensor,
        inputs: RecurrentStep,
        out: Tensor,
        sizes: dict[str, Any],
    ) -> None:
        shape, tile = layer.shape, FEW_DECODES_TILE if inputs.max_decodes <= FEW_DECODES else DECODES_TILE
        heads, whole_head = shape.num_value_heads, sizes["VALUES"]
        common = {name: value for name, value in sizes.items() if name not in ("KEYS", "VALUES")}
        self._convolve(projected, mixed, layer, rows, inputs, None, common)
        values = min(whole_head, tile.values)
        columns, whole = -(-shape.value_dim // values), values == whole_head
        to = out if whole else torch.empty(len(out), shape.value_size, dtype=torch.float32, device=out.device)
        decode[(heads, columns, inputs.max_decodes)](
            projected, mixed, rows, layer.a_log, layer.dt_bias, layer.norm, inputs.token_rows,
            inputs.num_decodes, to, projected.stride(0), rows.stride(0), to.stride(0), layer.eps,
            KERNEL=shape.kernel, FEATURES=triton.next_power_of_2(-(-shape.conv_size // (heads * columns))),
            WHOLE=whole, KEYS=sizes["KEYS"], VALUES=values, num_warps=tile.num_warps, **common,
        )  # fmt: skip
        if not whole:
            self._finish(projected, to, layer, inputs, out, whole_head)

    def _verify(
        self,
        projected: Tensor,
        mixed: Tensor,
        layer: DeltaNetLayer,
        states: LayerStates,
        inputs: RecurrentStep,
        runs: DeviceItems,
        out: Tensor,
        sizes: dict[str, Any],
    ) -> None:
        """Compute runs of tokens, and keep what `accept` needs."""
        shape, tile, num_tokens = layer.shape, DECODES_TILE, inputs.max_decodes
        common = {name: value for name, value in sizes.items() if name not in ("KEYS", "VALUES")}
        self._convolve(projected, mixed, layer, states.rows, inputs, runs, common)
        assert states.kept is not None
        for kept, computed in zip(states.kept, (projected, mixed), strict=True):
            kept[:num_tokens].copy_(computed[:num_tokens])
        heads, values = shape.num_value_heads, min(sizes["VALUES"], tile.values)
        whole = values == sizes["VALUES"]
        to = out if whole else torch.empty(len(out), shape.value_size, dtype=torch.float32, device=out.device)
        verify[(heads, -(-shape.value_dim // values), runs.capacity)](
            projected, mixed, states.rows, layer.a_log, layer.dt_bias, layer.norm, runs.table, runs.count, to,
            projected.stride(0), states.rows.stride(0), to.stride(0), layer.eps, KERNEL=shape.kernel,
            FIELDS=RUN_FIELDS, WHOLE=whole, KEYS=sizes["KEYS"], VALUES=values, num_warps=tile.num_warps, **common,
        )  # fmt: skip
        if not whole:
            self._finish(projected, to, layer, inputs, out, sizes["VALUES"])

    def accept(
        self, layer: DeltaNetLayer, states: LayerStates, runs: DeviceItems, sampled: SampledDrafts
    ) -> None:
        """Update the states of rows with runs, up to the first draft of each that was not sampled before it."""
        assert states.kept is not None
        shape, tile, (projected, mixed) = layer.shape, DECODES_TILE, states.kept
        heads, values = shape.num_value_heads, min(_padded(shape.value_dim), tile.values)
        columns = -(-shape.value_dim // values)
        accept[(heads, columns, runs.capacity)](
            projected, mixed, states.rows, layer.a_log, layer.dt_bias, runs.table, runs.count, sampled.drafts,
            sampled.token_ids, sampled.bad, projected.stride(0), states.rows.stride(0),
            KEY_HEADS=shape.num_key_heads, VALUE_HEADS=heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
            KERNEL=shape.kernel, FIELDS=RUN_FIELDS, KEYS=_padded(shape.key_dim), VALUES=values,
            FEATURES=triton.next_power_of_2(-(-shape.conv_size // (heads * columns))), PDL=self._pdl,
            num_warps=tile.num_warps, **launch_options(self._pdl),
        )  # fmt: skip

    def _finish(
        self,
        projected: Tensor,
        outputs: Tensor,
        layer: DeltaNetLayer,
        inputs: RecurrentStep,
        out: Tensor,
        values: int,
    ) -> None:
        """Normalise and gate the outputs of decodes whose heads several programs computed."""
        shape = layer.shape
        heads = shape.num_value_heads
        finish_decode[(triton.cdiv(heads, FINISHED_HEADS), inputs.max_decodes)](
            projected, outputs, layer.norm, inputs.token_rows, inputs.num_decodes, out, projected.stride(0),
            out.stride(0), layer.eps, VALUE_HEADS=heads, VALUE_DIM=shape.value_dim, CONV_SIZE=shape.conv_size,
            HEADS=FINISHED_HEADS, VALUES=values, PDL=self._pdl, num_warps=4, **launch_options(self._pdl),
        )  # fmt: skip

    def _chunks(
        self,
        projected: Tensor,
        mixed: Tensor,
        layer: DeltaNetLayer,
        states: LayerStates,
        inputs: RecurrentStep,
        out: Tensor,
        sizes: dict[str, Any],
        dims: dict[str, int],
    ) -> None:
        shape, pieces, entries = layer.shape, inputs.pieces, inputs.entries
        assert pieces is not None
        assert entries is not None
        num_tokens, heads, device, dtype = (
            len(projected),
            shape.num_value_heads,
            projected.device,
            projected.dtype,
        )
        precision = "tf32x3" if dtype == torch.float32 else "tf32"
        self._convolve(projected, mixed, layer, states.rows, inputs, pieces, sizes)
        keys = torch.empty(num_tokens, heads, shape.key_dim, dtype=dtype, device=device)
        updates = torch.empty(num_tokens, heads, shape.value_dim, dtype=dtype, device=device)
        log_decays = torch.empty(num_tokens, heads, dtype=torch.float32, device=device)
        before = torch.empty(
            pieces.capacity, heads, shape.key_dim, shape.value_dim, dtype=dtype, device=device
        )
        prepare[(heads, pieces.capacity)](
            projected, mixed, layer.a_log, layer.dt_bias, pieces.table, pieces.count, keys, updates,
            log_decays, projected.stride(0), FIELDS=PIECE_FIELDS, PIECE=PIECE, PRECISION=precision,
            num_warps=PREPARE_WARPS, **sizes, **dims,
        )  # fmt: skip
        carried = min(dims["VALUES"], CARRY_TILE.values)
        columns = -(-shape.value_dim // carried)
        features = triton.next_power_of_2(-(-shape.conv_size // (heads * columns)))
        carry[(heads, columns, entries.capacity)](
            projected, mixed, states.rows, keys, updates, log_decays, before, pieces.table, entries.table,
            entries.count, states.blocks, inputs.captures, states.offset, inputs.captures.shape[1],
            projected.stride(0), states.rows.stride(0), states.blocks.stride(0), KERNEL=shape.kernel,
            FIELDS=PIECE_FIELDS, ENTRY_FIELDS=ENTRY_FIELDS, PIECE=PIECE, FEATURES=features,
            PART=states.blocks.shape[1], PRECISION=precision, KEYS=dims["KEYS"], VALUES=carried,
            num_warps=CARRY_TILE.num_warps, **sizes,
        )  # fmt: skip
        output[(heads, pieces.capacity)](
            projected, mixed, updates, log_decays, before, layer.norm, pieces.table, pieces.count, out,
            projected.stride(0), out.stride(0), layer.eps, FIELDS=PIECE_FIELDS, PIECE=PIECE,
            PRECISION=precision, num_warps=OUTPUT_WARPS, **sizes, **dims,
        )  # fmt: skip


def _padded(dim: int) -> int:
    """Return the features of a head that a program takes, a power of two."""
    return max(16, 1 << (dim - 1).bit_length())


class StateCopier:
    """Copies the states of rows to and from snapshots, those of all recurrent layers in one launch."""

    def __init__(self, layers: Sequence[LayerStates]) -> None:
        """The tensors of the layers must live as long as copies are made."""
        (self._part,) = {layer.blocks.shape[1] for layer in layers}
        assert all(layer.rows.is_contiguous() and layer.blocks.is_contiguous() for layer in layers)
        places = [(layer.offset, layer.offset + layer.rows.shape[1]) for layer in layers]
        self._most_parts = max(-(-end // self._part) - start // self._part for start, end in places)
        addresses = [(layer.rows.data_ptr(), layer.blocks.data_ptr()) for layer in layers]
        table = [(*address, *place) for address, place in zip(addresses, places, strict=True)]
        self._wide = all(number % 16 == 0 for row in table for number in (*row, self._part))
        self._layers = torch.tensor(table, dtype=torch.int64).to(layers[0].rows.device)

    def __call__(self, copies: Tensor, save: bool) -> None:
        """Save the states of rows in snapshots, or restore them. copies [N, 1 + blocks of a snapshot] int32: a row, and
        the blocks."""
        size = min(COPIED, triton.next_power_of_2(self._part))
        pieces = triton.cdiv(self._part, size)
        _copy_states[(self._most_parts * pieces, len(self._layers), len(copies))](
            self._layers, copies, copies.stride(0), SAVE=save, PART=self._part, PIECES=pieces, SIZE=size,
            VALUES=4 if self._wide else 1, num_warps=8,  # 16 bytes at once
        )  # fmt: skip


@triton.jit
def _copy_states(
    layers, copies, copy_stride,
    SAVE: tl.constexpr, PART: tl.constexpr, PIECES: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Copy a piece of a block's part. layers [L, 4] int64: addresses of the rows and of the blocks, and where the state
    starts and ends in the lane's part of a snapshot."""
    layer = layers + tl.program_id(1) * 4
    rows = tl.multiple_of(tl.load(layer).to(tl.pointer_type(tl.float32)), 4 * VALUES)
    blocks = tl.multiple_of(tl.load(layer + 1).to(tl.pointer_type(tl.float32)), 4 * VALUES)
    start = tl.multiple_of(tl.load(layer + 2), VALUES)
    end = tl.multiple_of(tl.load(layer + 3), VALUES)
    block = start // PART + tl.program_id(0) // PIECES  # of the snapshot
    place = tl.program_id(0) % PIECES * SIZE + tl.arange(0, SIZE)  # in the block's part
    i = block * PART + place
    mask = (place < PART) & (i >= start) & (i < end)
    copy = copies + tl.program_id(2) * copy_stride
    row = tl.load(copy).to(tl.int64)
    block_id = tl.load(copy + 1 + block, mask=block * PART < end, other=0).to(tl.int64)
    state = rows + row * (end - start) + i - start
    part = blocks + block_id * PART + place
    if SAVE:
        tl.store(part, tl.load(state, mask=mask), mask=mask)
    else:
        tl.store(state, tl.load(part, mask=mask), mask=mask)
