"""The part of a step of recurrent layers: the pieces of its prompts, and copies of states from and to snapshots."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inflight.execution.gpu.parts import Section, StepPart, put, put_items, staging
from inflight.execution.gpu.shapes import StepShape
from inflight.execution.step import HostStep, Ints
from inflight.kv.snapshots import StateCopy
from inflight.layers.recurrent import DeltaNetLayer, LayerStates, max_captures, max_pieces
from inflight.layers.triton.delta_rule import ENTRY_FIELDS, PIECE_FIELDS, RUN_FIELDS
from inflight.layers.triton.recurrent import (
    DeviceItems,
    RecurrentStep,
    SampledDrafts,
    StateCopier,
    TritonRecurrent,
    plan_pieces,
)
from inflight.models.decoders.decoder import Decoder


class DeviceStates(StepPart):
    """The states of a model's recurrent layers."""

    def __init__(
        self,
        layers: list[LayerStates],
        snapshot_blocks: int,
        capture_interval: int,
        decoder: Decoder,
        max_samples: int | None = None,
    ) -> None:
        """`snapshot_blocks`: blocks of a snapshot that this rank's layers need; other ranks may need more.

        `capture_interval`: tokens between the captures of an entry, which may have three more.

        `max_samples`: of a step whose decodes have drafts; None: there are none."""
        self.layers = layers
        self._decoder = decoder
        self._parameters = decoder.recurrent_layers
        if max_samples is not None:
            self.layers = [
                replace(states, kept=self._kept(layer, max_samples))
                for states, layer in zip(layers, self._parameters, strict=True)
            ]
        self._copier = StateCopier(layers)
        self._snapshot_blocks = snapshot_blocks
        self._capture_interval = capture_interval
        self.inputs: RecurrentStep | None = None  # of the step that is open

    def _kept(self, layer: DeltaNetLayer, max_samples: int) -> tuple[Tensor, Tensor]:
        sizes = layer.shape.projected_size, layer.shape.conv_size
        dtype, device = self._decoder.kernels.compute_dtype, self._decoder.device
        projected, mixed = (torch.zeros(max_samples, size, dtype=dtype, device=device) for size in sizes)
        return projected, mixed

    def begin(self, step: HostStep) -> None:
        """Give rows the states of snapshots, then take snapshots of rows. A snapshot may take the blocks of one that is
        restored."""
        for copies, save in ((step.batch.restores, False), (step.batch.saves, True)):
            if copies:
                self._copy(copies, save)

    def warm_up(self, shapes: Collection[StepShape]) -> None:  # noqa: ARG002
        """Compile the copies, on a row and blocks that nothing uses yet."""
        for save in (False, True):
            self._copy([StateCopy(0, [0] * self._snapshot_blocks)], save)

    def _copy(self, copies: Sequence[StateCopy], save: bool) -> None:
        device, width = self.layers[0].rows.device, 1 + self._snapshot_blocks
        pinned, table = staging(len(copies) * width, device)
        for row, copy in zip(table.reshape(-1, width), copies, strict=True):
            row[0], row[1:] = copy.row, copy.block_ids[: self._snapshot_blocks]
        self._copier(pinned.to(device, non_blocking=True).view(-1, width), save)

    def sections(self, shape: StepShape) -> dict[str, Section]:
        sections = {"num_state_decodes": Section(1), "captures": Section(self._snapshot_blocks)}
        if shape.runs:
            sections |= {"num_runs": Section(1), "runs": Section(shape.num_decodes * RUN_FIELDS)}
        if shape.chunks:
            sections |= {
                "captures": Section(self._max_captures(shape) * self._snapshot_blocks),
                "num_pieces": Section(1),
                "pieces": Section(self._max_pieces(shape) * PIECE_FIELDS),
                "num_state_entries": Section(1),
                "state_entries": Section(shape.num_chunks * ENTRY_FIELDS),
            }
        return sections

    def fill(self, step: HostStep, sections: dict[str, Ints]) -> None:
        num_decodes, batch = step.num_decodes, step.batch
        sections["num_state_decodes"][0] = num_decodes
        if step.draft_ids is not None:
            lengths = np.array(batch.counts[: batch.num_decodes], dtype=np.int32)
            runs = np.zeros((len(lengths), RUN_FIELDS), dtype=np.int32)
            firsts = lengths.cumsum() - lengths
            runs[:, 0], runs[:, 1], runs[:, 2] = firsts, lengths, batch.rows[: batch.num_decodes]
            runs[:, 3], runs[:, 5] = firsts, -1
            put_items(sections["runs"], sections["num_runs"], runs)
        if step.only_decodes:
            return
        ordered = sorted(batch.captures, key=lambda capture: (capture.entry, capture.position))
        starts, contexts = step.query_starts[num_decodes:], step.context_lens[num_decodes:]
        wanted = [(capture.entry - batch.num_decodes, capture.position) for capture in ordered]
        plan = plan_pieces(starts, contexts - np.diff(starts), step.rows[num_decodes:], wanted)
        put_items(sections["pieces"], sections["num_pieces"], plan.pieces)
        put_items(sections["state_entries"], sections["num_state_entries"], plan.entries)
        size = self._snapshot_blocks
        block_ids = [block_id for capture in ordered for block_id in capture.block_ids[:size]]
        put(sections["captures"], np.array(block_ids, dtype=np.int32))

    def open(self, shape: StepShape, sections: dict[str, Tensor]) -> None:
        pieces = entries = None
        if shape.chunks:
            pieces = DeviceItems(sections["pieces"], sections["num_pieces"], self._max_pieces(shape))
            entries = DeviceItems(sections["state_entries"], sections["num_state_entries"], shape.num_chunks)
        self.inputs = RecurrentStep(
            sections["token_rows"],
            sections["num_state_decodes"],
            shape.num_decodes,
            pieces,
            entries,
            sections["captures"].view(-1, self._snapshot_blocks),
            self._runs(shape, sections),
        )

    def accept(self, shape: StepShape, sections: dict[str, Tensor], token_ids: Tensor, bad: Tensor) -> None:
        """Enqueue the update of the states of decodes with drafts, by what was sampled."""
        if (runs := self._runs(shape, sections)) is None:
            return
        recurrent, sampled = (
            self._decoder.kernels.recurrent,
            SampledDrafts(sections["sample_drafts"], token_ids, bad),
        )
        assert isinstance(recurrent, TritonRecurrent)
        for layer, states in zip(self._parameters, self.layers, strict=True):
            recurrent.accept(layer, states, runs, sampled)

    def _runs(self, shape: StepShape, sections: dict[str, Tensor]) -> DeviceItems | None:
        return DeviceItems(sections["runs"], sections["num_runs"], shape.num_decodes) if shape.runs else None

    def _max_captures(self, shape: StepShape) -> int:
        return max_captures(shape.num_tokens, shape.num_chunks, self._capture_interval)

    def _max_pieces(self, shape: StepShape) -> int:
        return max_pieces(shape.num_tokens, shape.num_chunks, self._max_captures(shape))
