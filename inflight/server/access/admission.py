"""Admission of requests: the limits of an API key, unique request ids, and `Retry-After` estimates."""

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
    """Counts requests. `request_id` is None for short calls that are not listed under /v1/requests."""

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        """Count one more request. Raises ApiError if the key's limit is reached or the id is in use."""

    def leave(self, caller: Caller, request_id: str | None) -> None:
        """End a request that had entered."""


class LocalAdmission:
    """Counts in this process: that of a single-process server, or the one that counts for several API workers."""

    def __init__(self) -> None:
        self._running: set[tuple[str, str]] = set()

    async def enter(self, caller: Caller, request_id: str | None) -> None:
        caller.enter()
        if request_id is None:
            return
        if (caller.name, request_id) in self._running:
            caller.leave()
            message = f"request_id is {request_id!r}: a request with this id is already running"
            raise ApiError(400, message, code="request_id_in_use", param="request_id")
        self._running.add((caller.name, request_id))

    def leave(self, caller: Caller, request_id: str | None) -> None:
        caller.leave()
        if request_id is not None:
            self._running.discard((caller.name, request_id))


@asynccontextmanager
async def counted(admission: AdmissionControl, caller: Caller) -> AsyncGenerator[None]:
    """Count a request while the context is open. Raises ApiError if the key's limit is reached."""
    await admission.enter(caller, None)
    try:
        yield
    finally:
        admission.leave(caller, None)


MAX_SECONDS = 600
_WEIGHT = 0.2  # of the latest interval in the moving average


class QueuePace:
    """Estimates when a queue slot becomes free, which is when a running answer ends.

    There are two estimates: from the recent intervals between ends, and from the tokens that running answers may still
    generate. The smaller one is used.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._between_ends: float | None = None  # seconds, moving average; None before the first end
        self._last_end = clock()

    def resume(self) -> None:
        """Restart the clock after an idle time, which was not spent on any answer."""
        self._last_end = self._clock()

    def record_ends(self, num_answers: int) -> None:
        """Note that answers have left the engine."""
        now = self._clock()
        for _ in range(num_answers):
            seconds = (now - self._last_end) / num_answers
            if self._between_ends is None:
                self._between_ends = seconds
            self._between_ends += _WEIGHT * (seconds - self._between_ends)
        if num_answers:
            self._last_end = now

    def seconds_to_free_slot(self, running: Iterable[LoggedRequest]) -> int:
        now = self._clock()
        # If an end is overdue, the running answers take longer than earlier ones did.
        waited = now - self._last_end
        by_pace = math.inf if self._between_ends is None else max(self._between_ends, waited)
        predicted = min([by_pace, *(_seconds_left(logged, now) for logged in running)])
        seconds = predicted if predicted < math.inf else waited
        return math.ceil(min(max(round(seconds, 1), 1), MAX_SECONDS))


def _seconds_left(logged: LoggedRequest, now: float) -> float:
    """Return when the first answer of a request will reach its `max_tokens` at its current rate."""
    if logged.generation is None or logged.first_token_at is None:
        return math.inf
    seconds, left = now - logged.first_token_at, math.inf
    for answer in logged.generation.answers:
        num_tokens = len(answer.output.token_ids)
        if num_tokens > 1 and not answer.output.finished:
            left = min(left, seconds / (num_tokens - 1) * (answer.request.max_tokens - num_tokens))
    return left
