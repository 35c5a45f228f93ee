"""/v1/requests: report what happened to a request and why it took so long, or cancel it."""

from __future__ import annotations

import time
from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.engine import RequestState
from inflight.errors import EngineError, shown
from inflight.events import RequestRecord
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.observability.request_log import LoggedRequest
from inflight.server.openapi import documented, query_parameters, respond
from inflight.server.routes.schemas import (
    AnswerReport,
    Breakdown,
    Cancelled,
    NeighbourReport,
    RequestReport,
    RequestReports,
    Status,
    Waited,
)
from inflight.server.routes.timeline import seen_by
from inflight.server.state import ServerState, caller_of, state_of
from inflight.timeline import TimelineQuery, decode_chunk
from inflight.timeline.neighbours import Neighbour, neighbours_of

router = APIRouter()

MAX_LISTED = 1000
MAX_PAGES = 16  # of the recording that are read to find a request's neighbours


# The statuses of reports that each `status` selects.
_SELECTED: dict[str, tuple[Status, ...]] = {
    "waiting": ("queued",),
    "running": ("running",),
    "finished": ("finished", "failed", "cancelled"),
}
_LIST = query_parameters(
    ("status", "string", "Only requests that are waiting, running or finished."),
    ("limit", "integer", f"The most requests to return: at most {MAX_LISTED}; 100 by default."),
)


@router.get("/v1/requests", **documented(None, RequestReports, 400, extra=_LIST))
async def list_requests(request: Request) -> Response:
    """List your requests, the latest first: those that wait, run, or finished recently. The admin key lists all."""
    state, caller = state_of(request), caller_of(request)
    status = request.query_params.get("status")
    if status not in (None, *_SELECTED):
        message = f"status is {shown(status)}: it must be waiting, running or finished"
        raise ApiError(400, message, code="invalid_value", param="status")
    text = request.query_params.get("limit", "100")
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_LISTED:
        message = f"limit is {shown(text)}: it must be from 1 to {MAX_LISTED}"
        raise ApiError(400, message, code="invalid_value", param="limit")
    reports: list[RequestReport] = []
    for logged in state.request_log.seen_by(caller):
        if status == "finished" and logged.outcome is None:
            continue
        if status in ("waiting", "running") and logged.outcome is not None:
            continue
        report = await _report(state, logged, caller)
        if status is None or report.status in _SELECTED[status]:
            reports.append(report)
        if len(reports) == int(text):
            break
    if state.ask_workers is not None:
        for body in await state.ask_workers(request):
            reports += RequestReports.model_validate_json(body).data
        reports.sort(key=lambda report: -report.created)
    return respond(RequestReports(data=reports[: int(text)]))


@router.get("/v1/requests/{request_id}", **documented(None, RequestReport, 404))
async def request_report(request: Request) -> Response:
    """Report what happened to a request of yours and why it took so long. The admin key sees everyone's."""
    state, caller = state_of(request), caller_of(request)
    logged = state.request_log.find(caller, request.path_params["request_id"])
    report = await _report(state, logged, caller)
    report.neighbours = await _neighbours(state, logged, report, caller)
    return respond(report)


@router.delete("/v1/requests/{request_id}", **documented(None, Cancelled, 404, 503))
async def cancel_request(request: Request) -> Response:
    """Cancel a request of yours; its answers end with the finish reason "abort"."""
    state = state_of(request)
    logged = state.request_log.find(caller_of(request), request.path_params["request_id"])
    freed = await state.request_log.cancel(logged)
    return respond(Cancelled(id=logged.request_id, cancelled=freed is not None, freed_blocks=freed or 0))


async def _report(state: ServerState, logged: LoggedRequest, caller: Caller) -> RequestReport:
    """Return a report for a caller, who sees the ids of other requests only if they are its own."""
    states = [await _describe(state, logged, engine_id) for engine_id in logged.engine_ids]
    answers = [_answer(index, item) for index, item in enumerate(states) if item is not None]
    engine_ids = tuple(name for item in states if item is not None for name in item.waited_for)
    own = set(logged.engine_ids)
    waited = Waited(
        num_requests=max((item.num_waited_for for item in states if item is not None), default=0),
        ids=state.request_log.ids_of(caller, tuple(name for name in engine_ids if name not in own)),
    )
    ended_at = logged.ended_at or time.perf_counter()
    first = logged.first_token_at
    return RequestReport(
        id=logged.request_id,
        route=logged.route,
        status=_status(logged, answers),
        created=logged.created,
        task=logged.task,
        num_answers=logged.num_answers,
        stream=logged.stream,
        priority=logged.priority,
        tenant=logged.tenant,
        total_seconds=ended_at - logged.started_at,
        first_token_seconds=None if first is None else first - logged.started_at,
        client_seconds=logged.client_seconds,
        answers=answers,
        waited_for=waited,
        why=await _lost(state, logged, answers) or _why(answers, waited, logged.client_seconds),
    )


async def _lost(state: ServerState, logged: LoggedRequest, answers: list[AnswerReport]) -> str | None:
    """Say why the time spent is unknown, if the engine that knew is gone or does not respond."""
    when = "before its first token" if logged.first_token_at is None else "after its first token"
    if any(answer.finish_reason == "error" and answer.queued_seconds is None for answer in answers):
        return f"The engine died {when}, so the timing of this request is unknown."
    if logged.outcome is not None or len(answers) == len(logged.engine_ids):
        return None
    health = await state.model.client.health()
    if health.healthy:
        return None
    since = health.seconds_since_step
    return f"It is in the engine, which is {health.state}: its last step was {since:.0f} seconds ago, {when}."


