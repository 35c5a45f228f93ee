"""What a forward pass reads: rows that stay between steps, and the inputs of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.attention.backend import AttentionInputs
from inflight.scheduling import Batch

# ---- what stays between steps ----


class Rows:
    """Tokens and block tables of all rows. Memory of rows and places not used yet is never touched."""

    def __init__(self, max_rows: int, max_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_len // block_size)
        # [max_rows, max_len]: prompt, then outputs; a sampled token is written here by the step that samples it.
        self.tokens = torch.empty(max_rows, max_len, dtype=torch.int32, device=device)
        # [max_rows, max_blocks]: entries past a row's last block are meaningless.
        self.block_tables = torch.empty(max_rows, max_blocks, dtype=torch.int32, device=device)

    def apply(self, batch: Batch) -> None:
        """Take in the requests that got a row and the blocks that were handed out."""
        for row, request in batch.admissions:
            ids = torch.frombuffer(request.token_ids, dtype=torch.int64)
            self.tokens[row, : len(ids)] = ids
        for row, first, block_ids in batch.tables:
            self.block_tables[row, first : first + len(block_ids)] = torch.tensor(
                block_ids, dtype=torch.int32
            )

    def append(self, rows: Tensor, lengths: Tensor, token_ids: Tensor) -> None:
        """Write the tokens just sampled: token_ids[i] becomes token lengths[i] of rows[i]."""
        self.tokens[rows, lengths] = token_ids.to(torch.int32)


# ---- one step ----


@dataclass(slots=True)
class StepInputs:
    """What one forward pass reads. T tokens in B entries, S of which sample."""

    token_ids: Tensor  # [T] int64
    attention: AttentionInputs
    sampling_entries: list[int]  # [S] indices into the batch
    sampling_tokens: Tensor  # [S] int64, the last token of each sampling entry
    sampling_rows: Tensor  # [S] int64
    sampling_lengths: Tensor  # [S] int64, the position that the sampled token will have

    def last_tokens(self, entries: list[int]) -> Tensor:
        """The last token of each of these entries, as an index into the step's."""
        return self.attention.query_starts[1:][entries].long() - 1


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
