"""Batches as arrays."""

from __future__ import annotations

import numpy as np

from inflight.execution.gpu.host_step import host_step
from inflight.request import Request, RequestSpec
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Admission, Batch

BLOCK_SIZE = 4
TABLES = np.array([[[3, 5, 7], [2, 4, 6], [9, 8, 1]], [[4, 6, 8], [1, 3, 5], [0, 7, 2]]], dtype=np.int32)


def request(name: str) -> RequestSpec:
    return Request.create(name, list(range(8)), SamplingParams(), max_tokens=4).current_spec()


def batch(*entries: tuple[int, int, int, bool], admitted: int = 0) -> Batch:
    """(row, start, count, samples) each; the last `admitted` of them are new."""
    rows, starts, counts, samples = (list(column) for column in zip(*entries, strict=True))
    made = Batch(0, rows, starts, counts, samples, sum(counts))
    new = len(entries) - admitted
    made.admissions = [Admission(rows[index], request(str(index))) for index in range(new, len(entries))]
    return made


def test_step_of_only_decodes_samples_every_token() -> None:
    host = host_step(batch((1, 5, 1, True), (0, 3, 1, True)), TABLES, BLOCK_SIZE)
    assert host.only_decodes
    assert host.context_lens.tolist() == [6, 4]
    assert host.positions.tolist() == [5, 3]
    assert host.slot_mapping.tolist() == [[4 * 4 + 1, 3 * 4 + 3], [3 * 4 + 1, 4 * 4 + 3]]
    assert host.sample_tokens.tolist() == [0, 1]
    assert host.sample_rows.tolist() == [1, 0]
    assert host.sample_lengths.tolist() == [6, 4]


def test_chunks_come_after_decodes() -> None:
    host = host_step(
        batch((2, 6, 1, True), (1, 0, 3, False), (0, 4, 2, True), admitted=1), TABLES, BLOCK_SIZE
    )
    assert host.num_decodes == 1
    assert not host.only_decodes
    assert host.query_starts.tolist() == [0, 1, 4, 6]
    assert host.token_rows.tolist() == [2, 1, 1, 1, 0, 0]
    assert host.positions.tolist() == [6, 0, 1, 2, 4, 5]
    assert host.slot_mapping[0].tolist() == [8 * 4 + 2, 8, 9, 10, 5 * 4, 5 * 4 + 1]
    assert host.sampling_entries == [0, 2]
    assert host.sample_tokens.tolist() == [0, 5]
    assert host.sample_lengths.tolist() == [7, 6]


def test_request_admitted_with_one_token_is_not_a_decode() -> None:
    """Its prefix may be filled by this very step, so it must read after the others have written."""
    host = host_step(batch((1, 5, 1, True), (0, 4, 1, True), admitted=1), TABLES, BLOCK_SIZE)
    assert host.num_decodes == 1
    assert not host.only_decodes


def test_last_prompt_token_counts_as_a_decode() -> None:
    host = host_step(batch((1, 5, 1, True), (0, 4, 1, True), (2, 0, 2, False)), TABLES, BLOCK_SIZE)
    assert host.num_decodes == 2


def test_entries_that_end_with_a_vector_come_last_and_sample_nothing() -> None:
    entries = (2, 6, 1, True), (1, 0, 3, False), (0, 4, 2, True)
    host = host_step(batch(*entries, admitted=2), TABLES, BLOCK_SIZE, pooled=[1])
    assert host.num_decodes == 1
    assert host.sampling_entries == [0, 2]
    assert host.sample_tokens.tolist() == [0, 5, 3]
    assert host.sample_rows.tolist() == [2, 0, -1]
    assert host.rows.tolist() == [2, 1, 0]
