"""A small HTTP client for streams: one request at a time on a connection, times taken where bytes are read."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from typing import Any, cast

import httptools
import msgspec

from inflight.bench.events import EventReader, StreamError, message_of

MAX_ERROR_BODY = 64 << 10


class Target(msgspec.Struct, frozen=True):
    """Where requests go, and what stands before every body."""

    host: str
    port: int
    path: str
    tls: bool = False
    headers: tuple[str, ...] = ()

    def request(self, body: bytes) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = (
            f"POST {self.path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            *self.headers,
            f"Content-Length: {len(body)}",
            "\r\n",
        )
        return "\r\n".join(lines).encode() + body


class Connection(asyncio.Protocol):
    """Raises StreamError for whatever keeps an answer from being complete."""

    def __init__(self) -> None:
        self.is_open = True
        self.was_used = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._reader = EventReader()
        self._answer: asyncio.Future[None] | None = None
        self._now = 0.0

    async def stream(self, request: bytes, reader: EventReader) -> None:
        """Send a request; returns when its answer is complete."""
        self._reader = reader
        self._status = 0
        self._is_stream = self._framed = False
        self._body = b""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._answer
        except BaseException:
            self.close()  # what still comes belongs to no one
            raise
        self.was_used = True

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    @property
    def got_nothing(self) -> bool:
        """No answer has begun."""
        return not self._status

    # ---- from the event loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of another class

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # What a callback raises comes out as the cause of a parser's error.
            cause = error.__context__
            self._fail(
                cause if isinstance(cause, StreamError) else StreamError("bad_response", f"not HTTP: {error}")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is None or self._answer.done():
            return
        if self._status and not self._framed:
            self.on_message_complete()  # an answer that ends with its connection
        else:
            self._fail(StreamError("broken", f"the connection ended early{f': {exc}' if exc else ''}"))

    # ---- from the parser ----

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        self._is_stream = self._is_stream and self._status == 200

    def on_body(self, data: bytes) -> None:
        if self._is_stream:
            self._reader.feed(data, self._now)
        elif len(self._body) < MAX_ERROR_BODY:
            self._body += data

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_open = False
        if not self._is_stream:
            self._fail(self._refusal())
        elif not (self._reader.done or self._reader.finished):
            self._fail(StreamError("broken", "the stream ended before its answer did"))
        elif self._answer is not None and not self._answer.done():
            self._reader.ended = self._now
            self._answer.set_result(None)

    def _refusal(self) -> StreamError:
        if self._status == 200:
            return StreamError("not_streamed", "the answer is not a stream of events")
        try:
            detail = message_of(msgspec.json.decode(self._body)["error"])
        except (msgspec.MsgspecError, KeyError, TypeError):
            detail = self._body[:300].decode(errors="replace")
        return StreamError(f"http_{self._status}", detail)

    def _fail(self, error: StreamError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class Pool:
    """Connections that are kept open between requests; as many as there are requests at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: deque[Connection] = deque()
        self._tls = ssl.create_default_context() if target.tls else None

    async def stream(self, request: bytes, reader: EventReader) -> None:
        while True:
            connection = await self._take()
            reused = connection.was_used
            try:
                await connection.stream(request, reader)
            except StreamError as error:
                # A server may close an idle connection at the moment it is used again; that is no one's fault.
                if reused and connection.got_nothing and error.kind == "broken":
                    continue
                raise
            if connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()
            return

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        target = self._target
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, target.host, target.port, ssl=self._tls
            )
        except OSError as error:  # ssl's errors too
            raise StreamError("connect", str(error)) from None
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
