"""What happened to a request, and why it took so long."""

from __future__ import annotations

import time
from dataclasses import asdict

from inflight.engine import RequestState
from inflight.errors import EngineError
from inflight.events import RequestRecord
from inflight.server.observability.request_log import LoggedRequest
from inflight.server.routes.schemas import AnswerReport, Breakdown, RequestReport, Status, Waited
from inflight.server.state import ServerState


async def report_of(state: ServerState, logged: LoggedRequest) -> RequestReport:
    found = [await _describe(state, logged, engine_id) for engine_id in logged.engine_ids]
    answers = [_answer(index, item) for index, item in enumerate(found) if item is not None]
    engine_ids = tuple(name for item in found if item is not None for name in item.waited_for)
    own = set(logged.engine_ids)
    waited = Waited(
        num_requests=max((item.num_waited_for for item in found if item is not None), default=0),
        ids=state.request_log.ids_of(logged.caller, tuple(name for name in engine_ids if name not in own)),
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
    """Why nothing is known of how its time was spent, if the engine that knew is gone or does not answer."""
    come = "before its first token" if logged.first_token_at is None else "after its first token"
    if any(answer.finish_reason == "error" and answer.queued_seconds is None for answer in answers):
        return f"The engine was lost {come}, and what it knew of this request with it."
    if logged.outcome is not None or len(answers) == len(logged.engine_ids):
        return None
    health = await state.model.client.health()
    if health.healthy:
        return None
    since = health.seconds_since_step
    return f"It is in the engine, which is {health.state}: it made its last step {since:.0f} seconds ago, {come}."


async def _describe(state: ServerState, logged: LoggedRequest, engine_id: str) -> RequestState | None:
    try:
        found = await state.model.client.describe(engine_id)
    except EngineError:  # the engine is not there; what was heard of the answer still is
        found = None
    if found is None and engine_id in logged.records:
        return RequestState(logged.records[engine_id], "finished")
    return found


def _status(logged: LoggedRequest, answers: list[AnswerReport]) -> Status:
    if logged.outcome is not None:
        return logged.outcome
    running = any(answer.status != "queued" for answer in answers)
    return "running" if running else "queued"


def _answer(index: int, state: RequestState) -> AnswerReport:
    record = state.record
    has_outputs = record.first_token_at is not None  # else it is over with its prompt, or not there yet
    return AnswerReport(
        index=index,
        status="queued" if state.status == "waiting" else state.status,
        finish_reason=record.finish_reason,
        num_prompt_tokens=record.num_prompt_tokens,
        num_cached_tokens=record.num_cached_tokens,
        num_output_tokens=record.num_output_tokens,
        num_preemptions=record.num_preemptions,
        replica=record.engine_id,
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
    "step": "until the next step was formed",
    "memory": "for want of memory",
    "slots": "for want of a slot",
    "budget": "for a share of a step",
    "policy": "by the policy's choice",
}
_WORTH_TELLING = 0.001  # seconds


def _why(answers: list[AnswerReport], waited: Waited, client_seconds: float) -> str:
    """A sentence for people, about the answer that took longest."""
    if not answers:
        return "It has not reached the engine."
    slowest = max(answers, key=_seconds)
    if slowest.queued_seconds is None:
        return f"It waits for a place; {waited.num_requests} requests are before it."
    parts = [_queue(slowest, waited)]
    found = slowest.breakdown
    if slowest.prefill_seconds is not None:
        fresh = slowest.num_prompt_tokens - slowest.num_cached_tokens
        parts.append(
            f"{found.prefill:.3f} s for the prompt "
            f"({fresh} tokens computed, {slowest.num_cached_tokens} cached)"
        )
    if slowest.decode_seconds is not None:
        parts.append(f"{found.decode:.3f} s for {slowest.num_output_tokens} tokens")
    if found.prefill_of_others >= _WORTH_TELLING:
        parts.append(f"{found.prefill_of_others:.3f} s for prompts of others beside them")
    if slowest.num_preemptions:
        parts.append(f"{found.preempted:.3f} s preempted, {slowest.num_preemptions} times")
    if slowest.num_failovers:
        engines = "an engine" if slowest.num_failovers == 1 else f"{slowest.num_failovers} engines"
        parts.append(f"{found.lost:.3f} s with {engines} that died, and until another took over")
    if found.held >= _WORTH_TELLING:
        parts.append(f"{found.held:.3f} s kept by the policy")
    if client_seconds >= _WORTH_TELLING:
        parts.append(f"{client_seconds:.3f} s of waiting for the client to read")
    return ", ".join(parts) + "."


def _seconds(answer: AnswerReport) -> float:
    found = answer.breakdown
    running = found.prefill + found.prefill_of_others + found.decode
    return sum(found.queue.values()) + running + found.preempted + found.held + found.lost


def _queue(answer: AnswerReport, waited: Waited) -> str:
    behind = f" behind {waited.num_requests} others" if waited.num_requests else ""
    causes = [
        f"{seconds:.3f} s {_QUEUE_CAUSES[cause]}"
        for cause, seconds in answer.breakdown.queue.items()
        if seconds >= _WORTH_TELLING
    ]
    because = f" ({', '.join(causes)})" if causes else ""
    return f"{answer.queued_seconds:.3f} s in the queue{behind}{because}"
