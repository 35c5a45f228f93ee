"""Limits that connections share (slots, open files, parsing time), and the watches that end idle or abandoned ones."""

from __future__ import annotations

import logging
import resource
import select
from asyncio import AbstractEventLoop, TimerHandle, Transport
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

logger = logging.getLogger(__name__)

MIN_PROGRESS = 16 << 10  # bytes per write timeout; sockets accept data in batches of about this size
MAX_RESERVED = 64  # connection slots
NUM_OTHER_FILES = 128  # files, sockets and pipes that the server has open besides its connections
PARSING_SECONDS = 0.005  # per iteration of the event loop, for all connections together
HANGUP_INTERVAL = 0.02  # seconds between polls: about one engine step
_HANGUP_EVENTS = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The limits of one connection, and of their number, as configured."""

    max_header_size: int
    read_timeout: float
    write_timeout: float
    max_connections: int


class WriteTimer:
    """Aborts a connection whose client does not read.

    The transport itself would wait forever, even after `close`.
    """

    def __init__(self, loop: AbstractEventLoop, transport: Transport, seconds: float) -> None:
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._size = 0  # unread bytes when the timer was started
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """Start or restart the timer. Nothing may be written until `stop` or the next `start`."""
        self.stop()
        self._size = self._transport.get_write_buffer_size()
        if self._size:
            self._timer = self._loop.call_later(self._seconds, self.check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def check(self) -> None:
        """Abort the connection if the client has read too little since `start`; otherwise start again."""
        size = self._transport.get_write_buffer_size()
        if size and self._size - size < MIN_PROGRESS:
            self._transport.abort()
        else:
            self.start()


class SlotOwner(Protocol):
    """A connection that occupies a slot."""

    def refuse_connection(self) -> None:
        """Close the connection because there are too many."""


class ConnectionSlots:
    """Keeps a few connections for health probes.

    Once all other slots are taken, a new connection gets a reserved slot, on which only a probe is answered. When the
    reserved slots run out as well, the oldest of these connections is refused: it had the most time to send a probe.
    """

    def __init__(self, max_connections: int) -> None:
        self.num_reserved = min(MAX_RESERVED, -(-max_connections // 8), max_connections - 1)
        self._num_for_all = max_connections - self.num_reserved
        self._reserved: dict[SlotOwner, None] = {}  # oldest first

    def take(self, owner: SlotOwner, num_open: int) -> None:
        """Give a slot to a new connection; `num_open` counts it too."""
        if num_open - len(self._reserved) <= self._num_for_all:
            return
        self._reserved[owner] = None
        if len(self._reserved) > self.num_reserved:
            oldest = next(iter(self._reserved))
            del self._reserved[oldest]
            oldest.refuse_connection()

    def leave(self, owner: SlotOwner) -> None:
        self._reserved.pop(owner, None)

    def is_reserved(self, owner: SlotOwner) -> bool:
        """Return whether only a probe may use this connection."""
        return owner in self._reserved


def fit_open_files(max_connections: int) -> int:
    """Raise the process's limit of open files as needed; return how many connections fit into it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + NUM_OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (ValueError, OSError):  # the system has a limit of its own
        limit = soft
    fitting = max(1, min(max_connections, limit - NUM_OTHER_FILES))
    if fitting < max_connections:
        logger.warning(
            "--max-connections %d needs %d open files, but the limit is %d (ulimit -n): using %d connections",
            *(max_connections, needed, limit, fitting),
        )
    return fitting


class ParsingTurns:
    """Lets connections parse chunked bodies in turns, within a time budget per iteration of the event loop.

    A one-byte chunk takes as long to parse as a chunk of a megabyte, and one read may bring 40,000 of them, which would
    block everything else for half a second.
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def wait(self, parse: Callable[[], None]) -> None:
        """Call `parse` when its turn comes."""
        self._waiting.append(parse)
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        end = perf_counter() + PARSING_SECONDS
        try:
            while self._waiting and perf_counter() < end:
                self._waiting.popleft()()
        finally:
            self._is_scheduled = False
            if self._waiting:
                self._schedule()


class HangupWatch:
    """Notices that clients have disconnected while their connections are not being read.

    It polls all of them at once and reads nothing, since unread bytes would hide the end of the stream. (If more bytes
    are pending than the socket buffers, the end cannot be seen.)
    """

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], None]] = {}  # by file descriptor
        self._timer: TimerHandle | None = None

    def add(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call `callback` once when the other end of this connection is closed."""
        self._callbacks[descriptor] = callback
        self._poll.register(descriptor, _HANGUP_EVENTS)
        if self._timer is None:
            self._timer = self._loop.call_later(HANGUP_INTERVAL, self._check)

    def remove(self, descriptor: int) -> None:
        if self._callbacks.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _check(self) -> None:
        self._timer = None
        for descriptor, _ in self._poll.poll(0):
            callback = self._callbacks.get(descriptor)
            if callback is not None:
                self.remove(descriptor)
                callback()
        if self._callbacks:
            self._timer = self._loop.call_later(HANGUP_INTERVAL, self._check)
