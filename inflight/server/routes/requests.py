"""/v1/requests: report what happened to a request and why it took so long, or cancel it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Reversible, Sequence
from typing import TypeVar

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from inflight.engine.client import RequestState
from inflight.errors import EngineError, shown
from inflight.events import RequestRecord
from inflight.server.access.keys import Caller, counted
from inflight.server.errors import invalid
from inflight.server.observability.request_log import LoggedRequest, RequestKey, Selection, latest_first
from inflight.server.openai.responses.store import MAX_PAGE_BYTES
from inflight.server.openapi import documented, query_parameters, respond
from inflight.server.routes.schemas import (
    AnswerReport,
    Cancelled,
    NeighbourReport,
    RequestList,
    RequestReport,
    RequestSummary,
    Status,
    Waited,
)
from inflight.server.routes.timeline import seen_by
from inflight.server.state import ServerState, caller_of, state_of
from inflight.timeline.chunks import TimelineQuery, decode_chunk
from inflight.timeline.neighbours import neighbours_of

K = TypeVar("K")
T = TypeVar("T")

router = APIRouter()

MAX_LISTED = 1000
DEFAULT_ANSWERS, MAX_ANSWERS = 16, 128  # of one report
SLICE = 16  # requests or answers that are described before other tasks of the event loop get their turn
MAX_PAGES = 16  # of the recording that are read to find a request's neighbours


# The statuses of reports that each `status` selects.
_SELECTED: dict[Selection, tuple[Status, ...]] = {
    "waiting": ("queued",),
    "running": ("running",),
    "finished": ("finished", "failed", "cancelled"),
}
_LIST = query_parameters(
    ("status", "string", "Only requests that are waiting, running or finished."),
    ("limit", "integer", f"The most requests to return: at most {MAX_LISTED}; 100 by default."),
    ("after", "string", "The id of a request: return requests that were sent before it."),
)
_ANSWERS = query_parameters(
    ("limit", "integer", f"The most answers to return: at most {MAX_ANSWERS}; {DEFAULT_ANSWERS} by default."),
    ("after", "integer", "The index of an answer: return the answers after it."),
)


@router.get("/v1/requests", **documented(None, RequestList, 400, 429, extra=_LIST))
async def list_requests(request: Request) -> Response:
    """List your waiting, running and recently finished requests, the latest first. The admin key lists all."""
    state, caller, query = state_of(request), caller_of(request), request.query_params
    status, after = query.get("status"), query.get("after")
    if status not in (None, *_SELECTED):
        raise invalid("status", f"status is {shown(status)}: it must be waiting, running or finished")
    limit = _integer(request, "limit", 1, MAX_LISTED, 100)
    source = state.requests_of_workers or OwnRequests(state)
    async with counted(state.admission, caller), state.report_turns.lock_of(caller):
        keys = latest_first(source.keys(), caller)
        if after is not None:
            keys = keys[_index(keys, after) + 1 :]
        page, has_more = await _page(keys, limit, lambda part: source.summaries(part, status), len)
    body = b'{"object":"list","data":[%b],"has_more":%b}' % (b",".join(page), to_json(has_more))
    return Response(body, media_type="application/json")


@router.get("/v1/requests/{request_id}", **documented(None, RequestReport, 400, 404, 429, extra=_ANSWERS))
async def request_report(request: Request) -> Response:
    """Report what happened to a request of yours and why it took so long. The admin key sees everyone's."""
    state, caller = state_of(request), caller_of(request)
    limit = _integer(request, "limit", 1, MAX_ANSWERS, DEFAULT_ANSWERS)
    async with counted(state.admission, caller), state.report_turns.lock_of(caller):
        logged = state.request_log.find(caller, request.path_params["request_id"])
        num_known = len(logged.engine_ids)
        after = _integer(request, "after", 0, max(0, num_known - 1), -1)
        indices = range(after + 1, num_known)
        answers, has_more = await _page(
            indices, limit, lambda part: _answers(state, logged, part), lambda answer: len(to_json(answer))
        )
        slowest = await _slowest(state, logged)
        if slowest is not None and slowest.status == "finished":  # what it waited for is not in the log
            slowest = await _describe(state, slowest.record.request_id) or slowest
        report = RequestReport(
            **dict(await _summary(state, logged, slowest)),
            answers=answers,
            has_more=has_more,
            waited_for=_waited_for(state, logged, slowest, caller),
        )
        if "after" not in request.query_params:
            report.neighbours = await _neighbours(state, logged, slowest, caller)
    return respond(report)


