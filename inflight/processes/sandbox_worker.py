"""The worker's side of `sandbox.py`: answers requests in a process with resource limits.

The scripts that workers run import this module. It uses the standard library only, so that they start quickly.
Messages in both directions are 8 bytes of length, then JSON.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import struct
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("!Q")


def pack(content: object) -> bytes:
    """Return the frame of a message. Lone surrogates pass through."""
    body = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    return json.loads(body.decode("utf-8", "surrogatepass"))


def receive(connection: socket.socket) -> bytes | None:
    """Return the body of the next message, or None at the end of the stream."""
    header = _receive_exactly(connection, HEADER.size)
    return None if header is None else _receive_exactly(connection, HEADER.unpack(header)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def isolate() -> None:
    """Ignore the terminal's signals, which are meant for the parent, and write no core dumps."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def serve(answer: Callable[[dict[str, Any]], object], timer: int) -> None:
    """Answer requests until the parent is gone.

    A request's "seconds" limit its time by `timer`, one of signal.ITIMER_*, whose signal ends the process. The reply
    holds the answer and the seconds that it took.
    """
    connection = socket.socket(fileno=0)
    with contextlib.suppress(ConnectionError):
        connection.sendall(pack("ready"))
        while (body := receive(connection)) is not None:
            request = unpack(body)
            seconds: float = request.pop("seconds")
            signal.setitimer(timer, seconds)
            reply = answer(request)
            seconds_left, _ = signal.setitimer(timer, 0)
            connection.sendall(pack([reply, seconds - seconds_left]))
