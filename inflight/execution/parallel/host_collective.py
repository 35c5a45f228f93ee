"""Sums and gathers of ranks on GPUs, through the memory of their host: correct, and slow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.execution.parallel.collective import SharedCollective


class HostCollective:
    """Implements `GatheringCollective` for any device and dtype. Every rank gets all columns of a gather: so each can
    sample for itself, and with the same logits all draw the same tokens.

    The device is waited for in each of them, so that no step with one can be captured.
    """

    capturable = False

    def __init__(self, shared: SharedCollective) -> None:
        self._shared = shared

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(self._shared.sum(x.float().cpu()))

    def gather(self, x: Tensor, widths: Sequence[int], wanted: Tensor | None = None) -> Tensor:
        """Rows of which nothing is wanted stay where they are."""
        first, width = sum(widths[: self._shared.rank]), sum(widths)
        out = torch.empty(len(x), width, device=x.device)
        rows = slice(None) if wanted is None else wanted.nonzero()[:, 0]
        mine = x[rows].cpu()
        columns = torch.zeros(len(mine), width)
        columns[:, first : first + x.shape[1]] = mine
        out[rows] = self._shared.sum(columns).to(x.device)
        return out
