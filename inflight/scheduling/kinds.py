"""Kinds of requests: what ends one, and what it returns.

The scheduler knows only tokens to compute. A request comes to have at most `max_total` tokens, and the step that
computes the last one it has either samples another or, where none may follow, completes it. What a runner found out
about an entry travels in `Sampled` and is handed to the kind here; the scheduler does not look at it.
"""

from __future__ import annotations

from typing import Protocol

from inflight.events import Delta
from inflight.request import Request
from inflight.scheduling.batch import Sampled


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


class PromptLogprobs:
    """Return the logprobs of the prompt's own tokens. Nothing is sampled; the request ends when they are computed."""

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


KINDS: dict[str, RequestKind] = {
    "generate": Generating(),
    "prompt_logprobs": PromptLogprobs(),
    "pool": Pooling(),
}
