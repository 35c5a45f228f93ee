"""Batches as arrays."""

from __future__ import annotations

import numpy as np

from inflight.execution.step import host_step
from inflight.scheduling.batch import Batch

BLOCK_SIZE = 4
TABLES = np.array([[[3, 5, 7], [2, 4, 6], [9, 8, 1]], [[4, 6, 8], [1, 3, 5], [0, 7, 2]]], dtype=np.int32)


def batch(*entries: tuple[int, int, int, bool], num_decodes: int) -> Batch:
    """(row, start, count, samples) each"""
    rows, starts, counts, samples = (list(column) for column in zip(*entries, strict=True))
    return Batch(0, rows, starts, counts, samples, sum(counts), num_decodes)


def test_step_of_only_decodes_samples_every_token() -> None:
    host = host_step(batch((1, 5, 1, True), (0, 3, 1, True), num_decodes=2), TABLES, BLOCK_SIZE)
    assert host.only_decodes
    assert host.context_lens.tolist() == [6, 4]
    assert host.positions.tolist() == [5, 3]
    assert host.slot_mapping.tolist() == [[4 * 4 + 1, 3 * 4 + 3], [3 * 4 + 1, 4 * 4 + 3]]
    assert host.sample_tokens.tolist() == [0, 1]
    assert host.sample_rows.tolist() == [1, 0]
    assert host.sample_lengths.tolist() == [6, 4]


def test_chunks_come_after_decodes() -> None:
    entries = (2, 6, 1, True), (1, 0, 3, False), (0, 4, 2, True)
    host = host_step(batch(*entries, num_decodes=1), TABLES, BLOCK_SIZE)
    assert not host.only_decodes
    assert host.query_starts.tolist() == [0, 1, 4, 6]
    assert host.token_rows.tolist() == [2, 1, 1, 1, 0, 0]
    assert host.positions.tolist() == [6, 0, 1, 2, 4, 5]
    assert host.slot_mapping[0].tolist() == [8 * 4 + 2, 8, 9, 10, 5 * 4, 5 * 4 + 1]
    assert host.sampling_entries == [0, 2]
    assert host.sample_tokens.tolist() == [0, 5]
    assert host.sample_lengths.tolist() == [7, 6]


def test_entries_that_end_with_a_vector_come_last_and_sample_nothing() -> None:
    entries = (2, 6, 1, True), (1, 0, 3, False), (0, 4, 2, True)
    host = host_step(batch(*entries, num_decodes=1), TABLES, BLOCK_SIZE)
    host.pool([1])
    assert host.sampling_entries == [0, 2]
    assert host.pooled_entries == [1]
    assert host.sampling_rows.tolist() == [2, 0]
    assert host.sample_tokens.tolist() == [0, 5, 3]
    assert host.sample_rows.tolist() == [2, 0, -1]
    assert host.sample_lengths.tolist() == [7, 6, 3]
    assert host.rows.tolist() == [2, 1, 0]
