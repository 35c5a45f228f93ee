"""How many connections a server has, and who gives way when there are too many."""

from __future__ import annotations

from typing import Protocol

MAX_RESERVED = 64


class Holder(Protocol):
    """Whoever has a connection."""

    def refuse_connection(self) -> None:
        """There are too many: give it up."""


class ConnectionPlaces:
    """Once all but a few are taken, what comes may only be a probe, and takes the place of the one that had most time
    to be one."""

    def __init__(self, max_connections: int) -> None:
        self.num_reserved = min(MAX_RESERVED, -(-max_connections // 8), max_connections - 1)  # for probes
        self._num_for_all = max_connections - self.num_reserved
        self._reserved: dict[Holder, None] = {}  # the oldest is first

    def take(self, holder: Holder, num_open: int) -> None:
        """One more is open, of so many."""
        if num_open - len(self._reserved) <= self._num_for_all:
            return
        self._reserved[holder] = None
        if len(self._reserved) > self.num_reserved:
            oldest = next(iter(self._reserved))
            del self._reserved[oldest]
            oldest.refuse_connection()

    def leave(self, holder: Holder) -> None:
        self._reserved.pop(holder, None)

    def is_reserved(self, holder: Holder) -> bool:
        """Whether only a probe may use it."""
        return holder in self._reserved
