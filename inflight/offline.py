"""Requests of a caller who waits, and what is asked of the engines that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from inflight.engine import Command, EngineStats, StepObserver
from inflight.events import Delta
from inflight.frontend import Frontend
from inflight.request import Request


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """Requests, all of which are to be run to their end."""

    requests: Iterable[Request]
    num_requests: int
    take: Callable[[Delta], bool]  # gets every delta, and says whether its request is to end now
    doing: str  # in a word, for those who watch
    lazily: bool = False  # requests are made as steps need them


class OfflineEngine(Protocol):
    """What `LLM` stands on: one engine that it steps itself, or several behind a router."""

    @property
    def frontend(self) -> Frontend: ...

    @property
    def description(self) -> str:
        """Of what it runs on."""

    def compute(self, run: OfflineRun, show: bool) -> None:
        """All of it, with a bar on the terminal if it is to be shown. What breaks it off leaves nothing running."""

    def command(self, command: Command) -> None: ...

    def stats(self) -> EngineStats: ...

    def observe(self, observer: StepObserver) -> None: ...

    def unobserve(self, observer: StepObserver) -> None: ...

    def close(self) -> None: ...
