"""A process that ends before its last words are out: `python -m tests.engine.late FILE` in place of an engine's.

A second process keeps the connection and speaks for the first once FILE is there: its end was noticed. So late can
words be, too, that a busy machine has not passed on yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from inflight.engine.remote.wire import EngineSockets, Failed, ToEngine
from inflight.processes.channel import ConnectionInfo, RemoteError
from tests.support.waiting import wait_until

MARK = b"connected\n"
TEXT = "no memory for it"


def first() -> int:
    """Exit as soon as the second process has been started."""
    connection = sys.stdin.buffer.readline()
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.late", sys.argv[1], "second"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write(connection)
    other.stdin.flush()
    return 1 if other.stdout.readline() == MARK else 2


def second(noticed: Path) -> int:
    sockets = EngineSockets(msgspec.json.decode(sys.stdin.buffer.readline(), type=ConnectionInfo), ToEngine)
    while sockets.receive(wait=True) is None:
        pass
    sys.stdout.buffer.write(MARK)
    sys.stdout.buffer.flush()
    wait_until(noticed.exists, "the first process's end")
    sockets.send(Failed(RemoteError.from_exception(ValueError(TEXT))))
    sockets.close()
    return 0


if __name__ == "__main__":
    os._exit(second(Path(sys.argv[1])) if "second" in sys.argv else first())
