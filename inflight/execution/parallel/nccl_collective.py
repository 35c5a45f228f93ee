"""Sums and gathers by a process group of torch: NCCL, between GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inflight.execution.parallel.collective import SharedCollective
from inflight.execution.parallel.exchange import exchange


class NcclCollective:
    """Implements `GatheringCollective`. Every rank gets the same bits of a sum, which is taken in an order of NCCL's
    own. Steps with it can be captured once it has been used."""

    capturable = True

    def __init__(self, group: Any) -> None:
        """`group`: a backend of torch.distributed, which has no type for what they have in common."""
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather(
        self,
        x: Tensor,
        widths: Sequence[int],
        wanted: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """On every rank. All of them give as many columns as the widest has."""
        num_rows, widest = len(x), max(widths)
        mine = torch.zeros(num_rows, widest, dtype=torch.float32, device=x.device)
        mine[:, : x.shape[1]] = x
        parts = [torch.empty_like(mine) for _ in widths]
        self._group.allgather([parts], [mine]).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


def nccl_group(shared: SharedCollective) -> Any:
    """Of all ranks, each of which has a GPU of its own, the current one of this thread. They find each other by a file
    that is gone when this returns."""
    with tempfile.TemporaryDirectory(prefix="inflight-nccl-") as folder:
        path = exchange(shared, folder.encode())[0].decode()
        store = dist.FileStore(str(Path(path) / "ranks"), shared.size)  # type: ignore[attr-defined]
        options = dist.ProcessGroupNCCL.Options()
        group: Any = dist.ProcessGroupNCCL(store, shared.rank, shared.size, options)
        # They meet here. What a communicator takes is taken before steps are measured.
        group.allreduce([torch.zeros(1, device="cuda")]).wait()
        torch.cuda.synchronize()
        exchange(shared, b"")  # nobody reads the file any more
    return group
