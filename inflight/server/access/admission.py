"""Whether a request may begin: the limits of its key, and its id, which no other may have meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError

if TYPE_CHECKING:
    from inflight.server.observability.request_log import LoggedRequest


class AdmissionControl(Protocol):
    """`request_id` is None for what is over at once and so cannot be asked for."""

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        """Count one more request. Raises ApiError when that is one too many, or another has its id."""

    def leave(self, caller: Caller, request_id: str | None) -> None:
        """One that had entered has ended."""


class LocalAdmission:
    """Of a server that is one process, or of the process that counts for several."""

    def __init__(self) -> None:
        self._running: set[tuple[str, str]] = set()

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        caller.enter()
        if request_id is None:
            return
        if (caller.name, request_id) in self._running:
            caller.leave()
            message = f"request_id is {request_id!r}: a request of that id is running"
            raise ApiError(400, message, code="request_id_in_use", param="request_id")
        self._running.add((caller.name, request_id))

    def leave(self, caller: Caller, request_id: str | None) -> None:
        caller.leave()
        if request_id is not None:
            self._running.discard((caller.name, request_id))


@asynccontextmanager
async def counted(admission: AdmissionControl, caller: Caller) -> AsyncGenerator[None]:
    """For the time of one request. Raises ApiError when that is one too many."""
    await admission.enter(caller, None)
    try:
        yield
    finally:
        admission.leave(caller, None)


MAX_SECONDS = 600
_WEIGHT = 0.2  # of the latest time between two ends in their average


class QueuePace:
    """Places come free when answers end. So there are two things to go by: how far apart ends were lately, and how much
    the answers that run may still have to come. The sooner of the two is told."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._between_ends: float | None = None  # seconds, on average; unknown before the first
        self._last_end = clock()

    def began(self) -> None:
        """Something runs again after nothing did: that time was not spent on any answer."""
        self._last_end = self._clock()

    def ended(self, num_answers: int) -> None:
        """Answers that were in the engine are so no longer."""
        now = self._clock()
        for _ in range(num_answers):
            seconds = (now - self._last_end) / num_answers
            if self._between_ends is None:
                self._between_ends = seconds
            self._between_ends += _WEIGHT * (seconds - self._between_ends)
        if num_answers:
            self._last_end = now

    def seconds_to_place(self, running: Iterable[LoggedRequest]) -> int:
        now = self._clock()
        # When an end is overdue, those that run take longer than those that went before.
        waited = now - self._last_end
        by_pace = math.inf if self._between_ends is None else max(self._between_ends, waited)
        predicted = min([by_pace, *(_seconds_left(logged, now) for logged in running)])
        seconds = predicted if predicted < math.inf else waited
        return math.ceil(min(max(round(seconds, 1), 1), MAX_SECONDS))


def _seconds_left(logged: LoggedRequest, now: float) -> float:
    """Until the first answer of a request has all the tokens that it may have, at the rate of those it got."""
    if logged.generation is None or logged.first_token_at is None:
        return math.inf
    seconds, left = now - logged.first_token_at, math.inf
    for answer in logged.generation.answers:
        num_tokens = len(answer.output.token_ids)
        if num_tokens > 1 and not answer.output.finished:
            left = min(left, seconds / (num_tokens - 1) * (answer.request.max_tokens - num_tokens))
    return left
