"""One step as the host sees it: a batch in arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inflight.execution.gpu.packed import Ints
from inflight.scheduling import Batch


@dataclass(frozen=True, slots=True)
class HostStep:
    """A batch as arrays. B entries, the first `num_decodes` of which decode; T tokens; S samples."""

    num_decodes: int
    num_tokens: int
    rows: Ints  # [B]
    context_lens: Ints  # [B]
    query_starts: Ints  # [B + 1]
    token_rows: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]
    sampling_entries: list[int]  # [S]
    sample_tokens: Ints  # [S] the last token of each sampling entry
    sample_rows: Ints  # [S]
    sample_lengths: Ints  # [S] the position that the sampled token will have

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == len(self.rows)


def host_step(batch: Batch, tables: Ints, block_size: int) -> HostStep:
    """`tables` [max_rows, max_blocks] are the block tables, this step's blocks included.

    A decode is an entry of one token that was admitted in an earlier step. (A request admitted in this one may
    share a block that this step fills, and has to wait for it; see `AttentionBackend.attend`.)
    """
    rows, starts, counts = (
        np.array(part, dtype=np.int32) for part in (batch.rows, batch.starts, batch.counts)
    )
    lengths = starts + counts
    num_admitted = len(batch.admissions)
    num_old = len(rows) - num_admitted  # admissions come last
    ends = np.cumsum(counts, dtype=np.int32)
    if batch.num_tokens == len(rows):
        num_decodes, token_rows, positions = num_old, rows, starts
    else:
        long = np.flatnonzero(counts[:num_old] != 1)
        num_decodes = int(long[0]) if len(long) else num_old
        token_rows = np.repeat(rows, counts)
        offsets = np.arange(batch.num_tokens, dtype=np.int32) - np.repeat(ends - counts, counts)
        positions = np.repeat(starts, counts) + offsets
    slots = tables[token_rows, positions // block_size] * block_size + positions % block_size
    query_starts = np.empty(len(rows) + 1, dtype=np.int32)
    query_starts[0] = 0
    query_starts[1:] = ends
    sampling = [entry for entry, samples in enumerate(batch.samples) if samples]
    all_sample = len(sampling) == len(rows)
    return HostStep(
        num_decodes=num_decodes,
        num_tokens=batch.num_tokens,
        rows=rows,
        context_lens=lengths,
        query_starts=query_starts,
        token_rows=token_rows,
        positions=positions,
        slots=slots,
        sampling_entries=sampling,
        sample_tokens=ends - 1 if all_sample else (ends - 1)[sampling],
        sample_rows=rows if all_sample else rows[sampling],
        sample_lengths=lengths if all_sample else lengths[sampling],
    )
