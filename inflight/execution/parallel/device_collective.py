"""Collectives of ranks on GPUs: over each other's memory, by NCCL, or as a last resort through the host."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.parallel.collective import HostCollective, SharedCollective, all_agree, exchange
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.peer_collective import PeerCollective, buffer_bytes
from inflight.execution.parallel.peer_memory import PeerMemory
from inflight.layers.triton.linear_parts import NextNorm
from inflight.models.decoders.spec import GatheringCollective


class NcclCollective:
    """Implements `GatheringCollective`. All ranks get the same bits of a sum, whose order NCCL chooses. Steps can be
    captured once the group has been used."""

    capturable = True

    def __init__(self, group: Any) -> None:
        """`group`: a backend of torch.distributed, which has no common type for them."""
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
        """Gather on every rank. Parts are padded to the widest."""
        num_rows, widest = len(x), max(widths)
        mine = torch.zeros(num_rows, widest, dtype=torch.float32, device=x.device)
        mine[:, : x.shape[1]] = x
        parts = [torch.empty_like(mine) for _ in widths]
        self._group.allgather([parts], [mine]).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


def nccl_group(shared: SharedCollective, device: torch.device) -> Any:
    """Create a group of all ranks, each on a GPU of its own. They meet through a temporary file."""
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


logger = logging.getLogger(__name__)

# Bytes that a rank reads from its peers in one sum up to which a single kernel is expected to beat NCCL's rings, which
# read each part once but take many hops. An estimate: it has never been measured between GPUs.
ONE_SHOT = 1 << 20
# Bytes that a rank contributes to an exchange at once: the logits of some dozens of rows.
SLOT = 1 << 24


class DeviceCollective:
    """Implements `GatheringCollective` and `AddingReduce`: small sums over the peers' memory, large ones by NCCL."""

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

    def gather(self, x: Tensor, widths: Sequence[int], wanted: Tensor | None = None) -> Tensor:
        """Gather over the peers' memory: each part is read once, and unwanted columns are not read."""
        return self._peers.gather(x, widths, wanted)


def device_collective(
    memory: RankMemory, shared: SharedCollective, device: torch.device
) -> GatheringCollective:
    """Return the best collective that all ranks of a stage support. All ranks call this together, with the same
    result."""
    torch.cuda.set_device(device)
    peers = _peers(memory, shared, device)
    nccl = _nccl(memory, shared, device)
    if peers is not None and nccl is not None:
        logger.info("collectives: peer memory, NCCL for large sums")
        return DeviceCollective(peers, nccl, min(peers.slot, ONE_SHOT // (shared.size - 1)))
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
    handle, lost, slot = b"", 0, max(SLOT, shared.slot)
    try:
        buffer = PeerMemory(buffer_bytes(shared.size, slot))
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
        return PeerCollective(shared.rank, addresses, slot, lost, device)
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
