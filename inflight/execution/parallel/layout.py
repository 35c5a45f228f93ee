"""The arrangement of ranks in stages, and the layout of the memory that they share.

    heartbeats | steps: rank 0 to all | results: last stage to rank 0 | group of each stage | hidden states

Ranks are numbered stage by stage: with 2 stages of 2, ranks 0 and 1 have the first layers, 2 and 3 the last.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from inflight.config import MAX_RANKS  # as kMaxRanks in layers/native/group.cpp
from inflight.execution.parallel.shared_memory import OnLoss, SharedCollective, SharedMemory, SharedStream
from inflight.layers.native.library import Library

logger = logging.getLogger(__name__)

_LINE = 64
_STEPS_RING = _RESULTS_RING = 1 << 24  # untouched pages take no memory
# Spins before sleeping: about 30 microseconds where every rank has its own cores, almost none where they share.
_SPINS, _FEW_SPINS = 1000, 50


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The number of ranks and the sizes of their buffers."""

    tensor: int  # ranks per stage
    pipeline: int  # stages
    threads: int  # per rank
    region: int  # bytes that a rank can contribute to an exchange at once
    hand_over: int  # capacity, in bytes, of the ring of hidden states between two ranks
    layers: tuple[tuple[int, int], ...]  # of each stage: first, and last + 1

    @property
    def count(self) -> int:
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        return rank // self.tensor

    @property
    def sampler(self) -> int:
        """The rank whose samples are used: the first of the last stage."""
        return self.count - self.tensor

    def is_last_stage(self, rank: int) -> bool:
        return rank >= self.sampler


class RankMemory:
    """The shared memory as one rank sees it."""

    def __init__(
        self,
        library: Library,
        ranks: RankLayout,
        rank: int,
        on_loss: OnLoss,
        descriptor: int | None = None,
    ) -> None:
        """Create the memory, or with a `descriptor` map that of another rank."""
        self.ranks = ranks
        self.rank = rank
        self._library = library
        self._on_loss = on_loss
        self._before_close: list[Callable[[], None]] = []
        self._when_lost: list[Callable[[], None]] = []
        self._group_size = _aligned(library.group_bytes + 2 * ranks.tensor * ranks.region)
        self._steps_at = MAX_RANKS * _LINE
        self._results_at = self._steps_at + _aligned(library.stream_bytes + _STEPS_RING)
        self._groups_at = self._results_at + _aligned(library.stream_bytes + _RESULTS_RING)
        self._hand_overs_at = self._groups_at + ranks.pipeline * self._group_size
        self._hand_over_size = _aligned(library.stream_bytes + ranks.hand_over)
        size = self._hand_overs_at + (ranks.count - ranks.tensor) * self._hand_over_size
        self._memory = SharedMemory(size, descriptor)
        enough_cores = ranks.count * ranks.threads <= (os.cpu_count() or 1)
        self._spins = _SPINS if enough_cores else _FEW_SPINS

    @property
    def descriptor(self) -> int:
        return self._memory.descriptor

    def beats(self, rank: int) -> int:
        """Return the address of a rank's heartbeat counter."""
        return self._memory.address + rank * _LINE

    def steps(self) -> SharedStream:
        """Return the stream of messages from rank 0 to all others."""
        return self._stream(self._steps_at, self.ranks.count - 1, _STEPS_RING)

    def results(self) -> SharedStream:
        """Return the stream of results from the last stage to rank 0."""
        return self._stream(self._results_at, 1, _RESULTS_RING)

    def hand_over(self, to: int) -> SharedStream:
        """Return the stream of hidden states to rank `to` from its counterpart in the previous stage."""
        index = to - self.ranks.tensor
        return self._stream(self._hand_overs_at + index * self._hand_over_size, 1, self.ranks.hand_over)

    def collective(self) -> SharedCollective | None:
        """Return the collective of this rank's stage; None if it is alone there."""
        ranks = self.ranks
        if ranks.tensor == 1:
            return None
        index = self.rank % ranks.tensor
        group = self._group(ranks.stage(self.rank))
        return SharedCollective(
            self._library,
            self._memory,
            group,
            index,
            ranks.tensor,
            ranks.region,
            self._spins,
            self._on_loss,
        )

    def when_lost(self, call: Callable[[], None]) -> None:
        """Register a callback that ends waits which do not watch this memory."""
        self._when_lost.append(call)

    def lose(self) -> None:
        """End all waits of all ranks."""
        for stage in range(self.ranks.pipeline):
            self._library.group_lose(self._group(stage))
        while self._when_lost:
            call = self._when_lost.pop()
            try:
                call()
            except Exception:  # the other waits must still be ended
                logger.exception("a callback for a lost rank failed")

    def before_close(self, call: Callable[[], None]) -> None:
        """Register a callback that releases a device's mapping of this memory."""
        self._before_close.append(call)

    def close(self) -> None:
        while self._before_close:
            self._before_close.pop()()
        self._memory.close()

    def _group(self, stage: int) -> int:
        return self._memory.address + self._groups_at + stage * self._group_size

    def _stream(self, offset: int, num_readers: int, capacity: int) -> SharedStream:
        address, group = self._memory.address + offset, self._group(self.ranks.stage(self.rank))
        return SharedStream(
            self._library, self._memory, address, group, num_readers, capacity, self._spins, self._on_loss
        )


def _aligned(size: int) -> int:
    return -(-size // 4096) * 4096
