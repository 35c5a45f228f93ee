"""Collectives of ranks on GPUs: over each other's memory, by NCCL, or as a last resort through the host.

docs/scaling.md lists which one is used when. Ranks on a CPU use `SharedCollective`.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.peer_memory import PeerMemory
from inflight.execution.parallel.shared_memory import HostCollective, SharedCollective, all_agree, exchange
from inflight.execution.parallel.triton.peer_kernels import MAX_PROGRAMS, gather_kernel, sum_kernel
from inflight.layers.triton.linear_parts import NextNorm, allocate_next_norm
from inflight.layers.triton_utils.pdl import launch_options, supports_pdl
from inflight.models.decoders.spec import Collective

logger = logging.getLogger(__name__)

# Bytes that a rank reads from its peers in one sum up to which a single kernel is expected to beat NCCL's rings, which
# read each part once but take many hops. An estimate: it has never been measured between GPUs.
ONE_SHOT = 1 << 20
# Bytes that a rank contributes to an exchange at once: the logits of some dozens of rows.
REGION_BYTES = 1 << 24
_BLOCK = 4096  # most columns that a gather copies at once


def buffer_bytes(size: int, region: int) -> int:
    """Return the bytes of the buffer of one of `size` ranks, with regions of `region` bytes."""
    return size * MAX_PROGRAMS * 4 + 2 * region


class PeerCollective:
    """Implements `Collective` and `AddingReduce`: every rank reads the parts of all ranks and adds them in order.

    Tensors larger than a region are exchanged piece by piece. Steps can be captured.
    """

    capturable = True

    def __init__(
        self, rank: int, addresses: Sequence[int], region: int, lost: int, device: torch.device
    ) -> None:
        """`addresses`: the ranks' buffers, as mapped in this process. `lost`: the address of a word that becomes
        nonzero when a rank is lost, which ends every wait."""
        self.region = region
        self._rank = rank
        self._size = len(addresses)
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._lost = torch.tensor([lost], dtype=torch.int64, device=device)
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self._pdl = supports_pdl(device)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        for piece in torch.split(x, self.region // (x.shape[1] * x.element_size())):
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
        return x.nbytes <= self.region

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        x = x.to(torch.float32).contiguous()
        out = torch.empty(len(x), sum(widths), dtype=torch.float32, device=x.device)
        at_once = self.region // (4 * max(widths))
        block = min(_BLOCK, triton.next_power_of_2(out.shape[1] // self._size + 1))
        for first in range(0, len(x), at_once):
            rows = slice(first, first + at_once)
            target = out[rows]
            num_rows, num_columns = target.shape
            num_units = num_rows * triton.cdiv(num_columns // self._size + 1, block)
            gather_kernel[(min(num_units, MAX_PROGRAMS),)](
                x[rows],
                target,
                *self._group_arguments(num_rows),
                num_columns,
                self.region,
                SIZE=self._size,
                BLOCK=block,
                PDL=self._pdl,
                num_warps=8,
                **launch_options(self._pdl),
            )
        return out

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
            self.region,
            SIZE=self._size,
            BLOCK=block,
            PDL=self._pdl,
            num_warps=max(1, min(16, block // 256)),
            **launch_options(self._pdl),
        )

    def _group_arguments(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor, int, int]:
        return self._peers, self._lost, self._state, self._rank, num_rows


class NcclCollective:
    """Implements `Collective`. All ranks get the same bits of a sum, whose order NCCL chooses. Steps can be captured
    once the group has been used."""

    capturable = True

    def __init__(self, group: Any) -> None:
        """`group`: a backend of torch.distributed, which has no common type for them."""
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Gather parts that are padded to the widest."""
        num_rows, widest = len(x), max(widths)
        mine = torch.zeros(num_rows, widest, dtype=torch.float32, device=x.device)
        mine[:, : x.shape[1]] = x
        parts = [torch.empty_like(mine) for _ in widths]
        self._group.allgather([parts], [mine]).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


