"""Notices that a client has gone while its connection is not read."""

from __future__ import annotations

import select
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable

INTERVAL = 0.02  # seconds: about one step
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class HangupWatch:
    """Asks about all such connections at once, as long as there are any. Nothing is read: bytes that have come and were
    not wanted yet would hide the end from whoever reads. (Behind
    more than the socket holds, the end cannot be seen.)"""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._poll = select.poll()
        self._left: dict[int, Callable[[], None]] = {}  # what to call, by descriptor
        self._timer: TimerHandle | None = None

    def add(self, descriptor: int, left: Callable[[], None]) -> None:
        """Call `left`, once, when the other end of this connection is closed."""
        self._left[descriptor] = left
        self._poll.register(descriptor, _GONE)
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL, self._look)

    def remove(self, descriptor: int) -> None:
        if self._left.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _look(self) -> None:
        self._timer = None
        for descriptor, _ in self._poll.poll(0):
            left = self._left.get(descriptor)
            if left is not None:
                self.remove(descriptor)
                left()
        if self._left:
            self._timer = self._loop.call_later(INTERVAL, self._look)
