"""Permanent rows in device memory, written without ever waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from inflight.execution.gpu.kernels import TableUpdates, open_step
from inflight.execution.gpu.packed import Ints, staging
from inflight.scheduling.batch import Admission, TableUpdate


class DeviceRows:
    """Tokens and block tables of all rows; the tables are mirrored on the host, where steps are planned."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        self.device = device
        self.block_size = block_size
        max_blocks = -(-max_len // block_size)
        # [max_rows, max_len]: prompt, then outputs; a sampled token is written here by the step that samples it.
        self.tokens = torch.zeros(max_rows, max_len, dtype=torch.int32, device=device)
        # [max_rows, max_blocks]: entries past a row's last block are meaningless, but always name a block.
        self.block_tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=device)
        self.mirror = np.zeros((max_rows, max_blocks), dtype=np.int32)
        self.version = 0  # changes whenever a row gets another request

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Upload all known tokens of the requests that got a row."""
        if not admissions:
            return
        self.version += 1
        held, array = staging(sum(len(request.token_ids) for _, request in admissions), self.device)
        first = 0
        for row, request in admissions:
            count = len(request.token_ids)
            array[first : first + count] = np.frombuffer(request.token_ids, dtype=np.int64)
            self.tokens[row, :count].copy_(held[first : first + count], non_blocking=True)
            first += count

    def extend(self, tables: Sequence[TableUpdate]) -> Ints:
        """Take new blocks into the mirror. What the device must be told: [3, n] rows, columns and block ids."""
        for row, first, block_ids in tables:
            self.mirror[row, first : first + len(block_ids)] = block_ids
        counts = [len(block_ids) for _, _, block_ids in tables]
        rows = np.repeat(np.array([row for row, _, _ in tables], dtype=np.int32), counts)
        columns = [np.arange(first, first + len(ids), dtype=np.int32) for _, first, ids in tables]
        joined = np.concatenate(columns) if columns else np.empty(0, dtype=np.int32)
        return np.stack((rows, joined, self.mirror[rows, joined]))

    def write_tables(self, updates: Ints) -> None:
        """Tell the device now: for steps with more updates than their shape has room for."""
        count = updates.shape[1]
        held, array = staging(3 * count, self.device)
        array[:] = updates.reshape(-1)
        updates_there = TableUpdates(*held.to(self.device, non_blocking=True).view(3, count))
        open_step(self.tokens, self.block_tables, updates_there, None)
