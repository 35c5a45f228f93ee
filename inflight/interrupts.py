"""Ctrl-C that waits for a good moment, since work cut short at any line would leave its books half written; or that
ends everything at once, where there is nothing to lose."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Within this, Ctrl-C takes effect where what it yields is called, and at the end. A second one, before that,
    takes effect at once: whoever presses it twice does not want to wait.

    Signals come to the main thread alone: in any other there is nothing to hold.
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

    def let_go() -> None:
        if held:
            handler(signal.SIGINT, held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_go
    finally:
        signal.signal(signal.SIGINT, handler)
    let_go()


@contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """Within this, Ctrl-C ends the process with one line: for imports, which take seconds and leave nothing to clean
    up, but would show where they were, in whatever state. One that is ignored stays so."""
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