async def _describe(state: ServerState, logged: LoggedRequest, engine_id: str) -> RequestState | None:
    try:
        request_state = await state.model.client.describe(engine_id)
    except EngineError:  # the engine is gone, but the record of a finished answer is kept here
        request_state = None
    if request_state is None and engine_id in logged.records:
        return RequestState(logged.records[engine_id], "finished")
    return request_state


async def _neighbours(
    state: ServerState, logged: LoggedRequest, report: RequestReport, caller: Caller
) -> list[NeighbourReport]:
    """Return the requests that cost the slowest answer most, as far as the recording reaches back."""
    answers = [answer for answer in report.answers if answer.number is not None]
    if not answers:
        return []
    slowest = max(answers, key=_seconds)
    number = slowest.number
    assert number is not None
    since = time.monotonic() - (time.perf_counter() - logged.started_at) - 1.0
    query = TimelineQuery(since, None, slowest.replica or None)
    encoded: list[bytes] = []
    for _ in range(MAX_PAGES):
        try:
            page = await state.model.client.read_timeline(query)
        except EngineError:
            return []
        encoded += [data for _, data in page.chunks]
        if not page.positions:
            break
        query = TimelineQuery(since, page.positions, slowest.replica or None)

    def analyse() -> list[Neighbour]:
        return neighbours_of(number, map(decode_chunk, encoded))

    own = {answer.number for answer in report.answers}
    sees = seen_by(state, caller)
    return [
        NeighbourReport(
            number=info.number,
            id=info.origin.request_id if info.origin is not None and sees(info) else None,
            seconds=seconds,
            why=why,
        )
        for info, seconds, why in await state.in_service_thread(analyse)
        if info.number not in own and seconds > 0
    ]


def _status(logged: LoggedRequest, answers: list[AnswerReport]) -> Status:
    if logged.outcome is not None:
        return logged.outcome
    running = any(answer.status != "queued" for answer in answers)
    return "running" if running else "queued"


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
        replica=record.engine_id,
        number=None if record.number < 0 else record.number,
        waiting_reason=state.waiting_reason,
        num_ahead=state.num_ahead,
        num_failovers=record.num_failovers,
        queued_seconds=_between(record, "arrived_at", "admitted_at"),
        prefill_seconds=_between(record, "admitted_at", "first_token_at" if has_outputs else "finished_at"),
        decode_seconds=_between(record, "first_token_at", "last_token_at"),
        breakdown=Breakdown(**asdict(record.breakdown)),
    )


def _between(record: RequestRecord, first: str, last: str) -> float | None:
    start, end = getattr(record, first), getattr(record, last)
    return None if start is None or end is None else end - start


_QUEUE_CAUSES = {
    "step": "for the next step",
    "memory": "for KV memory",
    "slots": "for a batch slot",
    "budget": "for the token budget of a step",
    "policy": "because of the policy",
}
_MIN_SECONDS = 0.001  # worth mentioning


def _why(answers: list[AnswerReport], waited: Waited, client_seconds: float) -> str:
    """Return a sentence about the answer that took longest."""
    if not answers:
        return "It has not reached the engine yet."
    slowest = max(answers, key=_seconds)
    if slowest.queued_seconds is None:
        return f"It is waiting in the queue; {waited.num_requests} requests are ahead of it."
    parts = [_queue(slowest, waited)]
    breakdown = slowest.breakdown
    if slowest.prefill_seconds is not None:
        fresh = slowest.num_prompt_tokens - slowest.num_cached_tokens
        parts.append(
            f"{breakdown.prefill:.3f} s for the prompt "
            f"({fresh} tokens computed, {slowest.num_cached_tokens} cached)"
        )
    if slowest.decode_seconds is not None:
        parts.append(f"{breakdown.decode:.3f} s for {slowest.num_output_tokens} tokens")
    if breakdown.prefill_of_others >= _MIN_SECONDS:
        parts.append(f"{breakdown.prefill_of_others:.3f} s for other requests' prompts in the same steps")
    if slowest.num_preemptions:
        parts.append(f"{breakdown.preempted:.3f} s preempted ({slowest.num_preemptions} times)")
    if slowest.num_failovers:
        engines = "an engine" if slowest.num_failovers == 1 else f"{slowest.num_failovers} engines"
        parts.append(f"{breakdown.lost:.3f} s lost to {engines} that died, until another took over")
    if breakdown.held >= _MIN_SECONDS:
        parts.append(f"{breakdown.held:.3f} s held back by the policy")
    if client_seconds >= _MIN_SECONDS:
        parts.append(f"{client_seconds:.3f} s waiting for the client to read")
    return ", ".join(parts) + "."


def _seconds(answer: AnswerReport) -> float:
    times = answer.breakdown
    running = times.prefill + times.prefill_of_others + times.decode
    return sum(times.queue.values()) + running + times.preempted + times.held + times.lost


def _queue(answer: AnswerReport, waited: Waited) -> str:
    behind = f" behind {waited.num_requests} others" if waited.num_requests else ""
    causes = [
        f"{seconds:.3f} s {_QUEUE_CAUSES[cause]}"
        for cause, seconds in answer.breakdown.queue.items()
        if seconds >= _MIN_SECONDS
    ]
    because = f" ({', '.join(causes)})" if causes else ""
    return f"{answer.queued_seconds:.3f} s in the queue{behind}{because}"
