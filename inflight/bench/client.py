"""A small HTTP client for streamed answers that notes when tokens arrive.

`EventReader` parses the events of one stream. A `Connection` handles one request at a time and takes timestamps where
bytes are read, and `ConnectionPool` keeps connections open between requests.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from typing import Any, cast

import httptools
import msgspec

MAX_EVENT = 16 << 20  # bytes without an end of line
MAX_ERROR_BODY = 64 << 10


class _EventDelta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _EventChoice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _EventDelta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _EventUsage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct, gc=False):
    choices: list[_EventChoice] = []
    usage: _EventUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamError(Exception):
    """An answer that is not a complete, valid stream."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class EventReader:
    """Parses one stream, however its bytes are split: an event is decoded once its line is complete."""

    def __init__(self) -> None:
        self.times: list[float] = []  # arrival times of events that contain tokens
        self.num_seen = 0  # tokens seen: one per event, unless the event lists token ids
        self.usage: _EventUsage | None = None
        self.finished = False  # whether a finish reason has been received
        self.done = False  # whether [DONE] has been received
        self.ended = 0.0  # when the answer was complete; set by the connection
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that were read at `now`."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line[:5] == b"data:":
                self._event(line[5:], now)
        if len(self._rest) > MAX_EVENT:
            raise StreamError("bad_response", f"an event is longer than {MAX_EVENT} bytes")

    def _event(self, payload: bytes, now: float) -> None:
        try:
            event = _decode(payload)
        except msgspec.MsgspecError as error:
            if payload.strip() == b"[DONE]":
                self.done = True
                return
            raise StreamError("bad_response", f"cannot parse an event: {error}") from None
        if event.error is not None:
            raise StreamError("stream_error", error_message(event.error))
        num_tokens = 0
        for choice in event.choices:
            delta = choice.delta
            if choice.token_ids:
                num_tokens += len(choice.token_ids)
            elif choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                num_tokens += 1
            if choice.finish_reason is not None:
                self.finished = True
        if num_tokens:
            self.times.append(now)
            self.num_seen += num_tokens
        if event.usage is not None:
            self.usage = event.usage

    @property
    def num_tokens(self) -> int:
        """The tokens of the answer, as reported by the server if it does, otherwise as counted."""
        return self.usage.completion_tokens if self.usage is not None else self.num_seen

    @property
    def num_prompt_tokens(self) -> int:
        return self.usage.prompt_tokens if self.usage is not None else 0

    @property
    def num_cached_tokens(self) -> int:
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


def error_message(error: Any) -> str:
    """Return the message of an OpenAI error object, shortened."""
    message = error.get("message") if isinstance(error, dict) else None
    return str(message if message is not None else error)[:300]


# ---- HTTP ----


class Target(msgspec.Struct, frozen=True):
    """The address of an endpoint and the headers of every request."""

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
    """One HTTP connection. `stream` raises StreamError if an answer is not complete, for whatever reason."""

    def __init__(self) -> None:
        self.is_open = True
        self.was_used = False
        self._parser: Any = httptools.HttpResponseParser(self)
        self._reader = EventReader()
        self._answer: asyncio.Future[None] | None = None
        self._now = 0.0

    async def stream(self, request: bytes, reader: EventReader) -> None:
        """Send a request and wait until its answer is complete."""
        self._reader = reader
        self._status = 0
        self._is_stream = self._framed = False
        self._body = b""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._answer
        except BaseException:
            self.close()  # the rest of this answer must not be taken for the next one
            raise
        self.was_used = True

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    @property
    def got_nothing(self) -> bool:
        """Whether no part of an answer has arrived."""
        return not self._status

    # ---- called by the event loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not subclasses

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # An exception raised in a callback becomes the context of the parser's error.
            cause = error.__context__
            self._fail(
                cause
                if isinstance(cause, StreamError)
                else StreamError("bad_response", f"invalid HTTP: {error}")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is None or self._answer.done():
            return
        if self._status and not self._framed:
            self.on_message_complete()  # without framing, the end of the connection ends the answer
        else:
            self._fail(StreamError("broken", f"the connection was closed early{f': {exc}' if exc else ''}"))

    # ---- called by the parser ----

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
            self._fail(self._error_response())
        elif not (self._reader.done or self._reader.finished):
            self._fail(StreamError("broken", "the stream ended before the answer was complete"))
        elif self._answer is not None and not self._answer.done():
            self._reader.ended = self._now
            self._answer.set_result(None)

    def _error_response(self) -> StreamError:
        if self._status == 200:
            return StreamError("not_streamed", "the answer is not an event stream")
        try:
            detail = error_message(msgspec.json.decode(self._body)["error"])
        except (msgspec.MsgspecError, KeyError, TypeError):
            detail = self._body[:300].decode(errors="replace")
        return StreamError(f"http_{self._status}", detail)

    def _fail(self, error: StreamError) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


class ConnectionPool:
    """Keeps connections open between requests, as many as there were concurrent requests."""

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
                # The server may close an idle connection just as it is reused: try again with another one.
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
        except OSError as error:  # includes ssl.SSLError
            raise StreamError("connect", str(error)) from None
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
