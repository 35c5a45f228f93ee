"""What a step brought: tokens are appended, requests end, and their owners are told."""

from __future__ import annotations

from inflight.events import Delta, RequestFailure
from inflight.request import Phase, Request, Status
from inflight.scheduling.batch import Sampled
from inflight.scheduling.kinds import KINDS, tokens_to_end
from inflight.scheduling.request_pool import RequestPool
from inflight.scheduling.step import ScheduledStep

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
