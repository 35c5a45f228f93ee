"""Shares the event loop between connections whose bytes take long to parse."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from time import perf_counter

SECONDS = 0.005  # of each round of the loop, for all of them together


class ParsingTurns:
    """A chunk of one byte takes as long to parse as one of a megabyte, and one read may bring 40,000 of them: everyone
    else would wait half a second. So connections parse a few chunks at a time, in turn, and in every round of the loop
    no more than fits into a moment, however many such connections there are."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_scheduled = False

    def wait(self, parse: Callable[[], None]) -> None:
        """Call `parse` when it is its turn."""
        self._waiting.append(parse)
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._is_scheduled = True
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        end = perf_counter() + SECONDS
        try:
            while self._waiting and perf_counter() < end:
                self._waiting.popleft()()
        finally:
            self._is_scheduled = False
            if self._waiting:
                self._schedule()
