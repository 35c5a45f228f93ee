"""Hidden states from stage to stage, through shared memory."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.stream import SharedStream


class SharedLinks:
    """Implements `StageLinks`. Of several ranks of a stage, each has all hidden states, and hands them to the one that
    has its place in the next."""

    def __init__(self, memory: RankMemory, hidden_size: int) -> None:
        layout, rank = memory.ranks, memory.rank
        self._hidden_size = hidden_size
        self._behind: SharedStream | None = memory.hand_over(rank) if layout.stage(rank) else None
        last = layout.is_last_stage(rank)
        self._ahead: SharedStream | None = None if last else memory.hand_over(rank + layout.tensor)

    def receive(self, into: Tensor) -> None:
        assert self._behind is not None
        hidden = torch.empty(len(into), self._hidden_size)
        self._behind.read(0, hidden.data_ptr(), hidden.nbytes)
        into.copy_(hidden)

    def hand_over(self, hidden: Tensor) -> None:
        assert self._ahead is not None
        hidden = hidden.to("cpu", torch.float32).contiguous()
        self._ahead.write(hidden.data_ptr(), hidden.nbytes)
