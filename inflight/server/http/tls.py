"""TLS connections that count against the limits, and are timed, from before their handshake."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from inflight.server.http.protocol import BoundedProtocol

logger = logging.getLogger(__name__)

MAX_ACCEPTED = 64  # connections per event, so that others get their turn
ACCEPT_RETRY_SECONDS = 1.0  # after an error


class TlsProtocol(BoundedProtocol):
    """One TLS connection. It counts from `begin` on; `connection_made` follows the handshake."""

    _is_made = False

    def begin(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._handshake = self.loop.create_task(self._do_handshake(connection, context))
        self._handshake.add_done_callback(lambda _: self._end_handshake(connection))
        self.connections.add(self)
        self.slots.take(self, len(self.connections))

    async def _do_handshake(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        seconds = self.limits.read_timeout
        try:
            await self.loop.connect_accepted_socket(
                lambda: self,
                connection,
                ssl=context,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
        except OSError as error:  # includes ssl.SSLError
            logger.debug("a TLS handshake failed: %r", error)

    def _end_handshake(self, connection: socket.socket) -> None:
        """Clean up after a handshake that failed, was cancelled or never began."""
        if not self._is_made:
            connection.close()
            self.connections.discard(self)
            self.slots.leave(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._is_made = True
        super().connection_made(transport)

    def refuse_connection(self) -> None:
        if self._is_made:
            super().refuse_connection()
        else:
            self._handshake.cancel()

    def shutdown(self) -> None:
        if self._is_made:
            super().shutdown()
        else:
            self._handshake.cancel()


class TlsListener:
    """Accepts connections from a socket, in place of an asyncio server, which hides connections until their handshake
    is done."""

    def __init__(
        self, listener: socket.socket, context: ssl.SSLContext, make_protocol: Callable[[], TlsProtocol]
    ) -> None:
        self._listener, self._context, self._make_protocol = listener, context, make_protocol
        self._descriptor = listener.fileno()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._descriptor, self._accept)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # perhaps out of file descriptors
                logger.error("cannot accept connections: %s", error.strerror)
                self._loop.remove_reader(self._descriptor)
                self._loop.call_later(ACCEPT_RETRY_SECONDS, self._listen)
                return
            connection.setblocking(False)
            self._make_protocol().begin(connection, self._context)

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)

    async def wait_closed(self) -> None:
        """Return at once: nothing is pending after `close`."""
