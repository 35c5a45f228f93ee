"""What a process owes to the one that started it: it ends when that does, and says that its start makes progress."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

MOVED_BYTES = 1 << 20  # that count as progress; far more than a process that hangs has for its signs of life


def die_with(parent_id: int) -> None:
    """End when the parent does, even in the middle of a step. The parent's thread that started this process must live
    as long as it is to live, and hold the other end of its standard input."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:
        os._exit(1)
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="inflight-lifeline", daemon=True).start()


def ignore_signals() -> None:
    """Whoever started this process ends it, in order."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def reporting_input(report: Callable[[], None], interval: float = 1.0) -> Iterator[None]:
    """Call `report` from a thread whenever this process has read or written another megabyte. A start that downloads
    weights or reads a large tensor from a slow disk makes progress, though no further tensor is complete. Time on a
    processor is not progress: whoever waits for a device or another rank may spin."""
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
    """Return the bytes that this process has read and written, files that it has mapped included; 0 if not known."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("rchar", "wchar", "read_bytes"))
