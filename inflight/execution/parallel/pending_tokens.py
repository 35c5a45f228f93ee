"""Tokens that another rank sampled, on their way into the rows of this one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inflight.execution.parallel.messages import DrawnIds
from inflight.scheduling import Batch


class _Places(NamedTuple):
    rows: Tensor  # [S]
    lengths: Tensor  # [S]


class TokenRows(Protocol):
    tokens: Tensor  # [max_rows, max_len]

    def append(self, rows: Tensor, lengths: Tensor, token_ids: Tensor) -> None:
        """Token number lengths[i] of row rows[i], [n] each."""


class PendingTokens:
    """Knows where the tokens of each step belong until they come."""

    def __init__(self, rows: TokenRows) -> None:
        self._rows = rows
        self._expected: dict[int, _Places] = {}  # by step
        self._admitted = torch.full((len(rows.tokens),), -1)  # by row: the step that gave it to its request

    def expect(self, batch: Batch, rows: Tensor, lengths: Tensor) -> None:
        """This step draws tokens number `lengths` [S] of `rows` [S], of which this rank will be told."""
        for row, _ in batch.admissions:
            self._admitted[row] = batch.step
        if len(rows):
            self._expected[batch.step] = _Places(rows, lengths)

    def write(self, drawn: list[DrawnIds]) -> None:
        """Before the next step takes in its admissions. A row may have been given to another request since."""
        for step, token_ids in ((found.step, found.token_ids) for found in drawn):
            for old in [number for number in self._expected if number < step]:
                del self._expected[old]  # it failed
            rows, lengths = self._expected.pop(step)
            tokens = torch.tensor(token_ids)
            theirs = self._admitted[rows] <= step
            self._rows.append(rows[theirs], lengths[theirs], tokens[theirs])
