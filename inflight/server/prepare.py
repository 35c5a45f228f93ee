"""From a body's prompts and conversations to requests that the engine takes. Runs beside the event loop when long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.frontend import (
    ChatRequest,
    OutputProcessor,
    checked_tools,
    context_length_error,
    tool_choice_of,
)
from inflight.frontend.chat import num_characters
from inflight.server.access.keys import Caller
from inflight.server.errors import ApiError
from inflight.server.openai.params import GenerationParams
from inflight.server.openai.schemas import ChatBody, CompletionBody
from inflight.server.schemas.common import GenerationBody
from inflight.server.schemas.tokens import TokenizeBody
from inflight.server.state import ServerState

NO_BUDGET = -1  # in vLLM's words


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
            state.frontend.input_processor.check_characters(len(text))
            prompt = tokenizer.encode(text, body.add_special_tokens is not False)
        elif bool in set(map(type, prompt)):  # Python takes them for 0 and 1
            raise _bad_prompt("prompt has true or false among its token ids")
        found.append(_prepared(state, caller, body, params, prompt, text))
    _check_logprobs(state, params, found)
    return found


def _check_logprobs(
    state: ServerState, params: GenerationParams, found: list[OutputProcessor], name: str = "logprobs"
) -> None:
    sizes = [(len(prompt.prompt_token_ids), prompt.answers[0].request.max_tokens) for prompt in found]
    limit = state.options.max_answer_logprobs
    state.frontend.input_processor.check_logprobs(params.sampling, sizes, limit, name)


def _check_listed(state: ServerState, params: GenerationParams, num_prompts: int) -> None:
    num_answers = num_prompts * params.sampling.n
    state.frontend.input_processor.check_listed(params.sampling, num_answers, state.options.max_listed_tokens)


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
    """For every API that has conversations. Renders the template: no work for the loop."""
    check_tokenizer(state)
    contents = (message.get("content") or "" for message in chat.messages)
    # Before the template is rendered, which takes its time too.
    least = sum(map(_num_content_characters, contents)) + num_characters([*chat.offered_tools])
    state.frontend.input_processor.check_characters(least)
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
    _check_logprobs(state, params, [found], "top_logprobs")
    return [found]


def _num_content_characters(content: Any) -> int:
    return len(content) if isinstance(content, str) else sum(len(part.get("text") or "") for part in content)


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
            f"the prompt has {num_prompt} tokens and {params.asked_name} is {asked}: together they must be at most "
            f"{state.frontend.max_model_len} (max_model_len)",
            code="context_length_exceeded",
            param=params.asked_name,
        )


def _check_prompt_tokens(state: ServerState, num_tokens: int) -> None:
    limit = state.options.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise context_length_error(f"it has {num_tokens} tokens: at most {limit} are allowed here")
