"""Every request to the engine that runs or ran until recently, under its id and its caller."""

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

MAX_TOLD = 16  # texts of one request whose records are kept: there may be thousands
Outcome = Literal["finished", "failed", "cancelled"]


@dataclass(eq=False)
class LoggedRequest:
    """One of them: what was asked, and what became of it."""

    request_id: str  # as the client knows it
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
    client_seconds: float = 0.0  # of waiting for the client to take in what was sent
    outcome: Outcome | None = None
    generation: Generation | None = None  # while it runs, if it is one
    formatter: ResponseFormatter | None = None  # of a generation, while it runs
    abort: Callable[[], Awaitable[int]] | None = None  # while it runs: ends it; how many blocks that freed
    queued: bool = False  # the engine has taken it
    num_answers: int = 0  # or texts, each of which the engine knows by an id of its own
    engine_ids: list[str] = field(default_factory=list)  # of answers: all; of texts: the first ones
    records: dict[str, RequestRecord] = field(default_factory=dict)  # of these, as far as they have ended
    num_pooled_tokens: int = 0  # of texts that are done

    @property
    def key(self) -> tuple[str, str]:
        return self.caller.name, self.request_id


class RequestLog:
    """Ids are a caller's own: the same id of two callers names two requests."""

    def __init__(self, max_finished: int) -> None:
        self._max_finished = max_finished
        self._running: dict[tuple[str, str], LoggedRequest] = {}
        self._finished: OrderedDict[tuple[str, str], LoggedRequest] = OrderedDict()
        self._by_engine_id: dict[str, LoggedRequest] = {}
        self.pace = QueuePace()

    def __len__(self) -> int:
        """How many run."""
        return len(self._running)

    def __iter__(self) -> Iterator[LoggedRequest]:
        return iter(list(self._running.values()))

    def open(self, logged: LoggedRequest) -> None:
        """Enter a request that was admitted."""
        assert logged.key not in self._running
        if not self._running:
            self.pace.began()
        self._running[logged.key] = logged

    def set_generation(self, logged: LoggedRequest, generation: Generation) -> None:
        logged.generation, logged.abort = generation, generation.abort
        logged.num_answers = len(generation.request_ids)
        self.set_engine_ids(logged, generation.request_ids)

    def set_engine_ids(self, logged: LoggedRequest, engine_ids: list[str]) -> None:
        """It is about to reach the engine, which knows it by these ids."""
        logged.engine_ids = engine_ids
        for engine_id in engine_ids:
            self._by_engine_id[engine_id] = logged

    def answer_ended(self, logged: LoggedRequest, record: RequestRecord) -> None:
        """The engine has ended one of its answers, or is done with one of its texts."""
        if record.request_id in self._by_engine_id:
            logged.records[record.request_id] = record
        self.pace.ended(1)

    def close(self, logged: LoggedRequest, outcome: Outcome) -> None:
        if logged.queued:  # what was refused has freed no place
            self.pace.ended(len(logged.engine_ids) - len(logged.records))
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
        """A caller's request, if it has not ended."""
        return self._running.get((caller.name, request_id))

    def find(self, caller: Caller, request_id: str) -> LoggedRequest:
        """A caller's request. Raises ApiError 404 for any other, there or not."""
        logged = self.find_running(caller, request_id) or self._finished.get((caller.name, request_id))
        if logged is None:
            raise ApiError(404, f"there is no request {request_id!r:.200}", code="request_not_found")
        return logged

    async def cancel(self, logged: LoggedRequest) -> int | None:
        """End one that runs. How many blocks that freed; None if it had ended before."""
        if logged.outcome is not None:
            return None
        logged.outcome = "cancelled"
        if logged.abort is None:  # it is still being prepared
            logged.cancel_scope.end("cancelled")
            return 0
        return await logged.abort()

    def ids_of(self, caller: Caller, engine_ids: tuple[str, ...]) -> list[str]:
        """The caller's own among these, as it knows them, each once."""
        all_logged = (self._by_engine_id.get(engine_id) for engine_id in engine_ids)
        names = [logged.request_id for logged in all_logged if logged is not None and logged.caller is caller]
        return list(dict.fromkeys(names))

    def retry_after(self) -> int:
        """Seconds until a place in the queue is likely free."""
        return self.pace.seconds_to_place(self._running.values())
