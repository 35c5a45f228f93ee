"""The state of requests that are in the engine or ended recently."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from inflight.engine.client import RequestState
from inflight.engine.core import EngineCore
from inflight.events import RequestRecord
from inflight.request import Status

MAX_RECORDS = 4096
MAX_NAMED = 32  # request ids listed in one RequestState


def request_state(core: EngineCore, request_id: str) -> RequestState | None:
    """Return the state of a request in the engine, or None."""
    pool = core.scheduler.pool
    request = pool.requests.get(request_id)
    if request is None:
        return None
    request.record.num_output_tokens = request.num_output_tokens
    record = replace(request.record, breakdown=pool.attribution.breakdown(request, core.clock()))
    if request.status is not Status.WAITING:
        return RequestState(record, "running", request.num_computed, len(request.block_ids))
    others = pool.requests.values()
    ahead = sum(other.status is Status.WAITING and other.arrival < request.arrival for other in others)
    running = [other.request_id for other in pool.running]
    return RequestState(
        record,
        "waiting",
        num_ahead=ahead,
        waited_for=tuple(running[-MAX_NAMED:]),
        num_waited_for=len(running),
    )


class History:
    """The records of the requests that ended last."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        if len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> RequestState | None:
        record = self._records.get(request_id)
        return None if record is None else self.complete(RequestState(record, "finished"))

    def complete(self, state: RequestState) -> RequestState:
        """Return the state with the requests added that ended while this one waited."""
        mine = state.record
        until = next((time for time in (mine.admitted_at, mine.finished_at) if time is not None), None)
        ended = [
            other.request_id
            for other in self._records.values()
            if other is not mine
            and other.engine_id == mine.engine_id
            and other.admitted_at is not None
            and other.finished_at is not None
            and mine.arrived_at < other.finished_at
            and (until is None or other.finished_at <= until)
        ]
        return replace(
            state,
            waited_for=(*ended, *state.waited_for)[-MAX_NAMED:],
            num_waited_for=len(ended) + state.num_waited_for,
        )
