"""What the ranks of one stage do together, through shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from inflight.execution.parallel.shared_memory import SharedMemory
from inflight.execution.parallel.stream import OnLoss
from inflight.native.library import Library

# A rank that comes so many seconds later than the others is lost. Where these took long themselves (large steps on a
# slow machine), it gets so many times as long.
PATIENCE, SLOWNESS = 4.0, 4.0


@dataclass(slots=True)
class SharedCollective:
    """Implements `Collective` for float32 on a CPU. Sums are taken in the order of the ranks, element by element: a
    result depends neither on what else is in the step nor on who came first."""

    capturable: ClassVar[bool] = False

    library: Library
    memory: SharedMemory  # which stays mapped as long as this is used
    address: int
    rank: int
    size: int
    slot: int  # bytes
    spins: int
    on_loss: OnLoss
    watches: bool = False  # whether a rank that does not come is lost, or waited for
    _since: float = field(default_factory=time.monotonic)
    _extra: float = 0.0  # seconds

    def begin_step(self) -> None:
        """From here on this rank computes."""
        self._since = time.monotonic()

    def allow(self, seconds: float) -> None:
        """Before the next exchange the others have to do what this rank may have done before, and take so long."""
        self._extra = seconds

    def sum(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32).contiguous()
        self.call(self.library.group_sum, x.data_ptr(), x.numel())
        return x

    def call(self, function: Callable[..., int], *arguments: int | None) -> None:
        """One of the library that all ranks call together."""
        limit = 0
        if self.watches:
            limit = int(1e6 * (PATIENCE + SLOWNESS * (time.monotonic() - self._since) + self._extra))
        seat = self.address, self.rank, self.size, self.slot, self.spins, limit
        code = function(*seat, *arguments)
        if code:
            self.on_loss(code)
        self._since, self._extra = time.monotonic(), 0.0
