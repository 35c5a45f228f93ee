"""Where a predictor goes on behind a step: the last right token of each row, and the positions of further guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_SIZE = 128


class TokenPlaces(NamedTuple):
    """The rows and positions of a step's tokens, [T] int32; negative rows are padding."""

    rows: Tensor
    positions: Tensor


class Guessing(NamedTuple):
    """The rows that guess, [R] int32 each."""

    rows: Tensor  # negative: padding
    samples: Tensor  # the first sample of each
    counts: Tensor  # its samples
    wanted: Tensor  # guesses


class StepSamples(NamedTuple):
    """The samples of a step, [S] int32 each."""

    tokens: Tensor  # the step's token that each follows
    lengths: Tensor  # the position of the sampled token
    drafts: Tensor  # the draft that it follows, -1 where it follows none
    ids: Tensor  # the sampled token
    bad: Tensor  # 0, or why sampling failed


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the rows that guess are, [R] int32 each."""

    last: Tensor  # the step's last right token of each; negative: padding
    sampled: Tensor  # the token sampled behind it
    rows: Tensor  # negative: no further guess
    positions: Tensor  # of the token that the next pass reads
    lengths: Tensor  # the position of the next guess

    @classmethod
    def of(cls, capacity: int, device: torch.device) -> Cursor:
        return cls(*torch.zeros(5, capacity, dtype=torch.int32, device=device))


def following_tokens(step: TokenPlaces, tokens: Tensor) -> Tensor:
    """Return the token behind each of the step's, [T] int32. tokens [max_rows, max_len] int32."""
    ids = torch.empty_like(step.rows)
    _following[(triton.cdiv(len(ids), PROGRAM_SIZE),)](
        *step, tokens, tokens.stride(0), ids, len(ids), tokens.shape[1], SIZE=PROGRAM_SIZE
    )
    return ids


def find_last(guessing: Guessing, sampled: StepSamples, cursor: Cursor, read_ahead: int) -> None:
    """Set the cursor to each row's last right token, or `read_ahead` tokens behind it."""
    capacity = len(cursor.rows)
    _find_last[(triton.cdiv(capacity, PROGRAM_SIZE),)](
        *guessing[:3], *sampled, cursor.last, cursor.sampled, cursor.rows, cursor.positions, cursor.lengths,
        read_ahead, capacity, SIZE=PROGRAM_SIZE,
    )  # fmt: skip


def go_on(wanted: Tensor, bad: Tensor, cursor: Cursor, number: int) -> None:
    """Move on to guess `number` of the rows that want one, and whose last one did not fail."""
    capacity = len(cursor.rows)
    _go_on[(triton.cdiv(capacity, PROGRAM_SIZE),)](
        wanted, bad, cursor.rows, cursor.positions, cursor.lengths, number, capacity, SIZE=PROGRAM_SIZE
    )


@triton.jit(do_not_specialize=["num_tokens", "max_len"])
def _following(
    rows, positions, tokens, token_stride, ids, num_tokens, max_len, SIZE: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(rows + i, mask=i < num_tokens, other=-1)
    position = tl.minimum(tl.load(positions + i, mask=row >= 0, other=0) + 1, max_len - 1)
    token_id = tl.load(tokens + row.to(tl.int64) * token_stride + position, mask=row >= 0, other=0)
    tl.store(ids + i, token_id, mask=i < num_tokens)


@triton.jit(do_not_specialize=["read_ahead", "capacity"])
def _find_last(
    guess_rows, samples, counts, sample_tokens, sample_lengths, sample_drafts, ids, bad,
    last, last_ids, rows, positions, lengths, read_ahead, capacity, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.load(guess_rows + i, mask=i < capacity, other=-1)
    there = row >= 0
    sample = tl.load(samples + i, mask=there, other=0)
    count = tl.load(counts + i, mask=there, other=0)
    is_right = there
    for place in range(1, tl.max(count, 0)):
        is_right = is_right & (place < count)
        draft = tl.load(sample_drafts + sample + 1, mask=is_right, other=-1)
        same = tl.load(ids + sample, mask=is_right, other=-2) == draft
        is_right = is_right & same & (tl.load(bad + sample, mask=is_right, other=1) == 0)
        sample += is_right.to(tl.int32)
    there = there & (tl.load(bad + sample, mask=there, other=1) == 0)
    length = tl.load(sample_lengths + sample, mask=there, other=1)
    inside = i < capacity
    tl.store(last + i, tl.load(sample_tokens + sample, mask=there, other=-1), mask=inside)
    tl.store(last_ids + i, tl.load(ids + sample, mask=there, other=0), mask=inside)
    tl.store(rows + i, tl.where(there, row, -1), mask=inside)
    tl.store(positions + i, length - 1 + read_ahead, mask=inside)
    tl.store(lengths + i, length + 1, mask=inside)


@triton.jit(do_not_specialize=["number", "capacity"])
def _go_on(wanted, bad, rows, positions, lengths, number, capacity, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < capacity
    row = tl.load(rows + i, mask=inside, other=-1)
    goes_on = (row >= 0) & (tl.load(wanted + i, mask=inside, other=0) > number)
    goes_on = goes_on & (tl.load(bad + i, mask=inside, other=1) == 0)
    position = tl.load(positions + i, mask=inside, other=0)
    length = tl.load(lengths + i, mask=inside, other=0)
    tl.store(rows + i, tl.where(goes_on, row, -1), mask=inside)
    tl.store(positions + i, tl.where(goes_on, position + 1, 0), mask=inside)
    tl.store(lengths + i, tl.where(goes_on, length + 1, 0), mask=inside)
