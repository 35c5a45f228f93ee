"""Limits of connections: how much is parsed at a time, slots and open files, and watches that end abandoned ones."""

from __future__ import annotations

import logging
import re
import resource
import select
from asyncio import AbstractEventLoop, TimerHandle, Transport
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
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
    except (ValueError, OSError):  # the system has its own limit
        limit = soft
    fitting = max(1, min(max_connections, limit - NUM_OTHER_FILES))
    if fitting < max_connections:
        logger.warning(
            "--max-connections %d needs %d open files, but the limit is %d (ulimit -n): using %d connections",
            *(max_connections, needed, limit, fitting),
        )
    return fitting


# ---- parsing ----

_NEWLINES = re.compile(rb"[\r\n]+")
_NEWLINE = re.compile(rb"\r?\n")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")
_PLAIN_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})\r\n")
MAX_CHUNKS = 256  # parsed at a time, since each costs the parser the same however small it is


class _RequestPart(Enum):
    HEADERS = 0
    BODY = 1  # of a known length
    CHUNK_SIZE = 2
    CHUNK = 3
    TRAILERS = 4


class RequestFraming:
    """Tells how much of the incoming data may be given to httptools, which cannot be paused in the middle.

    It finds only the ends of requests. The parser decides what is valid; if the two disagree, the request is refused.
    """

    def __init__(self) -> None:
        self._part = _RequestPart.HEADERS
        self._has_begun = False  # whether the next request has; newlines before it are skipped
        self._num_left = 0  # bytes left of the body, or of the chunk and the newline after it
        self._line = b""  # the line received so far
        self._num_extra_bytes = 0
        self._num_chunks = 0  # skipped by the current call of `advance`

    @property
    def in_chunks(self) -> bool:
        return self._part in (_RequestPart.CHUNK_SIZE, _RequestPart.CHUNK, _RequestPart.TRAILERS)

    @property
    def in_headers(self) -> bool:
        return self._part is _RequestPart.HEADERS

    @property
    def num_extra_bytes(self) -> int:
        """The bytes of chunk extensions and trailers so far, including an incomplete line."""
        return self._num_extra_bytes + len(self._line)

    def headers_complete(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Continue with the body. `headers` are those of the request, with lower-case names."""
        values = dict(headers)
        self._has_begun = False
        self._line, self._num_extra_bytes = b"", 0
        if b"transfer-encoding" in values:
            self._part = _RequestPart.CHUNK_SIZE
        else:
            self._num_left = int(values.get(b"content-length", b"0"))
            self._part = _RequestPart.BODY if self._num_left else _RequestPart.HEADERS

    def advance(self, data: bytes, start: int, max_extra_bytes: int) -> int:
        """Return how far the parser may read from `start`.

        That is to the end of the headers, of the request, of the data or of `MAX_CHUNKS` chunks, whichever comes first,
        or less once there are more than `max_extra_bytes` of extensions and trailers.
        """
        if self.in_headers:
            return self._end_of_headers(data, start)
        self._num_chunks = 0
        while start < len(data) and not self.in_headers and self.num_extra_bytes <= max_extra_bytes:
            if self._num_chunks >= MAX_CHUNKS and self._part is _RequestPart.CHUNK_SIZE:
                break
            read = self._skip if self._part in (_RequestPart.BODY, _RequestPart.CHUNK) else self._read_line
            start = read(data, start)
        return start

    def _end_of_headers(self, data: bytes, start: int) -> int:
        if not self._has_begun:
            newlines = _NEWLINES.match(data, start)
            if newlines is not None:
                return newlines.end()
            self._has_begun = True
        # The two newlines of a blank line may arrive separately.
        blank = _NEWLINE.match(data, start) or _BLANK_LINE.search(data, start)
        return len(data) if blank is None else blank.end()

    def _whole_chunks(self, data: bytes, start: int) -> int:
        """Skip complete chunks without extensions quickly: a body may have one per byte."""
        size_at, end = _PLAIN_SIZE.match, len(data)
        while self._num_chunks < MAX_CHUNKS and (size := size_at(data, start)) is not None:
            num = int(size[1], 16)
            after = size.end() + num + 2
            if not num or after > end:
                break
            start = after
            self._num_chunks += 1
        return start

    def _skip(self, data: bytes, start: int) -> int:
        num = min(self._num_left, len(data) - start)
        self._num_left -= num
        if not self._num_left:
            self._part = _RequestPart.HEADERS if self._part is _RequestPart.BODY else _RequestPart.CHUNK_SIZE
        return start + num

    def _read_line(self, data: bytes, start: int) -> int:
        """Read a chunk size with its extensions, or a trailer."""
        if self._part is _RequestPart.CHUNK_SIZE and not self._line:
            start = self._whole_chunks(data, start)
        newline = data.find(b"\n", start)
        end = len(data) if newline < 0 else newline + 1
        self._line += data[start:end]
        if newline < 0:
            return end
        line, self._line = self._line, b""
        text = line.rstrip(b"\r\n")
        if self._part is _RequestPart.TRAILERS:
            self._num_extra_bytes += len(line)
            self._part = _RequestPart.TRAILERS if text else _RequestPart.HEADERS
            return end
        size = _CHUNK_SIZE.match(text)
        if size is None:  # the parser will refuse it
            self._num_left, self._part = len(data), _RequestPart.CHUNK
            return end
        self._num_extra_bytes += len(text) - size.end()
        self._num_chunks += 1
        num = int(size[0], 16)
        self._num_left, self._part = num + 2, _RequestPart.CHUNK if num else _RequestPart.TRAILERS
        return end


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


# ---- watches ----


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
