"""Kinds of requests: what ends one, and what it returns.

The scheduler knows only tokens to compute. A request comes to have at most `max_total` tokens, and the step that
computes the last one it has either samples another or, where none may follow, completes it. What a runner found out
about an entry travels in `Sampled` and is handed to the kind here; the scheduler does not look at it.
"""

from __future__ import annotations

from typing import Protocol

from inflight.events import Delta, RequestFailure
from inflight.request import Phase, Request, Status
from inflight.scheduling.batch import Sampled, ScheduledStep
from inflight.scheduling.request_pool import RequestPool


class RequestKind(Protocol):
    def ends(self, request: Request, delta: Delta, sampled: Sampled, entry: int) -> bool:
        """Whether the request ends with what this step gave it. If so, `delta` gets what it returns, and its record
        the reason. Asked where the last token is a stop or there may be no more, and where all is computed."""


class Generating:
    """Tokens, until one of them is a stop or there are as many as were asked for."""

    def ends(self, request: Request, delta: Delta, sampled: Sampled, entry: int) -> bool:  # noqa: ARG002
        record, token_id, num_tokens = request.record, delta.token_ids[-1], len(request.token_ids)
        if _stops(request, token_id, num_tokens):
            record.finish_reason, record.stop_token_id = "stop", token_id
        elif num_tokens >= request.max_total:
            record.finish_reason = "length"
        return record.finish_reason is not None


def tokens_to_end(request: Request, token_ids: list[int]) -> list[int]:
    """Several new tokens, up to the one that ends the request if one does."""
    num_known = len(request.token_ids)
    for count, token_id in enumerate(token_ids, 1):
        if num_known + count >= request.max_total or _stops(request, token_id, num_known + count):
            return token_ids[:count]
    return token_ids


def _stops(request: Request, token_id: int, num_tokens: int) -> bool:
    """Whether the token that makes it so many is a stop that counts."""
    return token_id in request.stop_ids and num_tokens > request.num_prompt_tokens + request.params.min_tokens


class Scoring:
    """The logprobs of the prompt's own tokens. Nothing is sampled: it ends when they are computed."""

    def ends(self, request: Request, delta: Delta, sampled: Sampled, entry: int) -> bool:  # noqa: ARG002
        if request.params.prompt_logprobs is not None:
            delta.prompt_logprobs = request.prompt_logprobs or [None]  # nothing predicts the first token
        request.record.finish_reason = "length"
        return True


class Pooling:
    """One vector for all tokens: an embedding, or scores. It ends when they are computed."""

    def ends(self, request: Request, delta: Delta, sampled: Sampled, entry: int) -> bool:
        delta.vector = sampled.vectors.get(entry)
        request.record.finish_reason = "stop"
        if delta.vector is None:
            request.record.finish_reason = "error"
            delta.error, delta.error_code = "the step gave it no vector", "step_failed"
        return True


KINDS: dict[str, RequestKind] = {"generate": Generating(), "score": Scoring(), "pool": Pooling()}


NO_TOKEN = RequestFailure("step_failed", "the step gave it no token")


def take_results(pool: RequestPool, step: ScheduledStep, sampled: Sampled, now: float) -> list[Delta]:
    """Append the sampled tokens, finish and free what is done, and tell the news."""
    num_tokens = step.batch.num_tokens
    pool.attribution.step_ended(now, (num_tokens - len(step)) / num_tokens)
    deltas = end_with_errors(pool, step, sampled.errors, now) if sampled.errors else []
    ended: list[tuple[Request, Delta]] = []
    if sampled.prompt_logprobs:
        _keep_prompt_logprobs(step, sampled)
    # Local names: looking up an enum's member takes hundreds of nanoseconds, for each request that decodes.
    samples, logprobs, block_size = step.batch.samples, sampled.logprobs, pool.blocks.block_size
    decoding, running, waiting = Phase.DECODING, Status.RUNNING, Status.WAITING
    counts = pool.counts
    for index, (request, token_ids) in enumerate(zip(step.requests, sampled.token_ids, strict=True)):
        if not samples[index]:
            continue
        status = request.status
        if status is not running and status is not waiting:
            counts.complete(request)  # it ended while this step was in flight: the surplus token is dropped
            continue
        if len(token_ids) == 1:
            counts.accept(request, 1)
        elif token_ids:
            token_ids = tokens_to_end(request, token_ids)
            counts.accept(request, len(token_ids), sampled.num_written.get(index, 0))
        else:
            counts.complete(request)
            deltas += end_with_errors(pool, step, {index: NO_TOKEN}, now)
            continue
        delta = Delta(request.request_id, token_ids)
        deltas.append(delta)
        known = request.token_ids
        known += token_ids
        request.record.last_token_at = now
        if request.phase is not decoding:
            _begin_decoding(pool, request, delta, now)
        if logprobs and index in logprobs:
            delta.logprobs = logprobs[index]
            del delta.logprobs[len(token_ids) :]
        may_end = token_ids[-1] in request.stop_ids or len(known) >= request.max_total
        if may_end and KINDS[request.kind].ends(request, delta, sampled, index):
            ended.append((request, delta))
        elif request.num_computed >= (request.num_published + 1) * block_size:
            pool.publish(request)
    for index in step.completed:
        request = step.requests[index]
        counts.complete(request)
        if request.status in (Status.WAITING, Status.RUNNING):
            deltas.append(delta := Delta(request.request_id, []))
            if KINDS[request.kind].ends(request, delta, sampled, index):
                ended.append((request, delta))
    if ended:
        pool.finish(ended, now)
        deltas += pool.retire(now)
    return deltas


def _begin_decoding(pool: RequestPool, request: Request, delta: Delta, now: float) -> None:
    """Its first token has come, or the first since it was preempted."""
    if request.status is Status.RUNNING:
        pool.attribution.enter(request, Phase.DECODING, now)
    if request.record.first_token_at is None:
        request.record.first_token_at = now
        delta.prompt_logprobs = request.prompt_logprobs or None


def _keep_prompt_logprobs(step: ScheduledStep, sampled: Sampled) -> None:
    for index, positions in sampled.prompt_logprobs.items():
        request = step.requests[index]
        kept = request.prompt_logprobs or [None]  # nothing predicts the first token
        first = step.batch.starts[index] + 1
        if len(kept) >= first:  # else it was preempted meanwhile; computed anew, it says the same
            kept[first : first + len(positions)] = positions
            request.prompt_logprobs = kept


def end_with_errors(
    pool: RequestPool, step: ScheduledStep, errors: dict[int, RequestFailure], now: float
) -> list[Delta]:
    """End the requests of these entries, each with its error."""
    deltas: list[Delta] = []
    for index, failure in errors.items():
        request = step.requests[index]
        if request.status not in (Status.FINISHED, Status.LINGERING):  # else it has all its tokens
            request.record.finish_reason = "error"
            deltas += pool.abort(request, now)[1]
            deltas[-1].error, deltas[-1].error_code = failure.message, failure.code
    return deltas
