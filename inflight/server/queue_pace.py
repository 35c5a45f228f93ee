"""When a place in the queue is likely free: what a client that finds none is told to wait."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight.server.request_log import LoggedRequest

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
