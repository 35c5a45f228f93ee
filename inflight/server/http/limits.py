"""Ends connections whose client does not read what it is sent."""

from __future__ import annotations

import logging
import resource
from asyncio import AbstractEventLoop, TimerHandle, Transport
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

MIN_PROGRESS = 16 << 10  # bytes in the time allowed; sockets take them in lumps of about this size


class WriteTimer:
    """Runs while there is something that the client should read. The transport itself would wait for ever, also once it
    was told to close."""

    def __init__(self, loop: AbstractEventLoop, transport: Transport, seconds: float) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._size = 0  # bytes to be read when the time began
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """The time begins, again if it has begun. From now on nothing is written until `stop`, or another `start`."""
        self.stop()
        self._size = self._transport.get_write_buffer_size()
        if self._size:
            self._timer = self._loop.call_later(self._seconds, self.check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """The time is over."""
        size = self._transport.get_write_buffer_size()
        if size and self._size - size < MIN_PROGRESS:
            self._transport.abort()
        else:
            self.start()


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


logger = logging.getLogger(__name__)

OWN = 128  # files, sockets and pipes that the server has open beside its connections


def connections_that_fit(wanted: int) -> int:
    """As many as wanted, or as the process may have open. Raises its limit as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OWN
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):  # the system has a limit of its own
        limit = soft
    fitting = max(1, min(wanted, limit - OWN))
    if fitting < wanted:
        logger.warning(
            "--max-connections %d needs %d open files, but the limit is %d (ulimit -n): it is %d connections now",
            *(wanted, needed, limit, fitting),
        )
    return fitting


SECONDS = 0.005  # of each round of the loop, for all of them together


class ParsingTurns:
    """A chunk of one byte takes as long to parse as one of a megabyte, and one read may bring 40,000 of them: everyone
    else would wait half a second. So connections parse a few chunks at a time, in turn, and in every round of the loop
    no more than fits into a moment, however many such connections there are."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def wait(self, parse: Callable[[], None]) -> None:
        """Call `parse` when it is its turn."""
        self._waiting.append(parse)
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        end = perf_counter() + SECONDS
        try:
            while self._waiting and perf_counter() < end:
                self._waiting.popleft()()
        finally:
            self._is_scheduled = False
            if self._waiting:
                self._schedule()
