"""Which way the sums of ranks on GPUs take: each other's memory, NCCL, or as a last resort the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from inflight.errors import EngineError
from inflight.execution.parallel.collective import SharedCollective
from inflight.execution.parallel.exchange import all_agree, exchange
from inflight.execution.parallel.host_collective import HostCollective
from inflight.execution.parallel.layout import RankMemory
from inflight.execution.parallel.nccl_collective import NcclCollective, nccl_group
from inflight.execution.parallel.peer_collective import PeerCollective, buffer_bytes
from inflight.execution.parallel.peer_memory import PeerMemory
from inflight.layers.triton.next_norm import NextNorm
from inflight.models.decoders.shard import GatheringCollective

logger = logging.getLogger(__name__)

# Bytes of a sum up to which one kernel in which each rank reads all parts beats NCCL's rings, which read each part once
# but take many hops; shared out to the ranks that are read. An estimate: it was never measured between GPUs.
ONE_SHOT = 1 << 20
# Bytes that a rank gives to an exchange at once: logits of some dozens of rows.
SLOT = 1 << 24


class DeviceCollective:
    """Implements `GatheringCollective` and `AddingReduce`: small sums over the peers' memory, large ones by NCCL."""

    capturable = True

    def __init__(self, peers: PeerCollective, nccl: NcclCollective, one_shot: int) -> None:
        """`one_shot`: the most bytes that are read from the peers' memory."""
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
        """Always over the peers' memory: nobody can read less than each part once, and rows that are not wanted are
        not read."""
        return self._peers.gather(x, widths, wanted)


def device_collective(
    memory: RankMemory, shared: SharedCollective, device: torch.device
) -> GatheringCollective:
    """The best that all ranks of a stage have. They all call this at the same time, and find the same."""
    torch.cuda.set_device(device)
    peers = _peers(memory, shared, device)
    nccl = _nccl(memory, shared, device)
    if peers is not None and nccl is not None:
        logger.info("sums over the memory of the other ranks' GPUs, large ones by NCCL")
        return DeviceCollective(peers, nccl, min(peers.slot, ONE_SHOT // (shared.size - 1)))
    if peers is not None:
        logger.info("sums over memory of the GPU that all ranks reach")
        return peers
    if nccl is not None:
        logger.info("sums by NCCL")
        return nccl
    logger.warning(
        "sums go through the host: these ranks' GPUs cannot reach each other, and steps are not captured"
    )
    return HostCollective(shared)


def _peers(memory: RankMemory, shared: SharedCollective, device: torch.device) -> PeerCollective | None:
    """None where some rank cannot reach some other."""
    buffer: PeerMemory | None = None
    handle, lost, slot = b"", 0, max(SLOT, shared.slot)
    try:
        buffer = PeerMemory(buffer_bytes(shared.size, slot))
        lost, handle = buffer.see(shared.address), buffer.handle
    except (EngineError, OSError) as error:
        logger.debug("no memory for the other ranks: %s", error)
    handles = exchange(shared, handle)
    addresses: list[int] = []
    if buffer is not None and all(handles):
        try:
            addresses = [
                buffer.address if rank == shared.rank else buffer.open(found)
                for rank, found in enumerate(handles)
            ]
        except EngineError as error:
            logger.debug("another rank's memory is out of reach: %s", error)
    if all_agree(shared, bool(addresses)):
        assert buffer is not None
        memory.before_close(buffer.close)
        return PeerCollective(shared.rank, addresses, slot, lost, device)
    if buffer is not None:
        buffer.close()
    return None


def _nccl(memory: RankMemory, shared: SharedCollective, device: torch.device) -> NcclCollective | None:
    """None where ranks share a GPU, which NCCL refuses, or torch was built without it."""
    devices = exchange(shared, str(torch.cuda.get_device_properties(device).uuid).encode())
    if len(set(devices)) < shared.size or not all_agree(shared, dist.is_nccl_available()):
        return None
    group = nccl_group(shared)
    memory.when_lost(group.abort)
    return NcclCollective(group)
