"""Sums and gathers of ranks on GPUs, through the memory of their host: correct, and slow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.execution.parallel.collective import SharedCollective


class HostCollective:
    """Implements `Collective` for any device and dtype. Every rank gets all columns of a gather: so each can sample
    for itself, and with the same logits all draw the same tokens.

    The device is waited for in each of them, so that no step with one can be captured.
    """

    capturable = False

    def __init__(self, shared: SharedCollective) -> None:
        self._shared = shared

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(self._shared.sum(x.float().cpu()))

    def gather(
        self,
        x: Tensor,
        widths: Sequence[int],
        wanted: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        first = sum(widths[: self._shared.rank])
        columns = torch.zeros(len(x), sum(widths))
        columns[:, first : first + x.shape[1]] = x.cpu()
        return self._shared.sum(columns).to(x.device)
