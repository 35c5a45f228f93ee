"""The recurrent states of all rows on a GPU: what a step's upload says about them, and copies from and to snapshots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from inflight.execution.gpu.host_step import HostStep, Ints, put, put_items, staging
from inflight.execution.gpu.shapes import StepShape
from inflight.kv import StateCopy
from inflight.layers.recurrent import LayerStates, max_captures, max_pieces
from inflight.layers.triton.delta_rule import ENTRY_FIELDS, PIECE_FIELDS
from inflight.layers.triton.recurrent import (
    DeviceItems,
    RecurrentStep,
    StateCopier,
    plan_pieces,
)
from inflight.scheduling.batch import Batch, Capture


class DeviceStates:
    """The states of a model's recurrent layers; without such layers, every method does nothing."""

    def __init__(self, layers: list[LayerStates], snapshot_blocks: int, capture_interval: int) -> None:
        """`snapshot_blocks`: blocks of a snapshot that this rank's layers need; other ranks may need more.

        `capture_interval`: tokens between the captures of an entry, which may have three more."""
        self.layers = layers
        self._copier = StateCopier(layers) if layers else None
        self._snapshot_blocks = snapshot_blocks
        self._capture_interval = capture_interval

    # ---- before a step ----

    def copy(self, batch: Batch) -> None:
        """Give rows the states of snapshots, then take snapshots of rows. A snapshot may take the blocks of one that is
        restored."""
        for copies, save in ((batch.restores, False), (batch.saves, True)):
            if copies:
                self._copy(copies, save)

    def warm_up(self) -> None:
        """Compile the copies, on a row and blocks that nothing uses yet."""
        for save in (False, True):
            self._copy([StateCopy(0, [0] * self._snapshot_blocks)], save)

    def _copy(self, copies: Sequence[StateCopy], save: bool) -> None:
        if self._copier is None:
            return
        device, width = self.layers[0].rows.device, 1 + self._snapshot_blocks
        pinned, table = staging(len(copies) * width, device)
        for row, copy in zip(table.reshape(-1, width), copies, strict=True):
            row[0], row[1:] = copy.row, copy.block_ids[: self._snapshot_blocks]
        self._copier(pinned.to(device, non_blocking=True).view(-1, width), save)

    # ---- the upload ----

    def sizes(self, shape: StepShape) -> dict[str, int]:
        """Return the sections that a step of this shape needs."""
        if not self.layers:
            return {}
        sizes = {"num_state_decodes": 1, "captures": self._snapshot_blocks}
        if shape.chunks:
            sizes["captures"] = self._max_captures(shape) * self._snapshot_blocks
            sizes |= {
                "num_pieces": 1,
                "num_state_entries": 1,
                "pieces": self._max_pieces(shape) * PIECE_FIELDS,
            }
            sizes["state_entries"] = shape.num_chunks * ENTRY_FIELDS
        return sizes

    def fill(
        self, host: HostStep, captures: Sequence[Capture], shape: StepShape, part: dict[str, Ints]
    ) -> None:
        """Write a step's sections."""
        if not self.layers:
            return
        num_decodes = host.num_decodes
        part["num_state_decodes"][0] = num_decodes
        if not shape.chunks:
            return
        ordered = sorted(captures, key=lambda capture: (capture.entry, capture.position))
        starts, contexts = host.query_starts[num_decodes:], host.context_lens[num_decodes:]
        wanted = [(capture.entry - num_decodes, capture.position) for capture in ordered]
        plan = plan_pieces(starts, contexts - np.diff(starts), host.rows[num_decodes:], wanted)
        part["num_pieces"][0] = put_items(part["pieces"], plan.pieces)
        part["num_state_entries"][0] = put_items(part["state_entries"], plan.entries)
        size = self._snapshot_blocks
        block_ids = [block_id for capture in ordered for block_id in capture.block_ids[:size]]
        put(part["captures"], np.array(block_ids, dtype=np.int32), 0)

    def step(self, shape: StepShape, part: dict[str, Tensor]) -> RecurrentStep | None:
        """Return the step as recurrent layers read it."""
        if not self.layers:
            return None
        pieces = entries = None
        if shape.chunks:
            pieces = DeviceItems(part["pieces"], part["num_pieces"], self._max_pieces(shape))
            entries = DeviceItems(part["state_entries"], part["num_state_entries"], shape.num_chunks)
        captures = part["captures"].view(-1, self._snapshot_blocks)
        return RecurrentStep(
            part["token_rows"], part["num_state_decodes"], shape.num_decodes, pieces, entries, captures
        )

    def _max_captures(self, shape: StepShape) -> int:
        return max_captures(shape.num_tokens, shape.num_chunks, self._capture_interval)

    def _max_pieces(self, shape: StepShape) -> int:
        return max_pieces(shape.num_tokens, shape.num_chunks, self._max_captures(shape))