def nccl_group(shared: SharedCollective, device: torch.device) -> Any:
    """Create a group of all ranks, each on its own GPU. They meet through a temporary file."""
    with tempfile.TemporaryDirectory(prefix="inflight-nccl-") as folder:
        path = exchange(shared, folder.encode())[0].decode()
        store = dist.FileStore(str(Path(path) / "ranks"), shared.size)  # type: ignore[attr-defined]
        options = dist.ProcessGroupNCCL.Options()
        group: Any = dist.ProcessGroupNCCL(store, shared.rank, shared.size, options)
        # Connect now, so that the communicator's memory is allocated before steps are measured.
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.synchronize()
        exchange(shared, b"")  # all ranks are done with the file
    return group


class DeviceCollective:
    """Implements `Collective` and `AddingReduce`: small sums over the peers' memory, large ones by NCCL."""

    capturable = True

    def __init__(self, peers: PeerCollective, nccl: NcclCollective, one_shot: int) -> None:
        """`one_shot`: the largest sum, in bytes, that is taken over the peers' memory."""
        self._peers = peers
        self._nccl = nccl
        self._one_shot = one_shot

    def sum(self, x: Tensor) -> Tensor:
        return self._peers.sum(x) if x.nbytes <= self._one_shot else self._nccl.sum(x)

    def add_sum(
        self, hidden: Tensor, x: Tensor, norm: Tensor | None, eps: float, next_norm: NextNorm | None
    ) -> bool:
        return x.nbytes <= self._one_shot and self._peers.add_sum(hidden, x, norm, eps, next_norm)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Gather over the peers' memory: each part is read once."""
        return self._peers.gather(x, widths)


def device_collective(memory: RankMemory, shared: SharedCollective, device: torch.device) -> Collective:
    """Return the best collective that all ranks of a stage support. All ranks call this together, with the same
    result."""
    torch.cuda.set_device(device)
    peers = _peers(memory, shared, device)
    nccl = _nccl(memory, shared, device)
    if peers is not None and nccl is not None:
        logger.info("collectives: peer memory, NCCL for large sums")
        return DeviceCollective(peers, nccl, min(peers.region, ONE_SHOT // (shared.size - 1)))
    if peers is not None:
        logger.info("collectives: peer memory")
        return peers
    if nccl is not None:
        logger.info("collectives: NCCL")
        return nccl
    logger.warning(
        "collectives: through the host, without CUDA graphs, because the ranks' GPUs cannot reach each other"
    )
    return HostCollective(shared)


def _peers(memory: RankMemory, shared: SharedCollective, device: torch.device) -> PeerCollective | None:
    """Return a collective over peer memory; None if some rank cannot reach another."""
    buffer: PeerMemory | None = None
    handle, lost, region = b"", 0, max(REGION_BYTES, shared.region)
    try:
        buffer = PeerMemory(buffer_bytes(shared.size, region))
        lost, handle = buffer.map_host_page(shared.address), buffer.handle
    except (EngineError, OSError) as error:
        logger.debug("peer memory cannot be allocated: %s", error)
    handles = exchange(shared, handle)
    addresses: list[int] = []
    if buffer is not None and all(handles):
        try:
            addresses = [
                buffer.address if rank == shared.rank else buffer.open(peer_handle)
                for rank, peer_handle in enumerate(handles)
            ]
        except EngineError as error:
            logger.debug("another rank's memory cannot be reached: %s", error)
    if all_agree(shared, bool(addresses)):
        assert buffer is not None
        memory.before_close(buffer.close)
        return PeerCollective(shared.rank, addresses, region, lost, device)
    if buffer is not None:
        buffer.close()
    return None


def _nccl(memory: RankMemory, shared: SharedCollective, device: torch.device) -> NcclCollective | None:
    """Return a collective by NCCL; None if ranks share a GPU, which NCCL refuses, or torch was built without it."""
    devices = exchange(shared, str(torch.cuda.get_device_properties(device).uuid).encode())
    if len(set(devices)) < shared.size or not all_agree(shared, dist.is_nccl_available()):
        return None
    group = nccl_group(shared, device)
    memory.when_lost(group.abort)
    return NcclCollective(group)
