"""A batch as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.backend import AttentionInputs
from inflight.execution.rows import Rows
from inflight.scheduling import Batch


@dataclass(slots=True)
class StepInputs:
    """What one forward pass reads. T tokens in B entries, S of which sample."""

    token_ids: Tensor  # [T] int64
    attention: AttentionInputs
    sampling_entries: list[int]  # [S] indices into the batch
    sampling_tokens: Tensor  # [S] int64, the last token of each sampling entry
    sampling_rows: Tensor  # [S] int64
    sampling_lengths: Tensor  # [S] int64, the position that the sampled token will have


def build_inputs(batch: Batch, rows: Rows, block_size: int) -> StepInputs:
    """Gather tokens, positions and places from the rows: per-token work is all in tensors."""
    device = rows.tokens.device
    columns = torch.tensor(
        [batch.rows, batch.starts, batch.counts], dtype=torch.int64, device=device
    )  # [3, B]
    row_ids, starts, counts = columns
    lengths = starts + counts  # [B]
    ends = counts.cumsum(0)  # [B]
    if batch.num_tokens == len(batch):  # one token each
        token_rows, positions = row_ids, starts
    else:
        token_rows = row_ids.repeat_interleave(counts)  # [T]
        first_places = (ends - counts).repeat_interleave(counts)  # [T]
        offsets = torch.arange(batch.num_tokens, device=device) - first_places
        positions = starts.repeat_interleave(counts) + offsets
    blocks = rows.block_tables[token_rows, positions // block_size].long()
    attention = AttentionInputs(
        positions=positions,
        query_starts=torch.cat((ends.new_zeros(1), ends)).int(),
        context_lens=lengths.int(),
        rows=row_ids.int(),
        block_tables=rows.block_tables,
        kv_places=blocks * block_size + positions % block_size,
    )
    sampling = [index for index, samples in enumerate(batch.samples) if samples]
    chosen = slice(None) if len(sampling) == len(batch) else sampling
    return StepInputs(
        token_ids=rows.tokens[token_rows, positions].long(),
        attention=attention,
        sampling_entries=sampling,
        sampling_tokens=(ends - 1)[chosen],
        sampling_rows=row_ids[chosen],
        sampling_lengths=lengths[chosen],
    )
