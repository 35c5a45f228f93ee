"""uvicorn's HTTP protocol with limits: header size, read and write time, pipelined requests and connections.

uvicorn offers none of these limits with httptools, so `BoundedProtocol` extends its protocol class and uses attributes
outside its public API; tests/server/http/test_uvicorn_internals.py lists them all. A protocol of our own on httptools
would need the same limits and the same `RequestFraming` (httptools cannot be paused between two requests), plus
uvicorn's ASGI request cycle, keep-alive and shutdown: more code, not less.
"""

from __future__ import annotations

import asyncio
import re
from asyncio import TimerHandle
from typing import Any, TypeVar

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from inflight.server.errors import ApiError
from inflight.server.http.limits import (
    ConnectionLimits,
    ConnectionSlots,
    HangupWatch,
    ParsingTurns,
    RequestFraming,
    WriteTimer,
)

PROBES = (b"/health", b"/ready")  # paths that are answered even if all connection slots are taken
_UPGRADE = re.compile(rb"(?i)\nupgrade:")


class BoundedProtocol(HttpToolsProtocol):
    """One connection. At most one more request is read while one is being answered."""

    limits: ConnectionLimits
    hangups: HangupWatch
    turns: ParsingTurns
    slots: ConnectionSlots

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._framing = RequestFraming()
        self._num_header_bytes = 0  # received so far of the headers being read
        self._in_body = False
        self._answered: RequestResponseCycle | None = None  # the current or last one
        self._unparsed = b""  # received but not parsed: it follows a waiting request, or waits for its turn
        self._awaits_turn = False
        self._refusal: ApiError | None = None  # to be sent after the current answer
        self._header_timer: TimerHandle | None = None
        self._rest_timer: TimerHandle | None = None  # for a body that continues after its answer

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = HeldFlow(transport)
        self._descriptor: int = transport.get_extra_info("socket").fileno()
        self._write_timer = WriteTimer(self.loop, transport, self.limits.write_timeout)
        self._start_header_timer()
        self.slots.take(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self.slots.leave(self)
        self._write_timer.stop()
        self.hangups.remove(self._descriptor)
        self._stop_timers()
        self.pipeline.clear()
        self._disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Stop answering. The transport closes once everything written is read, which the timer bounds."""
        self._disconnect()
        self._write_timer.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer.start()

    def resume_writing(self) -> None:
        self._write_timer.stop()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._flow.is_held:
            self._unparsed += data
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        """Parse one request after the other until one has to wait."""
        start = 0
        while start < len(data) and not self.transport.is_closing() and self._refusal is None:
            if self._flow.is_held:
                self._unparsed = data[start:]
                return
            if self._framing.in_chunks:
                self._unparsed = data[start:]
                self._wait_for_turn()
                return
            end = self._framing.advance(data, start, self.limits.max_header_size)
            self._parse(data[start:end])
            start = end

    def _wait_for_turn(self) -> None:
        self._awaits_turn = True
        self._flow.hold()
        self.turns.wait(self._take_turn)

    def _take_turn(self) -> None:
        """Parse some chunks, then either what follows them or wait for the next turn."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._awaits_turn = False
        end = self._framing.advance(self._unparsed, 0, self.limits.max_header_size)
        data, self._unparsed = self._unparsed[:end], self._unparsed[end:]
        self._parse(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._unparsed and self._framing.in_chunks:
            self._wait_for_turn()
        else:
            data, self._unparsed = self._unparsed, b""
            is_read = self.cycle.response_complete or len(self.cycle.body) <= HIGH_WATER_LIMIT
            self._flow.release(resume=is_read)
            self._feed(data)

    def _parse(self, data: bytes) -> None:
        """Parse bytes of one request: part of its headers or part of its body."""
        if self._framing.num_extra_bytes > self.limits.max_header_size:
            self._refuse_headers("chunk extensions and trailers")
            return
        if not self._in_body:
            self._num_header_bytes += len(data)
            if self._header_timer is None:  # the first bytes of a further request
                self._start_header_timer()
            # The parser would drop the body of an upgrade request, which Java and curl may send for HTTP/2.
            data = _UPGRADE.sub(b"\nx-upgrade:", data)
        super().data_received(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._in_body is self._framing.in_headers:
            self.send_400_response("")  # the framing and the parser disagree
        elif not self._in_body and self._num_header_bytes > self.limits.max_header_size:
            self._refuse_headers("headers")

    def _hold(self) -> None:
        self._flow.hold()
        self.hangups.add(self._descriptor, self._client_left)

    def _client_left(self) -> None:
        self._disconnect()
        self._close()

    def _continue_reading(self) -> None:
        """Read on: the waiting request is being answered now, so another may follow."""
        if not self.transport.is_closing():
            self.hangups.remove(self._descriptor)
            data, self._unparsed = self._unparsed, b""
            self._flow.release()
            self._feed(data)

    # ---- requests ----

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are ignored: the headers are already in use
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timers()
        self._num_header_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_size:
            self._refuse_headers("headers")
        elif (num_hosts := sum(name == b"host" for name, _ in self.headers)) > 1:
            # A proxy in front and this server might each trust a different one.
            message = f"the request has {num_hosts} Host headers: it must have exactly one"
            self._refuse(ApiError(400, message, code="invalid_http"))
        elif self.slots.is_reserved(self) and self.url.partition(b"?")[0] not in PROBES:
            self.refuse_connection()
        elif not self.transport.is_closing():
            super().on_headers_complete()
            self.cycle.keep_alive &= not self.slots.is_reserved(self)
            self._in_body = True
            self._framing.headers_complete(self.headers)
            if self.pipeline:  # this request waits, and everything after it
                self._hold()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        if not self.flow.write_paused:  # if too much is unread, writing is paused, which starts it again
            self._write_timer.stop()
        is_http_1_0 = cycle.scope["http_version"] < "1.1"
        super()._start_asgi_task(cycle, unchunked(app, cycle) if is_http_1_0 else app)

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing() and self._in_body:
            super().on_message_complete()
        self._stop_timers()
        self._in_body = False

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle():
            self._write_timer.start()
        if self.transport.is_closing():
            return
        if self._flow.is_held and not self._awaits_turn and self._refusal is None:
            self.loop.call_soon(self._continue_reading)
        elif self._refusal is not None and self._is_idle():
            self._send_and_close(self._refusal)
        # Most clients send the whole body before they read the answer, so it is read for a while longer.
        elif self._in_body and self._is_idle():
            self._rest_timer = self.loop.call_later(self.limits.read_timeout, self._too_slow)

    def _is_idle(self) -> bool:
        """Return whether every request received so far is answered."""
        return not self.pipeline and (self._answered is None or self._answered.response_complete)

    # ---- time ----

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.read_timeout, self._too_slow)

    def _stop_timers(self) -> None:
        for timer in (self._header_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        self._header_timer = self._rest_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            self._close()

    def _close(self) -> None:
        """Close once everything written is read, or abort if that takes too long."""
        self.transport.close()
        self._write_timer.start()

    def shutdown(self) -> None:
        """Close for the server's shutdown. A TLS connection would wait for the client's close_notify: it is aborted
        instead if everything has been sent."""
        super().shutdown()
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self.loop.call_soon(self.transport.abort)

    # ---- refusals ----

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the request is answered over HTTP/1.1."""

    def _refuse_headers(self, what: str) -> None:
        message = f"the {what} are larger than {self.limits.max_header_size} bytes"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def refuse_connection(self) -> None:
        self._refuse(ApiError(503, "too many connections: try again later", code="too_many_connections"))

    def _refuse(self, error: ApiError) -> None:
        """Answer the request being read with this error, and close. Earlier requests are answered first."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._in_body:  # the app already has this request and may have answered it
            if self._answered is None or self._answered.response_started:
                self._close()
            else:
                self._send_and_close(error)
            self._disconnect()
        elif self._is_idle():
            self._send_and_close(error)
        else:
            self._refusal = error
            self._hold()

    def _disconnect(self) -> None:
        """Tell the app that its client is gone."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _send_and_close(self, error: ApiError) -> None:
        body = error.body()
        self.transport.write(
            STATUS_LINE[error.status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        self._close()


P = TypeVar("P", bound=BoundedProtocol)


def bounded_protocol(protocol: type[P], limits: ConnectionLimits, loop: asyncio.AbstractEventLoop) -> type[P]:
    """Return a protocol class for one server, whose connections share their limits."""
    shared = {
        "limits": limits,
        "hangups": HangupWatch(loop),
        "turns": ParsingTurns(loop),
        "slots": ConnectionSlots(limits.max_connections),
    }
    return type("LimitedProtocol", (protocol,), shared)


def unchunked(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """Wrap the app for an HTTP/1.0 request, to which uvicorn would send a chunked response."""

    async def run(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = False

        async def send_unchunked(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return run


class HeldFlow(FlowControl):
    """Flow control whose reading can be held, so that an app waiting for a body does not resume it."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def release(self, resume: bool = True) -> None:
        """End the hold. Without `resume`, reading resumes when the app has consumed the body."""
        self.is_held = False
        if resume:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
