"""The child's side of a process that `child.py` starts: it reads its first line, and ends when its parent does."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import msgspec

MOVED_BYTES = (
    1 << 20
)  # read or written that count as progress: far more than heartbeats of a hanging process need


class StartLine(Protocol):
    """The first line of every child."""

    @property
    def parent_id(self) -> int: ...


StartT = TypeVar("StartT", bound=StartLine)


def run_child(
    kind: type[StartT], work: Callable[[StartT], int], while_waiting: Callable[[], None] = lambda: None
) -> NoReturn:
    """Read the first line, which is of this `kind`, do the `work`, and exit with the code that it returns.

    The parent decides when the child ends, so signals for the parent's terminal or service manager are ignored, and the
    child exits when the parent does. `while_waiting` is called before the line is read.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while_waiting()
    code = 0
    line = sys.stdin.buffer.readline()
    if line:  # otherwise the parent ended, or changed its mind, before it sent one
        start = msgspec.json.decode(line, type=kind)
        _exit_with(start.parent_id)
        code = work(start)
    logging.shutdown()
    os._exit(code)  # the kernel frees memory faster than the libraries do


def _exit_with(parent_id: int) -> None:
    """Exit when the parent does, even in the middle of a step."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:
        os._exit(1)
    pipe = os.dup(0)  # the parent holds the other end for as long as it lives
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="inflight-parent-watch", daemon=True).start()


@contextlib.contextmanager
def reporting_input(report: Callable[[], None], interval: float = 1.0) -> Iterator[None]:
    """Call `report` from a thread whenever this process has read or written another megabyte.

    A start that downloads weights, or reads a large tensor from a slow disk, makes progress before the next tensor is
    complete. CPU time is not progress: a process that waits for a device or another rank may spin.
    """
    is_over = threading.Event()

    def watch() -> None:
        seen = _bytes_moved()
        while not is_over.wait(interval):
            moved = _bytes_moved()
            if moved - seen >= MOVED_BYTES:
                seen = moved
                report()

    thread = threading.Thread(target=watch, name="inflight-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written, including mapped files; 0 if that is unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
