"""Permanent rows in device memory, written without waiting for the device, and the part of a step that all have: which
tokens it computes, what its block tables gain, and the kernel that opens it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.execution.gpu.parts import ALIGNMENT, Section, StepPart, put, staging
from inflight.execution.gpu.shapes import StepShape
from inflight.execution.step import HostStep, Ints
from inflight.kv.block_manager import TableUpdate
from inflight.scheduling.batch import Admission

PROGRAM_SIZE = 256  # updates and tokens per program
MIN_UPDATES = 32  # table updates that fit every shape


class TableUpdates(NamedTuple):
    """block_tables[rows[i], columns[i]] = block_ids[i] where rows[i] >= 0. [U] int32 each.

    The rows of all tables are numbered in turn: row r of table t is t * max_rows + r.
    """

    rows: Tensor
    columns: Tensor
    block_ids: Tensor


class StepTokens(NamedTuple):
    """ids[t] = tokens[rows[t], positions[t]], or 0 in padding, where rows[t] < 0; drafts[t] where that is not negative.
    [T] int32 each."""

    rows: Tensor
    positions: Tensor
    ids: Tensor
    drafts: Tensor | None = None


class DeviceRows(StepPart):
    """Tokens and block tables of all rows. The host, which plans steps, has a copy of the tables."""

    def __init__(
        self,
        max_rows: int,
        max_len: int,
        block_size: int,
        device: torch.device,
        num_tables: int = 1,
        max_tokens: int = 0,  # of a step
        verifies: bool = False,  # whether steps may have drafts
    ) -> None:
        self.device = device
        self._verifies = verifies
        self.block_size = block_size
        max_blocks = -(-max_len // block_size)
        # [max_rows, max_len]: prompt, then outputs; a sampled token is written here by the step that samples it.
        self.tokens = torch.zeros(max_rows, max_len, dtype=torch.int32, device=device)
        # [num_tables, max_rows, max_blocks]: entries past a row's last block, and those before a table's window, are
        # meaningless, but always valid block ids.
        self.block_tables = torch.zeros(num_tables, max_rows, max_blocks, dtype=torch.int32, device=device)
        self.mirror = np.zeros((num_tables, max_rows, max_blocks), dtype=np.int32)
        self.version = 0  # changes whenever a row gets another request
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.updates: Ints = np.empty((3, 0), dtype=np.int32)  # for the next step

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Upload the tokens of admitted requests."""
        self.version += 1
        pinned, array = staging(sum(len(request.token_ids) for _, request in admissions), self.device)
        first = 0
        for row, request in admissions:
            count = len(request.token_ids)
            array[first : first + count] = np.frombuffer(request.token_ids, dtype=np.int64)
            self.tokens[row, :count].copy_(pinned[first : first + count], non_blocking=True)
            first += count

    def append(self, rows: Tensor, lengths: Tensor, token_ids: Tensor) -> None:
        """Store token number lengths[i] of row rows[i], which another rank sampled. [n] on the host each."""
        if not len(rows):
            return
        pinned, array = staging(3 * len(rows), self.device)
        array[:] = torch.cat((rows, lengths, token_ids)).numpy()
        on_device = pinned.to(self.device, non_blocking=True).view(3, -1)
        self.tokens[on_device[0].long(), on_device[1].long()] = on_device[2]

    def extend(self, tables: Sequence[TableUpdate]) -> None:
        """Add new blocks to the host's tables, and with the next step's upload to the device's."""
        if not tables:
            self.updates = self.updates[:, :0]
            return
        mirror, max_rows = self.mirror.reshape(-1, self.mirror.shape[2]), self.mirror.shape[1]
        all_rows = [table * max_rows + row for row, _, _, table in tables]
        for row, (_, first, block_ids, _) in zip(all_rows, tables, strict=True):
            mirror[row, first : first + len(block_ids)] = block_ids
        counts = [len(update.block_ids) for update in tables]
        rows = np.repeat(np.array(all_rows, dtype=np.int32), counts)
        columns = [np.arange(first, first + len(ids), dtype=np.int32) for _, first, ids, _ in tables]
        joined = np.concatenate(columns)
        self.updates = np.stack((rows, joined, mirror[rows, joined]))

    # ---- the part of a step ----

    def sections(self, shape: StepShape) -> dict[str, Section]:
        num_tokens = shape.num_tokens
        num_updates = max(min(self.mirror.shape[1], num_tokens), MIN_UPDATES)
        sections = {"draft_ids": Section(num_tokens, -1)} if self._verifies else {}
        return sections | {
            "token_rows": Section(num_tokens, -1),
            "positions": Section(num_tokens),
            "sample_tokens": Section(shape.num_samples, -1),
            "update_rows": Section(num_updates, -1),
            "update_columns": Section(num_updates),
            "update_blocks": Section(num_updates),
        }

    def fill(self, step: HostStep, sections: dict[str, Ints]) -> None:
        put(sections["token_rows"], step.token_rows)
        put(sections["positions"], step.positions)
        put(sections["sample_tokens"], step.sample_tokens)
        if step.draft_ids is not None:
            put(sections["draft_ids"], step.draft_ids)
        rows, columns, block_ids = self.updates
        if len(rows) > len(sections["update_rows"]):
            self.write_tables()
        else:
            put(sections["update_rows"], rows)
            put(sections["update_columns"], columns)
            put(sections["update_blocks"], block_ids)

    def open(self, shape: StepShape, sections: dict[str, Tensor]) -> None:
        updates = TableUpdates(sections["update_rows"], sections["update_columns"], sections["update_blocks"])
        ids, drafts = self.token_ids(shape), sections.get("draft_ids")
        tokens = StepTokens(sections["token_rows"], sections["positions"], ids, drafts)
        open_step(self.tokens, self.block_tables, updates, tokens)

    def token_ids(self, shape: StepShape) -> Tensor:
        """Return the step's token ids, [T] int32."""
        return self._token_ids[: shape.num_tokens]

    def write_tables(self) -> None:
        """Write the device's tables now, for steps with more updates than fit their shape.

        Each of the three parts begins at an aligned address, as in a captured step: otherwise Triton would compile
        another kernel while serving.
        """
        count = self.updates.shape[1]
        size = -(-count // ALIGNMENT) * ALIGNMENT
        pinned, array = staging(3 * size, self.device)
        parts = array.reshape(3, size)
        parts[:, :count] = self.updates
        parts[:, count:] = -1
        open_step(
            self.tokens,
            self.block_tables,
            TableUpdates(*pinned.to(self.device, non_blocking=True).view(3, size)),
            None,
        )


def open_step(tokens: Tensor, block_tables: Tensor, updates: TableUpdates, step: StepTokens | None) -> None:
    """Apply table updates and gather a step's tokens. tokens [max_rows, max_len], block_tables [num_tables, max_rows,
    max_blocks]"""
    num_updates = len(updates.rows)
    rows, positions, ids, drafts = step or (updates.rows, updates.columns, updates.block_ids, None)
    num_tokens = 0 if step is None else len(ids)
    grid = (triton.cdiv(max(num_updates, num_tokens), PROGRAM_SIZE),)
    strides = block_tables.stride(1), tokens.stride(0)
    _open_step[grid](
        block_tables, *updates, num_updates, tokens, rows, positions, ids, ids if drafts is None else drafts,
        num_tokens, *strides, DRAFTS=drafts is not None, SIZE=PROGRAM_SIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_updates", "num_tokens"])
def _open_step(
    tables, update_rows, columns, block_ids, num_updates,
    tokens, token_rows, positions, ids, drafts, num_tokens,
    table_stride, token_stride, DRAFTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(update_rows + i, mask=i < num_updates, other=-1)
    column = tl.load(columns + i, mask=row >= 0, other=0)
    block_id = tl.load(block_ids + i, mask=row >= 0, other=0)
    tl.store(tables + row.to(tl.int64) * table_stride + column, block_id, mask=row >= 0)
    row = tl.load(token_rows + i, mask=i < num_tokens, other=-1)
    position = tl.load(positions + i, mask=row >= 0, other=0)
    token_id = tl.load(tokens + row.to(tl.int64) * token_stride + position, mask=row >= 0, other=0)
    if DRAFTS:
        draft = tl.load(drafts + i, mask=row >= 0, other=-1)
        token_id = tl.where(draft < 0, token_id, draft)
    tl.store(ids + i, token_id, mask=i < num_tokens)
