"""Takes in the results of a step: appends tokens, ends requests, and reports deltas to their owners.

When a request ends and what it returns depends on its kind. The scheduler knows only tokens to compute: a request grows
to at most `max_total` tokens, and the step that computes its last known token either samples another or, if none may
follow, completes the request. Results travel in `Sampled` and are read by the kind, not by the scheduler.
"""

from __future__ import annotations

from typing import Protocol

from inflight.events import Delta, RequestFailure
from inflight.request import Phase, Request, Status
from inflight.scheduling.batch import Sampled, ScheduledStep
from inflight.scheduling.request_pool import RequestPool


class RequestKind(Protocol):
    def try_finish(self, request: Request, delta: Delta, sampled: Sampled, entry: int) -> bool:
        """If the request ends with this step, set its results in `delta` and the finish reason in its record.

        Return whether it ends. Called if the last token is a stop token or no more may follow, and if all tokens are
        computed.
        """


class Generating:
    """Generates tokens until one is a stop token or there are `max_tokens`."""

    def try_finish(self, request: Request, delta: Delta, sampled: Sampled, entry: int) -> bool:  # noqa: ARG002
        record, token_id, num_tokens = request.record, delta.token_ids[-1], len(request.token_ids)
        if _stops(request, token_id, num_tokens):
            record.finish_reason, record.stop_token_id = "stop", token_id
        elif num_tokens >= request.max_total:
            record.finish_reason = "length"
        return record.finish_reason is not None


def tokens_to_end(request: Request, token_ids: list[int]) -> list[int]:
    """Return the new tokens up to and including the one that ends the request, if one does."""
    num_known = len(request.token_ids)
    for count, token_id in enumerate(token_ids, 1):
        if num_known + count >= request.max_total or _stops(request, token_id, num_known + count):
            return token_ids[:count]
    return token_ids


def _stops(request: Request, token_id: int, num_tokens: int) -> bool:
    """Return whether a token, the last of `num_tokens`, is a stop token beyond `min_tokens`."""
    return token_id in request.stop_ids and num_tokens > request.num_prompt_tokens + request.params.min_tokens


class PromptLogprobs:
    """Returns the logprobs of the prompt's own tokens. Nothing is sampled; the request ends when they are computed."""

    def try_finish(self, request: Request, delta: Delta, sampled: Sampled, entry: int) -> bool:  # noqa: ARG002
        if request.params.prompt_logprobs is not None:
            delta.prompt_logprobs = request.prompt_logprobs or [None]  # nothing predicts the first token
        request.record.finish_reason = "length"
        return True


class Pooling:
    """Returns one vector for all tokens, an embedding or scores. The request ends when all tokens are computed."""

    def try_finish(self, request: Request, delta: Delta, sampled: Sampled, entry: int) -> bool:
        delta.vector = sampled.vectors.get(entry)
        request.record.finish_reason = "stop"
        if delta.vector is None:
            request.record.finish_reason = "error"
            delta.error, delta.error_code = "the step returned no vector for this request", "step_failed"
        return True


KINDS: dict[str, RequestKind] = {
    "generate": Generating(),
    "prompt_logprobs": PromptLogprobs(),
    "pool": Pooling(),
}


NO_TOKEN = RequestFailure("step_failed", "the step returned no token for this request")


def take_results(pool: RequestPool, step: ScheduledStep, sampled: Sampled, now: float) -> list[Delta]:
    """Append the sampled tokens, finish requests and free their memory, and return the deltas."""
    pool.attribution.step_ended(now, step.batch.num_prompt_tokens / step.batch.num_tokens)
    samples, errors, deltas = step.batch.samples, sampled.errors, []
    if errors:
        others = {entry: failure for entry, failure in errors.items() if not samples[entry]}
        deltas = end_with_errors(pool, step, others, now)
    ended: list[tuple[Request, Delta]] = []
    if sampled.prompt_logprobs:
        _keep_prompt_logprobs(step, sampled)
    # Hot loop: local names, because an enum member lookup costs hundreds of nanoseconds per request.
    logprobs, block_size = sampled.logprobs, pool.blocks.block_size
    decoding, running, waiting = Phase.DECODING, Status.RUNNING, Status.WAITING
    counts = pool.counts
    for index, (request, token_ids) in enumerate(zip(step.requests, sampled.token_ids, strict=True)):
        if not samples[index]:
            continue
        status = request.status
        if status is not running and status is not waiting:
            counts.complete(request)  # it ended while this step was in flight: drop the token
            continue
        if errors and index in errors:
            token_ids = token_ids[:-1]  # the failed one
        if len(token_ids) == 1:
            counts.accept(request, 1)
        elif token_ids:
            token_ids = sampled.token_ids[index] = tokens_to_end(request, token_ids)
            counts.accept(request, len(token_ids))
        else:
            counts.complete(request)
            deltas += end_with_errors(pool, step, {index: errors.get(index, NO_TOKEN)}, now)
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
        if may_end and KINDS[request.task].try_finish(request, delta, sampled, index):
            ended.append((request, delta))
        elif errors and index in errors:  # after tokens that were drafted
            deltas += end_with_errors(pool, step, {index: errors[index]}, now)
        elif request.num_computed >= (request.num_published + 1) * block_size:
            pool.publish(request)
    for index in step.completed:
        request = step.requests[index]
        counts.complete(request)
        if request.status in (Status.WAITING, Status.RUNNING):
            deltas.append(delta := Delta(request.request_id, []))
            if KINDS[request.task].try_finish(request, delta, sampled, index):
                ended.append((request, delta))
    if ended:
        pool.finish(ended, now)
        deltas += pool.retire(now)
    return deltas


def _begin_decoding(pool: RequestPool, request: Request, delta: Delta, now: float) -> None:
    """Record the first token of a request, or the first since it was preempted."""
    if request.status is Status.RUNNING:
        pool.attribution.enter(request, Phase.DECODING, now)
    if request.record.first_token_at is None:
        request.record.first_token_at = now
        delta.prompt_logprobs = request.prompt_logprobs or None


def _keep_prompt_logprobs(step: ScheduledStep, sampled: Sampled) -> None:
    for index, positions in sampled.prompt_logprobs.items():
        request = step.requests[index]
        logprobs = request.prompt_logprobs or [None]  # nothing predicts the first token
        first = step.batch.starts[index] + 1
        if len(logprobs) >= first:  # otherwise it was preempted; recomputing yields the same values
            logprobs[first : first + len(positions)] = positions
            request.prompt_logprobs = logprobs


def end_with_errors(
    pool: RequestPool, step: ScheduledStep, errors: dict[int, RequestFailure], now: float
) -> list[Delta]:
    """End the requests of these entries with their errors, and return their last deltas."""
    deltas: list[Delta] = []
    for index, failure in errors.items():
        request = step.requests[index]
        if request.status not in (Status.FINISHED, Status.LINGERING):  # otherwise it has all its tokens
            request.record.finish_reason = "error"
            deltas += pool.abort(request, now)[1]
            deltas[-1].error, deltas[-1].error_code = failure.message, failure.code
    return deltas
