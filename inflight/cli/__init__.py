"""The `inflight` command. This module imports next to nothing, so that Ctrl-C works from the start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Let Ctrl-C exit the process with one line instead of a traceback.

    For imports, which take seconds and leave nothing to clean up. If Ctrl-C is ignored, it stays ignored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os.write(2, b"inflight: interrupted\n")
    os._exit(130)
