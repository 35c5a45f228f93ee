"""The HTTP parser of uvicorn with bounds: size of headers, time to send them, number of connections."""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from inflight.server.errors import ApiError


def bounded_protocol(
    max_header_size: int, read_timeout: float, max_connections: int
) -> type[HttpToolsProtocol]:
    """A protocol class with these bounds; uvicorn makes one instance a connection."""

    class BoundedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._num_header_bytes = 0  # of the request whose headers are being read
            self._in_headers = True
            self._in_body = False
            self._header_timer: TimerHandle | None = None
            self._rest_timer: TimerHandle | None = None  # for a body that goes on after its answer

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self._refuse(ApiError(503, "there are too many connections", code="too_many_connections"))
            else:
                self._header_timer = self.loop.call_later(read_timeout, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timers()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._in_headers:
                self._num_header_bytes += len(data)
                if self._header_timer is None:  # the first bytes of a further request
                    self._header_timer = self.loop.call_later(read_timeout, self._too_slow)
            super().data_received(data)
            # Bytes of a body may be in there too, but then the headers are complete.
            if self._in_headers and self._num_header_bytes > max_header_size:
                self._refuse_headers()

        def on_message_begin(self) -> None:
            self._in_headers = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._stop_timers()
            self._in_headers = False
            self._in_body = True
            self._num_header_bytes = 0
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > max_header_size:
                self._refuse_headers()
            elif not self.transport.is_closing():
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.transport.is_closing():
                super().on_message_complete()
            self._stop_timers()
            self._in_headers = True
            self._in_body = False

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # Most clients send all of a body before they look at the answer; for a while it is read on.
            if self._in_body and not self.pipeline and not self.transport.is_closing():
                self._rest_timer = self.loop.call_later(read_timeout, self._too_slow)

        def send_400_response(self, msg: str) -> None:  # noqa: ARG002
            self._refuse(ApiError(400, "this is not HTTP that the server understands", code="invalid_http"))

        def _unsupported_upgrade_warning(self) -> None:
            """Whoever would like another protocol gets this one: nothing to warn of."""

        def _stop_timers(self) -> None:
            for timer in (self._header_timer, self._rest_timer):
                if timer is not None:
                    timer.cancel()
            self._header_timer = self._rest_timer = None

        def _too_slow(self) -> None:
            if not self.transport.is_closing():
                self.transport.close()

        def _refuse_headers(self) -> None:
            message = f"the headers are larger than {max_header_size} bytes, which is the limit"
            self._refuse(ApiError(431, message, code="headers_too_large"))

        def _refuse(self, error: ApiError) -> None:
            if self.transport.is_closing():
                return
            body = error.body()
            self.transport.write(
                STATUS_LINE[error.status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
            self.transport.close()

    return BoundedProtocol
