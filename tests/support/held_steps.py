"""Engines whose steps wait for a test: requests last as long as it needs them, however fast the machine is."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from inflight.engine.inproc import InprocClient
from tests.support.waiting import SECONDS

HOUR = 3600.0


class HeldSteps:
    """Holds the steps of an engine in a thread of this process. It takes calls meanwhile: requests come and go."""

    def __init__(self, client: InprocClient, num_steps: int) -> None:
        self._client, self._core = client, client._core
        self._delay = self._core.schedule_delay
        self.allow(num_steps)
        self._core.schedule_delay = self._schedule_delay  # type: ignore[method-assign]

    def allow(self, num_steps: int) -> None:
        """Let the engine make this many more steps."""
        self._limit = self._core._num_steps + num_steps
        self._wake()

    def has_stopped(self) -> bool:
        """Return whether all steps that are allowed have been made."""
        return self._core._num_steps >= self._limit

    def release(self) -> None:
        """Let the engine make its steps again."""
        self._core.schedule_delay = self._delay  # type: ignore[method-assign]
        self._wake()

    def _schedule_delay(self) -> float:
        return HOUR if self.has_stopped() else self._delay()

    def _wake(self) -> None:
        self._client._calls.put(lambda: None)


@contextlib.contextmanager
def held_steps(client: InprocClient, num_steps: int = 0) -> Iterator[HeldSteps]:
    """Hold the steps of an engine after the next `num_steps`."""
    held = HeldSteps(client, num_steps)
    try:
        yield held
    finally:
        held.release()


def taking_turns(loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
    """Return an observer of steps that gives the event loop a turn after each of them."""

    def wait(_: object) -> None:
        had_turn = threading.Event()
        loop.call_soon_threadsafe(loop.call_soon, had_turn.set)
        had_turn.wait(SECONDS)

    return wait
