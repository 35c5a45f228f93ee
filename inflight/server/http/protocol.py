"""The HTTP parser of uvicorn with bounds: size of headers, time to send them, requests and connections at a time."""

from __future__ import annotations

import asyncio
import re
import select
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from inflight.server.errors import ApiError
from inflight.server.http.framing import RequestFraming
from inflight.server.http.limits import ConnectionPlaces, ParsingTurns, WriteTimer

PROBES = (b"/health", b"/ready")  # paths that are answered even if all connections are taken
_UPGRADE = re.compile(rb"(?i)\nupgrade:")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_header_size: int
    read_timeout: float
    write_timeout: float
    max_connections: int


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Behind the request that is answered at most one more is taken from it."""

    limits: ConnectionLimits
    hangups: HangupWatch
    turns: ParsingTurns
    places: ConnectionPlaces

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._framing = RequestFraming()
        self._num_header_bytes = 0  # of the request whose headers are being read
        self._in_body = False
        self._answered: RequestResponseCycle | None = None  # the request that is, or was last
        self._held = b""  # what is not parsed yet: it came behind the request that waits, or waits for a turn
        self._awaits_turn = False
        self._refusal: ApiError | None = None  # of what came behind the request that is answered
        self._header_timer: TimerHandle | None = None
        self._rest_timer: TimerHandle | None = None  # for a body that goes on after its answer

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = self._flow = HeldFlow(transport)
        self._descriptor: int = transport.get_extra_info("socket").fileno()
        self._write_timer = WriteTimer(self.loop, transport, self.limits.write_timeout)
        self._start_header_timer()
        self.places.take(self, len(self.connections))

    def connection_lost(self, exc: Exception | None) -> None:
        self.places.leave(self)
        self._write_timer.stop()
        self.hangups.remove(self._descriptor)
        self._stop_timers()
        self.pipeline.clear()
        self._disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """It is closed now, but not before all that was written is read: which may be never."""
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
            self._held += data
        else:
            self._feed(data)

    def _feed(self, data: bytes) -> None:
        """Give the parser one request after the other, until one has to wait."""
        start = 0
        while start < len(data) and not self.transport.is_closing() and self._refusal is None:
            if self._flow.is_held:
                self._held = data[start:]
                return
            if self._framing.in_chunks:
                self._held = data[start:]
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
        """Parse some chunks; then what is behind them, or wait for the next turn."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        self._awaits_turn = False
        end = self._framing.advance(self._held, 0, self.limits.max_header_size)
        data, self._held = self._held[:end], self._held[end:]
        self._parse(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._held and self._framing.in_chunks:
            self._wait_for_turn()
        else:
            data, self._held = self._held, b""
            is_read = self.cycle.response_complete or len(self.cycle.body) <= HIGH_WATER_LIMIT
            self._flow.release(resume=is_read)
            self._feed(data)

    def _parse(self, data: bytes) -> None:
        """Bytes of one request, either of its headers or of its body."""
        if self._framing.num_extra_bytes > self.limits.max_header_size:
            self._refuse_headers("chunk extensions and trailers")
            return
        if not self._in_body:
            self._num_header_bytes += len(data)
            if self._header_timer is None:  # the first bytes of a further request
                self._start_header_timer()
            # The parser drops the body of whoever would like another protocol, as Java and curl may with HTTP/2.
            data = _UPGRADE.sub(b"\nx-upgrade:", data)
        super().data_received(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._in_body is self._framing.in_headers:
            self.send_400_response("")  # the two do not agree where it ends
        elif not self._in_body and self._num_header_bytes > self.limits.max_header_size:
            self._refuse_headers("headers")

    def _hold(self) -> None:
        self._flow.hold()
        self.hangups.add(self._descriptor, self._hung_up)

    def _hung_up(self) -> None:
        self._disconnect()
        self._close()

    def _go_on(self) -> None:
        """The request that waited is being answered: now there is room for another."""
        if not self.transport.is_closing():
            self.hangups.remove(self._descriptor)
            data, self._held = self._held, b""
            self._flow.release()
            self._feed(data)

    # ---- requests ----

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are no one's: the headers were looked at before they came
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timers()
        self._num_header_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_size:
            self._refuse_headers("headers")
        elif (num_hosts := sum(name == b"host" for name, _ in self.headers)) > 1:
            # A proxy in front and this server could each believe another one of them.
            message = f"the request has {num_hosts} Host headers: it must have one"
            self._refuse(ApiError(400, message, code="invalid_http"))
        elif self.places.is_reserved(self) and self.url.partition(b"?")[0] not in PROBES:
            self.refuse_connection()
        elif not self.transport.is_closing():
            super().on_headers_complete()
            self.cycle.keep_alive &= not self.places.is_reserved(self)
            self._in_body = True
            self._framing.headers_complete(self.headers)
            if self.pipeline:  # this one waits, and all behind it
                self._hold()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        if not self.flow.write_paused:  # what it writes comes on top; if too much is not read, it is paused
            self._write_timer.stop()
        is_old = cycle.scope["http_version"] < "1.1"
        super()._start_asgi_task(cycle, unchunked(app, cycle) if is_old else app)

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
            self.loop.call_soon(self._go_on)
        elif self._refusal is not None and self._is_idle():
            self._send_and_close(self._refusal)
        # Most clients send all of a body before they look at the answer; for a while it is read on.
        elif self._in_body and self._is_idle():
            self._rest_timer = self.loop.call_later(self.limits.read_timeout, self._too_slow)

    def _is_idle(self) -> bool:
        """Every request that has come is answered."""
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
        """As soon as all that was written is read, or too slowly."""
        self.transport.close()
        self._write_timer.start()

    def shutdown(self) -> None:
        """The server ends. A connection over TLS that is closed waits for its client to agree: one that has all it
        asked for is not waited for."""
        super().shutdown()
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self.loop.call_soon(self.transport.abort)

    # ---- refusals ----

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        self._refuse(ApiError(400, "this is not HTTP that the server understands", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Whoever would like another protocol gets this one: nothing to warn of."""

    def _refuse_headers(self, what: str) -> None:
        message = f"the {what} are larger than {self.limits.max_header_size} bytes, which is the limit"
        self._refuse(ApiError(431, message, code="headers_too_large"))

    def refuse_connection(self) -> None:
        self._refuse(ApiError(503, "there are too many connections", code="too_many_connections"))

    def _refuse(self, error: ApiError) -> None:
        """Answer what is being read with this, and close. Requests before it get their answers first."""
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._in_body:  # the app has this request already, and may have answered it
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
        """Whoever makes the answer should stop."""
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


def bounded_protocol(kind: type[P], limits: ConnectionLimits, loop: asyncio.AbstractEventLoop) -> type[P]:
    """A protocol class of one server; there is one instance per connection."""
    shared = {
        "limits": limits,
        "hangups": HangupWatch(loop),
        "turns": ParsingTurns(loop),
        "places": ConnectionPlaces(limits.max_connections),
    }
    return type("LimitedProtocol", (kind,), shared)


def unchunked(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """The application for this one request, which uvicorn answers in chunks unless told otherwise."""

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


class HeldFlow(FlowControl):
    """Reading can be held: then whoever waits for a body does not resume it."""

    is_held = False

    def hold(self) -> None:
        self.is_held = True
        self.pause_reading()

    def release(self, resume: bool = True) -> None:
        """Unless it is resumed here, whoever waits for the body does that."""
        self.is_held = False
        if resume:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()
