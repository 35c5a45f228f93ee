"""Permanent rows in device memory match the host's copy."""

from __future__ import annotations

import pytest
import torch

from inflight.execution.gpu import rows as rows_module
from inflight.execution.gpu.rows import DeviceRows, StepTokens, TableUpdates, open_step
from inflight.kv.block_manager import TableUpdate
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Admission
from tests.execution.gpu.interpreted import DEVICE


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_tables_reach_the_device_and_the_mirror() -> None:
    rows = DeviceRows(max_rows=4, max_len=40, block_size=4, device=DEVICE, num_tables=2)
    rows.extend([TableUpdate(2, 0, [7, 8, 9]), TableUpdate(0, 3, [5], table=1)])
    assert rows.updates.tolist() == [[2, 2, 2, 4], [0, 1, 2, 3], [7, 8, 9, 5]]
    rows.write_tables()
    assert rows.block_tables.tolist() == rows.mirror.tolist()
    assert rows.block_tables[0, 2, :3].tolist() == [7, 8, 9]
    assert rows.block_tables[1, 0, 3] == 5
    rows.extend([])
    assert rows.updates.shape == (3, 0)


def test_more_table_updates_than_fit_a_shape_are_written_at_once() -> None:
    rows = DeviceRows(max_rows=2, max_len=8000, block_size=4, device=DEVICE)
    rows.extend([TableUpdate(1, 10, list(range(1, 701)))])
    rows.write_tables()
    assert rows.block_tables.tolist() == rows.mirror.tolist()
    assert not rows.block_tables[0, 0].any()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 701])
def test_table_updates_are_aligned_whatever_their_number(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles one kernel for aligned addresses and another for others, in the middle of serving."""
    launched: list[TableUpdates] = []

    def launch(
        tokens: torch.Tensor, tables: torch.Tensor, updates: TableUpdates, step: StepTokens | None
    ) -> None:
        launched.append(updates)
        open_step(tokens, tables, updates, step)

    monkeypatch.setattr(rows_module, "open_step", launch)
    rows = DeviceRows(max_rows=2, max_len=8000, block_size=4, device=DEVICE)
    rows.extend([TableUpdate(1, 10, list(range(1, 1 + count)))])
    rows.write_tables()
    assert rows.block_tables.tolist() == rows.mirror.tolist()
    assert [part.data_ptr() % 16 for part in launched[0]] == [0, 0, 0]


def test_tokens_of_admitted_requests_reach_the_device() -> None:
    rows = DeviceRows(max_rows=3, max_len=10, block_size=4, device=DEVICE)
    requests = [
        Request.create("a", [1, 2, 3], SamplingParams(), max_tokens=4),
        Request.create("b", [4, 5], SamplingParams(), max_tokens=4),
    ]
    requests[0].token_ids.append(8)  # as one that was preempted
    version = rows.version
    rows.admit([Admission(row, one.current_spec()) for row, one in zip((2, 0), requests, strict=True)])
    assert rows.tokens[2, :4].tolist() == [1, 2, 3, 8]
    assert rows.tokens[0, :2].tolist() == [4, 5]
    assert rows.version != version


def test_open_step_gathers_tokens_and_applies_table_updates() -> None:
    tokens = torch.arange(30, dtype=torch.int32, device=DEVICE).view(3, 10)
    tables = torch.zeros(1, 3, 4, dtype=torch.int32, device=DEVICE)
    ids = ints(-9, -9, -9, -9)
    updates = TableUpdates(ints(1, -1, 2), ints(0, 0, 3), ints(11, 12, 13))
    open_step(tokens, tables, updates, StepTokens(ints(2, 0, 1, -1), ints(3, 9, 0, 5), ids))
    assert ids.tolist() == [23, 9, 10, 0]
    assert tables.tolist() == [[[0, 0, 0, 0], [11, 0, 0, 0], [0, 0, 0, 13]]]
