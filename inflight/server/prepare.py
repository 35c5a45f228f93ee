"""From a body to requests that the engine takes: limits, parameters, tokens. Runs beside the event loop when long."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from inflight.frontend import (
    ChatRequest,
    OutputProcessor,
    checked_tools,
    context_length_error,
    tool_choice_of,
)
from inflight.request import SamplingParams
from inflight.server.constraints import ContentConstraint, read_constraint
from inflight.server.errors import ApiError
from inflight.server.keys import Caller
from inflight.server.schemas.chat import ChatBody
from inflight.server.schemas.common import GenerationBody, SampledBody
from inflight.server.schemas.completions import CompletionBody
from inflight.server.schemas.constraints import ConstrainedBody
from inflight.server.schemas.tokens import TokenizeBody
from inflight.server.state import ServerState

DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's API has it
NO_BUDGET = -1  # in vLLM's words


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """What a body asks for, checked as far as that needs no tokens."""

    sampling: SamplingParams
    num_logprobs: int | None = None
    echo: bool = False
    kind: str = "generate"  # of the requests
    constraint: ContentConstraint | None = None  # which the sampling has too
    asked_tokens: int | None = None  # the longest answer, where the body says it

    def blamed(self) -> AbstractContextManager[None]:
        """In it, refusals name what the client has written."""
        return nullcontext() if self.constraint is None else self.constraint.blamed()


# ---- parameters ----


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
    kind = "score" if scores_only else "generate"
    return GenerationParams(params, body.logprobs, bool(body.echo), kind, constraint, body.max_tokens)


def chat_params(state: ServerState, body: ChatBody) -> GenerationParams:
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    default = state.frontend.default_params.get("max_tokens")
    asked: dict[str, Any] = {"max_tokens": _max_tokens(state, given, default)}
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given: it needs logprobs to be true", param="top_logprobs")
    num_logprobs = _num_logprobs(state, "top_logprobs", body.top_logprobs or 0) if body.logprobs else None
    if num_logprobs is not None:
        asked["logprobs"] = num_logprobs
    constraint = _read_constraint(body, asked)
    params = _params(state, body, asked)
    return GenerationParams(params, num_logprobs, constraint=constraint, asked_tokens=given)


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
    stop: Sequence[str] = (),
    constraint: ContentConstraint | None = None,
) -> GenerationParams:
    """Of bodies with names of their own for these."""
    default = state.frontend.default_params.get("max_tokens")
    asked: dict[str, Any] = {"max_tokens": _max_tokens(state, max_tokens, default)}
    _check_strings(state, "stop", stop)
    if stop:
        asked["stop"] = stop
    if constraint is not None:
        asked["structured_outputs"] = constraint.structured_outputs()
    params = SamplingParams(**{**state.frontend.default_params, **body.sampling(), **asked})
    return GenerationParams(params, constraint=constraint, asked_tokens=max_tokens)


def _max_tokens(state: ServerState, given: int | None, default: int | None) -> int | None:
    """The longest answer: what is asked for, or a default that the server's limit cuts."""
    limit = state.options.max_output_tokens
    if given is None:
        return min(filter(None, (default, limit)), default=None)
    if limit is not None and given > limit:
        message = f"max_tokens is {given}: at most {limit} are allowed here"
        raise ApiError(400, message, param="max_tokens")
    return given


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
    _check_strings(state, "stop", [body.stop] if isinstance(body.stop, str) else body.stop or [])
    _check_strings(state, "bad_words", body.bad_words or ())
    size = state.frontend.input_processor.vocab_size
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        given = getattr(body, name) or ()
        if len(given) > size:
            raise ApiError(400, f"{name} has {len(given)} token ids: there are only {size}", param=name)


def _check_strings(state: ServerState, name: str, texts: Sequence[str]) -> None:
    options = state.options
    if name == "stop" and len(texts) > options.max_stop_strings:
        message = f"stop has {len(texts)} strings: at most {options.max_stop_strings} are allowed"
        raise ApiError(400, message, param=name)
    longest = max(map(len, texts), default=0)
    if longest > options.max_stop_length:
        message = (
            f"{name} has a string of {longest} characters: at most {options.max_stop_length} are allowed"
        )
        raise ApiError(400, message, param=name)


# ---- prompts ----


def split_prompts(state: ServerState, body: CompletionBody, n: int) -> list[str | list[int]]:
    """The prompts of a body: one, or several."""
    given = body.prompt
    if isinstance(given, str):
        prompts: list[Any] = [given]
    elif not isinstance(given, list):
        raise _bad_prompt(f"prompt is of type {type(given).__name__}")
    elif not given:
        raise _bad_prompt("prompt is an empty list")
    else:
        prompts = [given] if isinstance(given[0], int) else given
    check_answers(state, len(prompts), n)
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str | list):
            raise _bad_prompt(f"prompt[{number}] is of type {type(prompt).__name__}")
    return prompts


def check_answers(state: ServerState, num_prompts: int, n: int) -> None:
    limit = state.options.max_answers
    if num_prompts * n > limit:
        raise ApiError(
            400,
            f"prompt has {num_prompts} items and n is {n}: at most {limit} answers are allowed in one request",
            code="too_many_answers",
            param="prompt" if num_prompts > n else "n",
        )


