"""Ctrl-C handling: deferred while the engine's state is inconsistent, or an immediate exit during imports."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C until the yielded function is called, or to the end of the block. A second Ctrl-C acts at once.

    Only the main thread receives signals; in other threads this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            held.clear()
            handler(number, frame)
        else:
            held.append(frame)

    def release() -> None:
        if held:
            handler(signal.SIGINT, held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield release
    finally:
        signal.signal(signal.SIGINT, handler)
    release()


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
