"""The running and recently finished requests, by caller and id."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from inflight.events import RequestRecord
from inflight.frontend import Generation
from inflight.scoring import Task
from inflight.server.access.admission import QueuePace
from inflight.server.access.keys import Caller
from inflight.server.cancel_scope import CancelScope
from inflight.server.errors import ApiError
from inflight.server.formatters import ResponseFormatter

MAX_RECORDS = 16  # texts of one request whose records are kept: there may be thousands
Outcome = Literal["finished", "failed", "cancelled"]


@dataclass(eq=False)
class LoggedRequest:
    """One request: what was requested, and its outcome."""

    request_id: str  # as the client sees it
    caller: Caller
    route: str
    stream: bool
    priority: int
    tenant: str
    cancel_scope: CancelScope
    task: Task = "generate"
    created: int = field(default_factory=lambda: int(time.time()))
    started_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    ended_at: float | None = None
    client_seconds: float = 0.0  # spent waiting for the client to read
    outcome: Outcome | None = None
    generation: Generation | None = None  # while it runs
    formatter: ResponseFormatter | None = None  # of a generation, while it runs
    abort: Callable[[], Awaitable[int]] | None = (
        None  # while it runs: ends it and returns the number of freed blocks
    )
    queued: bool = False  # accepted by the engine
    num_answers: int = 0  # or texts; each has its own id in the engine
    engine_ids: list[str] = field(default_factory=list)  # of all answers, or of the first texts
    records: dict[str, RequestRecord] = field(default_factory=dict)  # of those that have ended
    num_pooled_tokens: int = 0  # of finished texts

    @property
    def key(self) -> tuple[str, str]:
        return self.caller.name, self.request_id


class RequestLog:
    """Requests by caller and id: the same id of two callers names two requests."""

    def __init__(self, max_finished: int) -> None:
        self._max_finished = max_finished
        self._running: dict[tuple[str, str], LoggedRequest] = {}
        self._finished: OrderedDict[tuple[str, str], LoggedRequest] = OrderedDict()
        self._by_engine_id: dict[str, LoggedRequest] = {}
        self.pace = QueuePace()

    def __len__(self) -> int:
        """Return the number of running requests."""
        return len(self._running)

    def __iter__(self) -> Iterator[LoggedRequest]:
        return iter(list(self._running.values()))

    def open(self, logged: LoggedRequest) -> None:
        """Add a request that was admitted."""
        assert logged.key not in self._running
        if not self._running:
            self.pace.resume()
        self._running[logged.key] = logged

    def set_generation(self, logged: LoggedRequest, generation: Generation) -> None:
        logged.generation, logged.abort = generation, generation.abort
        logged.num_answers = len(generation.request_ids)
        self.set_engine_ids(logged, generation.request_ids)

    def set_engine_ids(self, logged: LoggedRequest, engine_ids: list[str]) -> None:
        """Note the engine's ids of a request that is about to be sent to it."""
        logged.engine_ids = engine_ids
        for engine_id in engine_ids:
            self._by_engine_id[engine_id] = logged

    def answer_ended(self, logged: LoggedRequest, record: RequestRecord) -> None:
        """Note that the engine has finished one of its answers or texts."""
        if record.request_id in self._by_engine_id:
            logged.records[record.request_id] = record
        self.pace.record_ends(1)

    def close(self, logged: LoggedRequest, outcome: Outcome) -> None:
        if logged.queued:  # a refused request occupied no slot
            self.pace.record_ends(len(logged.engine_ids) - len(logged.records))
        logged.outcome = logged.outcome or outcome
        logged.generation = logged.formatter = logged.abort = None
        logged.ended_at = time.perf_counter()
        del self._running[logged.key]
        old = self._finished.pop(logged.key, None)
        self._finished[logged.key] = logged
        if old is None and len(self._finished) > self._max_finished:
            _, old = self._finished.popitem(last=False)
        for engine_id in old.engine_ids if old is not None else ():
            self._by_engine_id.pop(engine_id, None)

    def find_running(self, caller: Caller, request_id: str) -> LoggedRequest | None:
        """Return a caller's request if it is running."""
        return self._running.get((caller.name, request_id))

    def find(self, caller: Caller, request_id: str) -> LoggedRequest:
        """Return a caller's request. Raises ApiError 404 for any other, whether it exists or not."""
        logged = self.find_running(caller, request_id) or self._finished.get((caller.name, request_id))
        if logged is None:
            raise ApiError(404, f"request {request_id!r:.200} does not exist", code="request_not_found")
        return logged

    async def cancel(self, logged: LoggedRequest) -> int | None:
        """Cancel a request. Return the number of freed blocks, or None if it had already ended."""
        if logged.outcome is not None:
            return None
        logged.outcome = "cancelled"
        if logged.abort is None:  # it is still being prepared
            logged.cancel_scope.end("cancelled")
            return 0
        return await logged.abort()

    def ids_of(self, caller: Caller, engine_ids: tuple[str, ...]) -> list[str]:
        """Return the ids, as the caller sees them, of its own requests among these."""
        all_logged = (self._by_engine_id.get(engine_id) for engine_id in engine_ids)
        names = [logged.request_id for logged in all_logged if logged is not None and logged.caller is caller]
        return list(dict.fromkeys(names))

    def retry_after(self) -> int:
        """Return the estimated seconds until a queue slot is free."""
        return self.pace.seconds_to_free_slot(self._running.values())
