"""An engine's connection to a front on another machine: encrypted, made once, and the engine's end when it is cut.

A socket that connected again would not know what was lost meanwhile; a new engine, given the tokens that the reader
has, loses nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from inflight.errors import EngineDeadError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30_000  # milliseconds
_REFUSED = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _REFUSED


class RemoteLink:
    """Connects sockets to who has this key, and ends the process when one of them is cut off."""

    def __init__(self, server_key: str) -> None:
        self._server_key = server_key.encode()
        self._sockets: list[zmq.Socket[bytes]] = []

    def connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Returns once it is connected. Raises EngineDeadError if that cannot be."""
        socket.ipv6 = "[" in endpoint
        socket.curve_serverkey = self._server_key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.reconnect_ivl = -1
        socket.connect_timeout = CONNECT_TIMEOUT
        monitor = socket.get_monitor_socket(_WATCHED)
        socket.connect(endpoint)
        is_connected = monitor.poll(CONNECT_TIMEOUT) and _next_event(monitor) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not is_connected:
            socket.context.destroy(linger=0)
            raise EngineDeadError(f"the engine cannot reach the server at {endpoint} from its node")
        self._sockets.append(socket)
        threading.Thread(target=_watch, args=(monitor,), name="inflight-link", daemon=True).start()

    def close(self) -> None:
        """The end is wanted. Before the sockets are closed."""
        for socket in self._sockets:
            socket.disable_monitor()


def _next_event(monitor: Any) -> int:
    found: int = parse_monitor_message(monitor.recv_multipart())["event"]
    return found


def _watch(monitor: Any) -> None:
    if _next_event(monitor) != zmq.EVENT_MONITOR_STOPPED:
        logger.error("the server is gone, or the connection to it was cut: the engine ends")
        logging.shutdown()
        os._exit(1)
    monitor.close()
