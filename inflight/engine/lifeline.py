"""A process that ends when the one that started it does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading


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
