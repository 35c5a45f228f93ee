"""Sums and gathers of ranks whose GPUs can access each other's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from inflight.execution.parallel.triton.peer_kernels import MAX_PROGRAMS, gather_kernel, sum_kernel
from inflight.layers.triton.linear_parts import NextNorm, allocate_next_norm
from inflight.triton_utils.pdl import launch_options, supports_pdl

_BLOCK = 4096  # most columns that a gather copies at once


def buffer_bytes(size: int, slot: int) -> int:
    """Return the bytes of the buffer of one of `size` ranks, with slots of `slot` bytes."""
    return size * MAX_PROGRAMS * 4 + 2 * slot


class PeerCollective:
    """Implements `GatheringCollective` and `AddingReduce`: every rank reads the parts of all ranks and adds them in
    order.

    What does not fit a slot is exchanged piece by piece. Steps can be captured.
    """

    capturable = True

    def __init__(
        self, rank: int, addresses: Sequence[int], slot: int, lost: int, device: torch.device
    ) -> None:
        """`addresses`: the ranks' buffers, as mapped in this process. `lost`: the address of a word that becomes
        nonzero when a rank is lost, which ends every wait."""
        self.slot = slot
        self._rank = rank
        self._size = len(addresses)
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._lost = torch.tensor([lost], dtype=torch.int64, device=device)
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self._pdl = supports_pdl(device)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        for piece in torch.split(x, self._rows_at_once(x)):
            self._sum(piece, None, None, 0.0, None)
        return x

    def add_sum(
        self, hidden: Tensor, x: Tensor, norm: Tensor | None, eps: float, next_norm: NextNorm | None
    ) -> bool:
        if not self.fits(x):
            return False
        self._sum(x.contiguous(), hidden, norm, eps, next_norm)
        return True

    def fits(self, x: Tensor) -> bool:
        """Return whether x fits one exchange."""
        return x.nbytes <= self.slot

    def gather(self, x: Tensor, widths: Sequence[int], wanted: Tensor | None = None) -> Tensor:
        """Gather columns on every rank."""
        x = x.to(torch.float32).contiguous()
        out = torch.empty(len(x), sum(widths), dtype=torch.float32, device=x.device)
        at_once = self.slot // (4 * max(widths))
        block = min(_BLOCK, triton.next_power_of_2(out.shape[1] // self._size + 1))
        for first in range(0, len(x), at_once):
            rows = slice(first, first + at_once)
            target = out[rows]
            num_rows, num_columns = target.shape
            num_units = num_rows * triton.cdiv(num_columns // self._size + 1, block)
            gather_kernel[(min(num_units, MAX_PROGRAMS),)](
                x[rows],
                target,
                None if wanted is None else wanted[rows],
                *self._group_arguments(num_rows),
                num_columns,
                self.slot,
                SIZE=self._size,
                BLOCK=block,
                PDL=self._pdl,
                num_warps=8,
                **launch_options(self._pdl),
            )
        return out

    def _rows_at_once(self, x: Tensor) -> int:
        return self.slot // (x.shape[1] * x.element_size())

    def _sum(
        self, x: Tensor, hidden: Tensor | None, norm: Tensor | None, eps: float, next_norm: NextNorm | None
    ) -> None:
        num_tokens, num_features = x.shape
        if num_tokens == 0:
            return
        block = triton.next_power_of_2(num_features)
        sum_kernel[(min(num_tokens, MAX_PROGRAMS),)](
            x,
            hidden,
            norm,
            *allocate_next_norm(next_norm, x, num_tiles=1),
            *self._group_arguments(num_tokens),
            num_features,
            eps,
            self.slot,
            SIZE=self._size,
            BLOCK=block,
            PDL=self._pdl,
            num_warps=max(1, min(16, block // 256)),
            **launch_options(self._pdl),
        )

    def _group_arguments(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
        return self._peers, self._lost, self._state, self._rank, num_rows
