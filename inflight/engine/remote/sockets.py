"""The engine process's end of the wire: two sockets."""

from __future__ import annotations

import threading

import zmq

from inflight.engine.remote.remote_link import RemoteLink
from inflight.engine.remote.wire import Codec, ConnectionInfo, Message, ToEngine, Unreadable

LINGER = 2000  # milliseconds for the last words


class EngineSockets:
    """The two sockets. Any thread may send; one receives."""

    def __init__(self, connection: ConnectionInfo) -> None:
        secret = bytes.fromhex(connection.secret)
        self.incoming: Codec[ToEngine] = Codec(secret, ToEngine)
        self._outgoing: Codec[ToEngine] = Codec(secret, ToEngine)
        self._context = zmq.Context()
        self._up = self._context.socket(zmq.PUSH)
        self._down = self._context.socket(zmq.PULL)
        for socket in (self._up, self._down):
            # No limit here: the outbox has one. So sending neither blocks nor drops.
            socket.set_hwm(0)
            socket.linger = LINGER
        self._link = None if connection.server_key is None else RemoteLink(connection.server_key)
        for socket, endpoint in ((self._up, connection.up), (self._down, connection.down)):
            if self._link is None:
                socket.connect(endpoint)
            else:
                self._link.connect(socket, endpoint)
        self._lock = threading.Lock()

    @property
    def is_remote(self) -> bool:
        """Whether the front is on another machine, perhaps."""
        return self._link is not None

    def send(self, message: Message) -> None:
        with self._lock:
            self._up.send(self._outgoing.encode(message))

    def receive(self, wait: bool) -> ToEngine | Unreadable | None:
        """The next message; None if there is none yet, or if it was not one."""
        try:
            return self.incoming.decode_call(self._down.recv(0 if wait else zmq.NOBLOCK))
        except zmq.Again:
            return None

    def wait(self, seconds: float) -> bool:
        """Whether a message comes within that time."""
        milliseconds = int(1000 * seconds)
        return milliseconds > 0 and bool(self._down.poll(milliseconds))

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
            self._up.close()
            self._down.close()
        self._context.term()
