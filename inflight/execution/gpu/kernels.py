"""The first kernel of a step: new table entries into the rows, the step's tokens out of them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

SIZE = 256  # updates and tokens that one program looks after


class TableUpdates(NamedTuple):
    """block_tables[rows[i], columns[i]] = block_ids[i] where rows[i] >= 0. [U] int32 each."""

    rows: Tensor
    columns: Tensor
    block_ids: Tensor


class StepTokens(NamedTuple):
    """ids[t] = tokens[rows[t], positions[t]], or 0 in padding, where rows[t] < 0. [T] int32 each."""

    rows: Tensor
    positions: Tensor
    ids: Tensor


def open_step(tokens: Tensor, block_tables: Tensor, updates: TableUpdates, step: StepTokens | None) -> None:
    """tokens [max_rows, max_len] and block_tables [max_rows, max_blocks], int32 both."""
    num_updates = len(updates.rows)
    rows, positions, ids = step or (updates.rows, updates.columns, updates.block_ids)
    num_tokens = 0 if step is None else len(ids)
    grid = (triton.cdiv(max(num_updates, num_tokens), SIZE),)
    strides = block_tables.stride(0), tokens.stride(0)
    _open_step[grid](
        block_tables, *updates, num_updates, tokens, rows, positions, ids, num_tokens, *strides, SIZE=SIZE
    )


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