@router.delete("/v1/requests/{request_id}", **documented(None, Cancelled, 404, 503))
async def cancel_request(request: Request) -> Response:
    """Cancel a request of yours; its answers end with the finish reason "abort"."""
    state = state_of(request)
    logged = state.request_log.find(caller_of(request), request.path_params["request_id"])
    freed = await state.request_log.cancel(logged)
    return respond(Cancelled(id=logged.request_id, cancelled=freed is not None, freed_blocks=freed or 0))


def _integer(request: Request, name: str, lowest: int, highest: int, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not lowest <= int(text[:9]) <= highest:
        raise invalid(name, f"{name} is {shown(text)}: it must be from {lowest} to {highest}")
    return int(text)


def _index(keys: Sequence[RequestKey], request_id: str) -> int:
    """Return the position of a request. Raises ApiError 400 if it is not there, whether it exists or not."""
    for index, key in enumerate(keys):
        if key[1] == request_id:
            return index
    raise invalid("after", f"after is {shown(request_id, 200)}: there is no such request in this list")


# ---- pages ----


async def _page(
    keys: Sequence[K],
    limit: int,
    read: Callable[[Sequence[K]], Awaitable[Sequence[T | None]]],
    size: Callable[[T], int],
) -> tuple[list[T], bool]:
    """Return what `read` finds for the first keys, and whether there is more than fits into the limits.

    A page ends before the item that would make it too large, but has at least one. Other tasks go on after each slice.
    """
    page: list[T] = []
    num_bytes = 0
    for start in range(0, len(keys), SLICE):
        for item in await read(keys[start : start + SLICE]):
            if item is None:
                continue
            num_bytes += size(item)
            if page and (len(page) == limit or num_bytes > MAX_PAGE_BYTES):
                return page, True
            page.append(item)
        await asyncio.sleep(0)
    return page, False


class OwnRequests:
    """The requests of this process. Implements `RequestSource`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def keys(self) -> Reversible[RequestKey]:
        return self._state.request_log.keys()

    async def summaries(
        self, keys: Sequence[RequestKey], selection: Selection | None
    ) -> Sequence[bytes | None]:
        return await asyncio.gather(*(self._summary(key, selection) for key in keys))

    async def _summary(self, key: RequestKey, selection: Selection | None) -> bytes | None:
        logged = self._state.request_log.get(key)
        if logged is None:
            return None
        if selection is not None and (selection == "finished") != (logged.outcome is not None):
            return None
        slowest = await _slowest(self._state, logged)
        if selection is not None and _status(logged, slowest) not in _SELECTED[selection]:
            return None
        return to_json(await _summary(self._state, logged, slowest))


# ---- one request ----


async def _slowest(state: ServerState, logged: LoggedRequest) -> RequestState | None:
    """Return the state of the answer that takes longest: of those that ended, the log knows it, and of the others the
    first one has been there longest."""
    first = logged.first_without_record
    states = [None if first is None else await _describe(state, first)]
    if logged.slowest is not None:
        states.append(RequestState(logged.slowest, "finished"))
    known = [item for item in states if item is not None]
    return max(known, key=lambda item: (_is_lost(item), item.record.breakdown.total), default=None)


def _is_lost(answer: RequestState) -> bool:
    """Return whether an answer's engine died, and with it what was known about the answer."""
    return answer.record.finish_reason == "error" and answer.record.admitted_at is None


async def _summary(state: ServerState, logged: LoggedRequest, slowest: RequestState | None) -> RequestSummary:
    ended_at, first = logged.ended_at or time.perf_counter(), logged.first_token_at
    return RequestSummary(
        id=logged.request_id,
        route=logged.route,
        status=_status(logged, slowest),
        created=logged.created,
        task=logged.task,
        num_answers=logged.num_answers,
        stream=logged.stream,
        priority=logged.priority,
        tenant=logged.tenant,
        total_seconds=ended_at - logged.started_at,
        first_token_seconds=None if first is None else first - logged.started_at,
        client_seconds=logged.client_seconds,
        num_prompt_tokens=logged.num_prompt_tokens,
        num_cached_tokens=logged.num_cached_tokens,
        num_output_tokens=logged.num_output_tokens,
        num_preemptions=logged.num_preemptions,
        waiting_reason=None if slowest is None else slowest.waiting_reason,
        num_ahead=0 if slowest is None else slowest.num_ahead,
        why=await _lost(state, logged, slowest) or _why(slowest, logged.client_seconds),
    )


async def _lost(state: ServerState, logged: LoggedRequest, slowest: RequestState | None) -> str | None:
    """Say why the time spent is unknown, if the engine that knew is gone or does not respond."""
    when = "before its first token" if logged.first_token_at is None else "after its first token"
    if slowest is not None and _is_lost(slowest):
        return f"The engine died {when}, so the timing of this request is unknown."
    is_described = slowest is not None and slowest.status != "finished"
    if logged.outcome is not None or is_described or logged.first_without_record is None:
        return None
    health = await state.model.client.health()
    if health.healthy:
        return None
    since = health.seconds_since_step
    return f"It is in the engine, which is {health.state}: its last step was {since:.0f} seconds ago, {when}."


def _waited_for(
    state: ServerState, logged: LoggedRequest, slowest: RequestState | None, caller: Caller
) -> Waited:
    """Return what the slowest answer waited for. A caller sees the ids of its own requests only."""
    if slowest is None:
        return Waited(num_requests=0, ids=[])
    engine_ids = set(logged.engine_ids)
    others = tuple(name for name in slowest.waited_for if name not in engine_ids)
    return Waited(num_requests=slowest.num_waited_for, ids=state.request_log.ids_of(caller, others))


async def _answers(
    state: ServerState, logged: LoggedRequest, indices: Sequence[int]
) -> Sequence[AnswerReport | None]:
    records = logged.records

    async def report(index: int) -> AnswerReport | None:
        engine_id = logged.engine_ids[index]
        record = records.get(engine_id)
        ended = None if record is None else RequestState(record, "finished")
        described = ended or await _describe(state, engine_id)
        return None if described is None else _answer(index, described)

    return await asyncio.gather(*map(report, indices))


async def _describe(state: ServerState, engine_id: str) -> RequestState | None:
    try:
        return await state.model.client.describe(engine_id)
    except EngineError:  # the engine is gone
        return None


async def _neighbours(
    state: ServerState, logged: LoggedRequest, slowest: RequestState | None, caller: Caller
) -> list[NeighbourReport]:
    """Return the requests that cost the slowest answer most, as far as the recording reaches back."""
    if slowest is None or slowest.record.number < 0:
        return []
    number, replica = slowest.record.number, slowest.record.engine_id or None
    since = time.monotonic() - (time.perf_counter() - logged.started_at) - 1.0
    query = TimelineQuery(since, None, replica)
    until = math.inf if logged.ended_at is None else since + logged.ended_at - logged.started_at + 2.0
    encoded: list[bytes] = []

    def begins_too_late() -> bool:
        times = decode_chunk(encoded[-1]).times
        return bool(times) and times[0] > until

    for _ in range(MAX_PAGES):
        try:
            page = await state.model.client.read_timeline(query)
        except EngineError:
            return []
        encoded += [data for _, data in page.chunks]
        if not page.positions or (encoded and await state.in_service_thread(begins_too_late)):
            break
        query = TimelineQuery(since, page.positions, replica)

    neighbours = await state.in_service_thread(lambda: neighbours_of(number, map(decode_chunk, encoded)))
    sees = seen_by(state, caller)
    reports = []
    for info, seconds, why in neighbours:
        origin = info.origin
        is_own = origin is not None and (origin.key, origin.request_id) == logged.key
        if is_own or seconds <= 0:
            continue
        is_seen = sees(info)
        name = origin.request_id if origin is not None and is_seen else None
        reports.append(
            NeighbourReport(number=info.number if is_seen else None, id=name, seconds=seconds, why=why)
        )
    return reports


def _status(logged: LoggedRequest, slowest: RequestState | None) -> Status:
    if logged.outcome is not None:
        return logged.outcome
    is_running = bool(logged.records) or (slowest is not None and slowest.status != "waiting")
    return "running" if is_running else "queued"


def _answer(index: int, state: RequestState) -> AnswerReport:
    record = state.record
    has_outputs = record.first_token_at is not None  # otherwise it ends with its prompt, or has not started
    return AnswerReport(
        index=index,
        status="queued" if state.status == "waiting" else state.status,
        finish_reason=record.finish_reason,
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_output_tokens=record.num_output_tokens,
        num_preemptions=record.num_preemptions,
        num_drafted_tokens=record.num_drafted_tokens,
        num_accepted_tokens=record.num_accepted_tokens,
        replica=record.engine_id,
        number=None if record.number < 0 else record.number,
        waiting_reason=state.waiting_reason,
        num_ahead=state.num_ahead,
        num_failovers=record.num_failovers,
        queued_seconds=_between(record, "arrived_at", "admitted_at"),
        prefill_seconds=_between(record, "admitted_at", "first_token_at" if has_outputs else "finished_at"),
        decode_seconds=_between(record, "first_token_at", "last_token_at"),
        breakdown=record.breakdown,
    )


def _between(record: RequestRecord, start_field: str, end_field: str) -> float | None:
    start, end = getattr(record, start_field), getattr(record, end_field)
    return None if start is None or end is None else end - start


_QUEUE_CAUSES = {
    "step": "for the next step",
    "memory": "for KV memory",
    "slots": "for a batch slot",
    "budget": "for the token budget of a step",
    "policy": "because of the policy",
}
_MIN_SECONDS = 0.001  # worth mentioning


def _why(slowest: RequestState | None, client_seconds: float) -> str:
    """Return a sentence about the answer that took longest."""
    if slowest is None:
        return "It has not reached the engine yet."
    record, breakdown = slowest.record, slowest.record.breakdown
    if record.admitted_at is None:
        return f"It is waiting in the queue; {slowest.num_waited_for} requests are ahead of it."
    parts = [_queue(slowest, record.admitted_at - record.arrived_at)]
    if record.first_token_at is not None or record.finished_at is not None:
        fresh = record.num_prompt_tokens - record.num_cached_tokens
        parts.append(
            f"{breakdown.prefill:.3f} s for the prompt "
            f"({fresh} tokens computed, {record.num_cached_tokens} cached)"
        )
    if record.last_token_at is not None:
        parts.append(f"{breakdown.decode:.3f} s for {record.num_output_tokens} tokens{_drafts(record)}")
    if breakdown.prefill_of_others >= _MIN_SECONDS:
        parts.append(f"{breakdown.prefill_of_others:.3f} s for other requests' prompts in the same steps")
    if record.num_preemptions:
        parts.append(f"{breakdown.preempted:.3f} s preempted ({record.num_preemptions} times)")
    if record.num_failovers:
        engines = "an engine" if record.num_failovers == 1 else f"{record.num_failovers} engines"
        parts.append(f"{breakdown.lost:.3f} s lost to {engines} that died, until another took over")
    if breakdown.held >= _MIN_SECONDS:
        parts.append(f"{breakdown.held:.3f} s held back by the policy")
    if client_seconds >= _MIN_SECONDS:
        parts.append(f"{client_seconds:.3f} s waiting for the client to read")
    return ", ".join(parts) + "."


def _drafts(record: RequestRecord) -> str:
    if not record.num_drafted_tokens:
        return ""
    return f" ({record.num_accepted_tokens} of {record.num_drafted_tokens} drafted tokens accepted)"


def _queue(slowest: RequestState, seconds: float) -> str:
    behind = f" behind {slowest.num_waited_for} others" if slowest.num_waited_for else ""
    causes = [
        f"{part:.3f} s {_QUEUE_CAUSES[cause]}"
        for cause, part in slowest.record.breakdown.queue.items()
        if part >= _MIN_SECONDS
    ]
    because = f" ({', '.join(causes)})" if causes else ""
    return f"{seconds:.3f} s in the queue{behind}{because}"
