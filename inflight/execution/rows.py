"""The runner's permanent state: one row a running request, kept between steps."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.scheduling import Batch


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
