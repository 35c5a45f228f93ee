"""Ctrl-C that waits for a good moment: work cut short at any line would leave its books half written."""

from __future__ import annotations

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
