"""Where each request ends in the bytes of a connection, and what a chunked body has beside its data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

_NEWLINES = re.compile(rb"[\r\n]+")
_NEWLINE = re.compile(rb"\r?\n")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")
_PLAIN_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})\r\n")
MAX_CHUNKS = 256  # that the parser may read at a time, since each takes it a while


class _Part(Enum):
    HEADERS = 0
    BODY = 1  # of a known length
    CHUNK_SIZE = 2
    CHUNK = 3
    TRAILERS = 4


class RequestFraming:
    """Follows the bytes that the parser is given, one request at a time: the parser itself cannot be stopped.

    It only finds ends. What is valid is for the parser to say, and where the two disagree the request is refused.
    """

    def __init__(self) -> None:
        self._part = _Part.HEADERS
        self._has_begun = False  # the request whose headers are read; newlines before it do not count
        self._num_left = 0  # bytes, of the body or of the chunk with the newline after it
        self._line = b""  # what has come of a line that is read
        self._num_extra_bytes = 0
        self._num_chunks = 0  # found by this call

    @property
    def in_chunks(self) -> bool:
        return self._part in (_Part.CHUNK_SIZE, _Part.CHUNK, _Part.TRAILERS)

    @property
    def in_headers(self) -> bool:
        return self._part is _Part.HEADERS

    @property
    def num_extra_bytes(self) -> int:
        """Of chunk extensions and trailers, also of one whose end has not come."""
        return self._num_extra_bytes + len(self._line)

    def headers_complete(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """The parser has seen all headers of a request, by names in small letters."""
        found = dict(headers)
        self._has_begun = False
        self._line, self._num_extra_bytes = b"", 0
        if b"transfer-encoding" in found:
            self._part = _Part.CHUNK_SIZE
        else:
            self._num_left = int(found.get(b"content-length", b"0"))
            self._part = _Part.BODY if self._num_left else _Part.HEADERS

    def advance(self, data: bytes, start: int, max_extra_bytes: int) -> int:
        """How far the parser may read: to the end of the headers, of the request, of the data, or of as many chunks as
        it may have at a time. It stops early once there are too many extra bytes."""
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
        # The end of the blank line may come apart from its beginning.
        found = _NEWLINE.match(data, start) or _BLANK_LINE.search(data, start)
        return len(data) if found is None else found.end()

    def _whole_chunks(self, data: bytes, start: int) -> int:
        """Past those without extensions that have come as a whole. There may be one for every byte of a body."""
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
        """A chunk's size with its extensions, or a trailer."""
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
        if size is None:  # the parser will say so, wherever it gets to
            self._num_left, self._part = len(data), _Part.CHUNK
            return end
        self._num_extra_bytes += len(text) - size.end()
        self._num_chunks += 1
        num = int(size[0], 16)
        self._num_left, self._part = num + 2, _Part.CHUNK if num else _Part.TRAILERS
        return end
