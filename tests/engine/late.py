"""A process that ends before its last words are out: `python -m tests.engine.late` in place of an engine's.

A second process keeps the connection and speaks for the first when that has ended. So late can words be, too, that a
busy machine has not passed on yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec

from inflight.engine.remote.wire import EngineSockets, Failed, ToEngine
from inflight.processes.channel import ConnectionInfo, RemoteError

MARK = b"connected\n"
TEXT = "no memory for it"


def first() -> int:
    """Exit as soon as the second process has been started."""
    connection = sys.stdin.buffer.readline()
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.late", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write(connection)
    other.stdin.flush()
    return 1 if other.stdout.readline() == MARK else 2


def second(first_id: int) -> int:
    sockets = EngineSockets(msgspec.json.decode(sys.stdin.buffer.readline(), type=ConnectionInfo), ToEngine)
    while sockets.receive(wait=True) is None:
        pass
    sys.stdout.buffer.write(MARK)
    sys.stdout.buffer.flush()
    while os.getppid() == first_id:
        time.sleep(0.01)
    time.sleep(0.3)  # long enough for the end to be noticed
    sockets.send(Failed(RemoteError.of(ValueError(TEXT))))
    sockets.close()
    return 0


if __name__ == "__main__":
    os._exit(second(int(sys.argv[1])) if len(sys.argv) > 1 else first())
