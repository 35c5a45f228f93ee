"""Which rank is where, and what lies where in the memory that they share.

    beats of all ranks | steps: rank 0 to all | results: last stage to rank 0 | group of each stage | hand-overs

Ranks are numbered stage by stage: with 2 stages of 2, ranks 0 and 1 have the first layers, 2 and 3 the last.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inflight.config import MAX_RANKS  # as kMaxRanks in native/group.cpp
from inflight.execution.parallel.collective import SharedCollective
from inflight.execution.parallel.shared_memory import SharedMemory
from inflight.execution.parallel.stream import OnLoss, SharedStream
from inflight.native.library import Library

logger = logging.getLogger(__name__)

_LINE = 64
_STEPS_RING = _RESULTS_RING = 1 << 24  # pages that are never used take no memory
# Looks before sleeping: some 30 microseconds where every rank has cores of its own, nearly none where they share.
_SPINS, _FEW_SPINS = 1000, 50


@dataclass(frozen=True, slots=True)
class RankLayout:
    """How many there are, and their buffers."""

    tensor: int  # ranks of a stage
    pipeline: int  # stages
    threads: int  # of each rank
    slot: int  # bytes that a rank can give to an exchange at once
    hand_over: int  # bytes that may be on their way from a rank to its successor
    layers: tuple[tuple[int, int], ...]  # of each stage: the first, and the one behind the last

    @property
    def count(self) -> int:
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        return rank // self.tensor

    @property
    def sampler(self) -> int:
        """The rank that samples: the first of the last stage."""
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
        """New memory, or with a `descriptor` that of another rank."""
        self.ranks = ranks
        self.rank = rank
        self._library = library
        self._on_loss = on_loss
        self._before_close: list[Callable[[], None]] = []
        self._when_lost: list[Callable[[], None]] = []
        self._group_size = _aligned(library.group_bytes + 2 * ranks.tensor * ranks.slot)
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
        """The address of a rank's count of heartbeats."""
        return self._memory.address + rank * _LINE

    def steps(self) -> SharedStream:
        """What rank 0 tells all others."""
        return self._stream(self._steps_at, self.ranks.count - 1, _STEPS_RING)

    def results(self) -> SharedStream:
        return self._stream(self._results_at, 1, _RESULTS_RING)

    def hand_over(self, to: int) -> SharedStream:
        """Hidden states for rank `to`, from the one of the stage before that has the same place."""
        index = to - self.ranks.tensor
        return self._stream(self._hand_overs_at + index * self._hand_over_size, 1, self.ranks.hand_over)

    def collective(self) -> SharedCollective | None:
        """Of this rank's stage; None where it is alone there."""
        ranks = self.ranks
        if ranks.tensor == 1:
            return None
        place = self.rank % ranks.tensor
        group = self._group(ranks.stage(self.rank))
        return SharedCollective(
            self._library,
            self._memory,
            group,
            place,
            ranks.tensor,
            ranks.slot,
            self._spins,
            self._on_loss,
        )

    def when_lost(self, call: Callable[[], None]) -> None:
        """For waits that do not look at this memory."""
        self._when_lost.append(call)

    def lose(self) -> None:
        """End every wait, of every rank."""
        for group in self._all_groups():
            self._library.group_lose(group)
        while self._when_lost:
            call = self._when_lost.pop()
            try:
                call()
            except Exception:  # whoever waits for the loss to be told must not wait for ever
                logger.exception("a wait elsewhere could not be ended")

    def before_close(self, call: Callable[[], None]) -> None:
        """For who has told a device of this memory."""
        self._before_close.append(call)

    def close(self) -> None:
        while self._before_close:
            self._before_close.pop()()
        self._memory.close()

    def _all_groups(self) -> Iterator[int]:
        return (self._group(stage) for stage in range(self.ranks.pipeline))

    def _group(self, stage: int) -> int:
        return self._memory.address + self._groups_at + stage * self._group_size

    def _stream(self, at: int, num_readers: int, capacity: int) -> SharedStream:
        address, group = self._memory.address + at, self._group(self.ranks.stage(self.rank))
        return SharedStream(
            self._library, self._memory, address, group, num_readers, capacity, self._spins, self._on_loss
        )


def _aligned(size: int) -> int:
    return -(-size // 4096) * 4096
