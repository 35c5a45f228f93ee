"""Finds where each request on a connection ends, and counts the bytes of chunk extensions and trailers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

_NEWLINES = re.compile(rb"[\r\n]+")
_NEWLINE = re.compile(rb"\r?\n")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")
_PLAIN_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})\r\n")
MAX_CHUNKS = 256  # parsed at a time, since each costs the parser the same however small it is


class _Part(Enum):
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
        self._part = _Part.HEADERS
        self._has_begun = False  # whether the next request has; newlines before it are skipped
        self._num_left = 0  # bytes left of the body, or of the chunk and the newline after it
        self._line = b""  # the line received so far
        self._num_extra_bytes = 0
        self._num_chunks = 0  # skipped by the current call of `advance`

    @property
    def in_chunks(self) -> bool:
        return self._part in (_Part.CHUNK_SIZE, _Part.CHUNK, _Part.TRAILERS)

    @property
    def in_headers(self) -> bool:
        return self._part is _Part.HEADERS

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
            self._part = _Part.CHUNK_SIZE
        else:
            self._num_left = int(values.get(b"content-length", b"0"))
            self._part = _Part.BODY if self._num_left else _Part.HEADERS

    def advance(self, data: bytes, start: int, max_extra_bytes: int) -> int:
        """Return how far the parser may read from `start`.

        That is to the end of the headers, of the request, of the data or of `MAX_CHUNKS` chunks, whichever comes first,
        or less once there are more than `max_extra_bytes` of extensions and trailers.
        """
        if self.in_headers:
            return self._end_of_headers(data, start)
        self._num_chunks = 0
        while start < len(data) and not self.in_headers and self.num_extra_bytes <= max_extra_bytes:
            if self._num_chunks >= MAX_CHUNKS and self._part is _Part.CHUNK_SIZE:
                break
            read = self._skip if self._part in (_Part.BODY, _Part.CHUNK) else self._read_line
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
            self._part = _Part.HEADERS if self._part is _Part.BODY else _Part.CHUNK_SIZE
        return start + num

    def _read_line(self, data: bytes, start: int) -> int:
        """Read a chunk size with its extensions, or a trailer."""
        if self._part is _Part.CHUNK_SIZE and not self._line:
            start = self._whole_chunks(data, start)
        newline = data.find(b"\n", start)
        end = len(data) if newline < 0 else newline + 1
        self._line += data[start:end]
        if newline < 0:
            return end
        line, self._line = self._line, b""
        text = line.rstrip(b"\r\n")
        if self._part is _Part.TRAILERS:
            self._num_extra_bytes += len(line)
            self._part = _Part.TRAILERS if text else _Part.HEADERS
            return end
        size = _CHUNK_SIZE.match(text)
        if size is None:  # the parser will refuse it
            self._num_left, self._part = len(data), _Part.CHUNK
            return end
        self._num_extra_bytes += len(text) - size.end()
        self._num_chunks += 1
        num = int(size[0], 16)
        self._num_left, self._part = num + 2, _Part.CHUNK if num else _Part.TRAILERS
        return end
