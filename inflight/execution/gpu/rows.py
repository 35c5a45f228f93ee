"""Permanent rows in device memory, written without waiting for the device, and the first kernel of a step, which
applies block table updates and gathers the step's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.execution.gpu.host_step import ALIGNMENT, Ints, staging
from inflight.kv import TableUpdate
from inflight.scheduling.batch import Admission

PROGRAM_SIZE = 256  # updates and tokens per program


class TableUpdates(NamedTuple):
    """block_tables[rows[i], columns[i]] = block_ids[i] where rows[i] >= 0. [U] int32 each.

    The rows of all tables are numbered in turn: row r of table t is t * max_rows + r.
    """

    rows: Tensor
    columns: Tensor
    block_ids: Tensor


class StepTokens(NamedTuple):
    """ids[t] = tokens[rows[t], positions[t]], or 0 in padding, where rows[t] < 0. [T] int32 each."""

    rows: Tensor
    positions: Tensor
    ids: Tensor


class DeviceRows:
    """Tokens and block tables of all rows. The host, which plans steps, has a copy of the tables."""

    def __init__(
        self, max_rows: int, max_len: int, block_size: int, device: torch.device, num_tables: int = 1
    ) -> None:
        self.device = device
        self.block_size = block_size
        max_blocks = -(-max_len // block_size)
        # [max_rows, max_len]: prompt, then outputs; a sampled token is written here by the step that samples it.
        self.tokens = torch.zeros(max_rows, max_len, dtype=torch.int32, device=device)
        # [num_tables, max_rows, max_blocks]: entries past a row's last block, and those before a table's window, are
        # meaningless, but always valid block ids.
        self.block_tables = torch.zeros(num_tables, max_rows, max_blocks, dtype=torch.int32, device=device)
        self.mirror = np.zeros((num_tables, max_rows, max_blocks), dtype=np.int32)
        self.version = 0  # changes whenever a row gets another request

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Upload the tokens of admitted requests."""
        if not admissions:
            return
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

    def extend(self, tables: Sequence[TableUpdate]) -> Ints:
        """Add new blocks to the host's tables; return the device's updates: [3, n] rows, columns and block ids."""
        mirror, max_rows = self.mirror.reshape(-1, self.mirror.shape[2]), self.mirror.shape[1]
        all_rows = [table * max_rows + row for row, _, _, table in tables]
        for row, (_, first, block_ids, _) in zip(all_rows, tables, strict=True):
            mirror[row, first : first + len(block_ids)] = block_ids
        counts = [len(update.block_ids) for update in tables]
        rows = np.repeat(np.array(all_rows, dtype=np.int32), counts)
        columns = [np.arange(first, first + len(ids), dtype=np.int32) for _, first, ids, _ in tables]
        joined = np.concatenate(columns) if columns else np.empty(0, dtype=np.int32)
        return np.stack((rows, joined, mirror[rows, joined]))

    def write_tables(self, updates: Ints) -> None:
        """Write the tables now, for steps with more updates than fit their shape.

        Each of the three parts begins at an aligned address, as in a captured step: otherwise Triton would compile
        another kernel while serving.
        """
        count = updates.shape[1]
        size = -(-count // ALIGNMENT) * ALIGNMENT
        pinned, array = staging(3 * size, self.device)
        parts = array.reshape(3, size)
        parts[:, :count] = updates
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
    rows, positions, ids = step or (updates.rows, updates.columns, updates.block_ids)
    num_tokens = 0 if step is None else len(ids)
    grid = (triton.cdiv(max(num_updates, num_tokens), PROGRAM_SIZE),)
    strides = block_tables.stride(1), tokens.stride(0)
    _open_step[grid](
        block_tables, *updates, num_updates, tokens, rows, positions, ids, num_tokens, *strides,
        SIZE=PROGRAM_SIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_updates", "num_tokens"])
def _open_step(
    tables, update_rows, columns, block_ids, num_updates,
    tokens, token_rows, positions, ids, num_tokens,
    table_stride, token_stride, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(update_rows + i, mask=i < num_updates, other=-1)
    column = tl.load(columns + i, mask=row >= 0, other=0)
    block_id = tl.load(block_ids + i, mask=row >= 0, other=0)
    tl.store(tables + row.to(tl.int64) * table_stride + column, block_id, mask=row >= 0)
    row = tl.load(token_rows + i, mask=i < num_tokens, other=-1)
    position = tl.load(positions + i, mask=row >= 0, other=0)
    token_id = tl.load(tokens + row.to(tl.int64) * token_stride + position, mask=row >= 0, other=0)
    tl.store(ids + i, token_id, mask=i < num_tokens)
