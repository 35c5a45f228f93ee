"""What a body asks of its answers, as `SamplingParams`, within the server's own limits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from inflight.sampling_params import SamplingParams
from inflight.server.constraints import ContentConstraint, read_constraint
from inflight.server.errors import ApiError
from inflight.server.openai.schemas import ChatBody, CompletionBody
from inflight.server.schemas.common import GenerationBody, SampledBody
from inflight.server.schemas.constraints import ConstrainedBody
from inflight.server.state import ServerState

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's API has it


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """What a body asks for, checked as far as that needs no tokens."""

    sampling: SamplingParams
    num_logprobs: int | None = None
    echo: bool = False
    kind: str = "generate"  # of the requests
    constraint: ContentConstraint | None = None  # which the sampling has too
    asked_tokens: int | None = None  # the longest answer, where the body says it,
    asked_name: str = "max_tokens"  # by this name

    def blamed(self) -> AbstractContextManager[None]:
        """In it, refusals name what the client has written."""
        return nullcontext() if self.constraint is None else self.constraint.blamed()


def completion_params(state: ServerState, body: CompletionBody) -> GenerationParams:
    scores_only = body.max_tokens == 0
    if scores_only and not body.echo:
        raise ApiError(400, "max_tokens is 0: only with echo is there anything to tell", param="max_tokens")
    given = 1 if scores_only else body.max_tokens
    asked: dict[str, Any] = {"max_tokens": _max_tokens(state, given, DEFAULT_COMPLETION_TOKENS)}
    if body.logprobs is not None:
        asked["logprobs"] = _num_logprobs(state, "logprobs", body.logprobs)
        if body.echo:
            asked["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    constraint = _read_constraint(body, asked)
    params = _params(state, body, asked)
    kind = "prompt_logprobs" if scores_only else "generate"
    return GenerationParams(params, body.logprobs, bool(body.echo), kind, constraint, body.max_tokens)


def chat_params(state: ServerState, body: ChatBody) -> GenerationParams:
    newer = body.max_completion_tokens
    given, name = (body.max_tokens, "max_tokens") if newer is None else (newer, "max_completion_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given: it needs logprobs to be true", param="top_logprobs")
    num_logprobs = _num_logprobs(state, "top_logprobs", body.top_logprobs or 0) if body.logprobs else None
    default = state.frontend.default_params.get("max_tokens")
    asked: dict[str, Any] = {}
    if num_logprobs is not None:
        asked["logprobs"] = num_logprobs
        default = _scored_tokens(state, body.n or 1, num_logprobs, default)
    asked["max_tokens"] = _max_tokens(state, given, default, name)
    constraint = _read_constraint(body, asked)
    params = _params(state, body, asked)
    return GenerationParams(params, num_logprobs, constraint=constraint, asked_tokens=given, asked_name=name)


def _read_constraint(body: ConstrainedBody, asked: dict[str, Any]) -> ContentConstraint | None:
    found = read_constraint(body)
    if found is not None:
        asked["structured_outputs"] = found.structured_outputs()
    return found


def conversation_params(
    state: ServerState,
    body: SampledBody,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    stop: Sequence[str] = (),
    stop_name: str = "stop",
    constraint: ContentConstraint | None = None,
) -> GenerationParams:
    """Of bodies with names of their own for these."""
    default = state.frontend.default_params.get("max_tokens")
    asked: dict[str, Any] = {"max_tokens": _max_tokens(state, max_tokens, default, max_tokens_name)}
    _check_stops(state, stop_name, stop)
    if stop:
        asked["stop"] = stop
    if constraint is not None:
        asked["structured_outputs"] = constraint.structured_outputs()
    params = SamplingParams(**{**state.frontend.default_params, **body.sampling(), **asked})
    return GenerationParams(
        params, constraint=constraint, asked_tokens=max_tokens, asked_name=max_tokens_name
    )


def _max_tokens(
    state: ServerState, given: int | None, default: int | None, name: str = "max_tokens"
) -> int | None:
    """The longest answer: what is asked for by that name, or a default that the server's limit cuts."""
    limit = state.options.max_output_tokens
    if given is None:
        return min(filter(None, (default, limit)), default=None)
    if given < 1:
        raise ApiError(400, f"{name} is {given}: it must be an integer of at least 1", param=name)
    if limit is not None and given > limit:
        raise ApiError(400, f"{name} is {given}: at most {limit} are allowed here", param=name)
    return given


def _scored_tokens(state: ServerState, n: int, num_logprobs: int, default: int | None) -> int:
    """The longest answer with logprobs where the body does not say it: there may be as many as the limit has room for.
    A limit without room for one token is left to the check of the request."""
    room = max(1, state.options.max_answer_logprobs // (max(n, 1) * (num_logprobs + 1)))
    return room if default is None else min(default, room)


def _num_logprobs(state: ServerState, name: str, given: int) -> int:
    limit = state.options.max_logprobs
    if not 0 <= given <= limit:
        message = f"{name} is {given}: it must be an integer from 0 to {limit}"
        raise ApiError(400, message, param=name)
    return given


def _params(state: ServerState, body: GenerationBody, asked: dict[str, Any]) -> SamplingParams:
    if body.stream_options is not None and body.stream_options.include_usage and not body.stream:
        raise ApiError(400, "stream_options is given: it needs stream to be true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs is given: it needs stream to be false", param="prompt_logprobs")
    if body.prompt_logprobs is not None:
        _num_logprobs(state, "prompt_logprobs", body.prompt_logprobs)
    _check_lists(state, body)
    return SamplingParams(**{**state.frontend.default_params, **body.sampling(), **asked})


def _check_lists(state: ServerState, body: GenerationBody) -> None:
    """Lists are looked at in every step: what is longer than it can be of use is refused."""
    _check_stops(state, "stop", [body.stop] if isinstance(body.stop, str) else body.stop or [])
    _check_strings(state, "bad_words", body.bad_words or ())
    size = state.frontend.input_processor.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        given = getattr(body, name) or ()
        if len(given) > size:
            raise ApiError(400, f"{name} has {len(given)} token ids: there are only {size}", param=name)


def _check_stops(state: ServerState, name: str, stops: Sequence[str]) -> None:
    limit = state.options.max_stop_strings
    if len(stops) > limit:
        raise ApiError(400, f"{name} has {len(stops)} strings: at most {limit} are allowed", param=name)
    if "" in stops:
        raise ApiError(400, f"{name} has an empty string: each must have 1 character or more", param=name)
    _check_strings(state, name, stops)


def _check_strings(state: ServerState, name: str, texts: Sequence[str]) -> None:
    longest, limit = max(map(len, texts), default=0), state.options.max_stop_length
    if longest > limit:
        message = f"{name} has a string of {longest} characters: at most {limit} are allowed"
        raise ApiError(400, message, param=name)