def _bad_prompt(what: str) -> ApiError:
    message = f"{what}: it must be a text, a list of token ids, or a list of either"
    return ApiError(400, message, code="invalid_value", param="prompt")


def prepare_completion(
    state: ServerState,
    caller: Caller,
    body: CompletionBody,
    params: GenerationParams,
    prompts: list[str | list[int]],
) -> list[OutputProcessor]:
    tokenizer = state.frontend.tokenizer
    found = []
    _check_listed(state, params, len(prompts))
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else None
        if text is not None and tokenizer is not None:
            _check_characters(state, len(text))
            prompt = tokenizer.encode(text, body.add_special_tokens is not False)
        elif bool in set(map(type, prompt)):  # Python takes them for 0 and 1
            raise _bad_prompt("prompt has true or false among its token ids")
        found.append(_prepared(state, caller, body, params, prompt, text))
    return found


def _check_listed(state: ServerState, params: GenerationParams, num_prompts: int) -> None:
    num_answers = num_prompts * params.sampling.n
    state.frontend.input_processor.check_listed(params.sampling, num_answers, state.options.max_listed_tokens)


def _check_characters(state: ServerState, num_characters: int) -> None:
    """Megabytes that cannot fit into the context are not worth tokenizing."""
    front = state.frontend
    assert front.tokenizer is not None
    longest = front.tokenizer.max_characters_per_token
    if longest is not None and num_characters > longest * front.max_model_len:
        raise context_length_error(
            f"it has {num_characters} characters: no more than {longest * front.max_model_len} can fit "
            f"(max_model_len is {front.max_model_len})"
        )


def chat_request(body: ChatBody) -> ChatRequest:
    """The conversation of a chat. Raises RequestError."""
    budget = body.max_reasoning_tokens
    if body.thinking_token_budget not in (None, NO_BUDGET):
        if budget is not None:
            message = "max_reasoning_tokens and thinking_token_budget are both given: they mean the same"
            raise ApiError(400, message, param="thinking_token_budget")
        budget = body.thinking_token_budget
    return replace(
        tokenized_chat(body),
        tool_choice=tool_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        max_reasoning_tokens=budget,
    )


def tokenized_chat(body: ChatBody | TokenizeBody) -> ChatRequest:
    """As far as it decides about the prompt."""
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return ChatRequest(
        [message.given() for message in body.messages or ()],
        checked_tools(body.tools),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=begins,
        continue_final_message=continues,
    )


def prepare_chat(
    state: ServerState,
    caller: Caller,
    chat: ChatRequest,
    params: GenerationParams,
    *,
    priority: int = 0,
    user: str | None = None,
    cache_salt: str = "",
) -> list[OutputProcessor]:
    """For every API that has conversations. Renders the template, and may compile a grammar: no work for the loop."""
    check_tokenizer(state)
    contents = (message.get("content") or "" for message in chat.messages)
    _check_characters(state, sum(len(c) if isinstance(c, str) else _num_characters(c) for c in contents))
    _check_listed(state, params, 1)
    with params.blamed():
        found = state.frontend.prepare_chat(
            f"g{next(state.serials)}",
            chat,
            params.sampling,
            priority=priority,
            tenant=caller.tenant(user),
            cache_salt=caller.salt(cache_salt),
        )
    _check_prompt_tokens(state, len(found.prompt_token_ids))
    _check_room(state, params, found)
    return [found]


def _num_characters(parts: Any) -> int:
    return sum(len(part.get("text") or "") for part in parts)


def check_tokenizer(state: ServerState) -> None:
    if state.frontend.tokenizer is None:
        raise ApiError(
            400, "this model has no tokenizer: send token ids to /v1/completions", param="messages"
        )


def _prepared(
    state: ServerState,
    caller: Caller,
    body: GenerationBody,
    params: GenerationParams,
    prompt: Any,
    text: str | None,
) -> OutputProcessor:
    if isinstance(prompt, list):
        _check_prompt_tokens(state, len(prompt))
    with params.blamed():
        found = state.frontend.prepare(
            f"g{next(state.serials)}",
            prompt,
            params.sampling,
            priority=body.priority or 0,
            tenant=caller.tenant(body.user),
            cache_salt=caller.salt(body.cache_salt or ""),
            text=text,
            kind=params.kind,
        )
    _check_room(state, params, found)
    return found


def _check_room(state: ServerState, params: GenerationParams, found: OutputProcessor) -> None:
    """Where the server is strict: that the context has room for an answer as long as the body asks for."""
    num_prompt, asked = len(found.prompt_token_ids), params.asked_tokens or 0
    if state.options.strict and num_prompt + asked > state.frontend.max_model_len:
        raise ApiError(
            400,
            f"the prompt has {num_prompt} tokens and max_tokens is {asked}: together they must be at most "
            f"{state.frontend.max_model_len} (max_model_len)",
            code="context_length_exceeded",
            param="max_tokens",
        )


def _check_prompt_tokens(state: ServerState, num_tokens: int) -> None:
    limit = state.options.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise context_length_error(f"it has {num_tokens} tokens: at most {limit} are allowed here")
