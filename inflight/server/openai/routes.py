"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.server.engine_response import RequestHead
from inflight.server.generation_response import GenerationResponse, GenerationSpec
from inflight.server.http.body import read_json
from inflight.server.openai.formatters import ChatFormatter, CompletionFormatter
from inflight.server.openai.params import chat_params, completion_params
from inflight.server.openai.schemas import ChatBody, ChatChunk, ChatCompletion, Completion, CompletionBody
from inflight.server.openapi import documented
from inflight.server.prepare import (
    chat_request,
    check_answers,
    prepare_chat,
    prepare_completion,
    split_prompts,
)
from inflight.server.schemas.common import GenerationBody
from inflight.server.state import ServerState, caller_of, state_of

router = APIRouter()

LONG_TEXT = 2000  # characters, or ids, from which on preparing is worth a thread


@router.post("/v1/completions", **documented(CompletionBody, Completion, events=Completion))
async def completions(request: Request) -> Response:
    """Continue prompts, given as text or token ids."""
    state, options = state_of(request), state_of(request).options
    body = await read_json(request, CompletionBody, options)
    model = state.check_model(body.model)
    state.check_task("generate")
    caller = caller_of(request)
    params = await state.in_thread_if(body.is_large, caller, lambda: completion_params(state, body))
    prompts = split_prompts(state, body, params.sampling.n)
    request_id = body.request_id or f"cmpl-{secrets.token_hex(16)}"

    def formatter(created: int) -> CompletionFormatter:
        return CompletionFormatter(
            *(request_id, created, model, state.frontend.tokenizer),
            num_logprobs=params.num_logprobs,
            **_common(state, body),
        )

    spec = GenerationSpec(
        RequestHead("/v1/completions", request_id, model, *_place(body)),
        num_answers=len(prompts) * params.sampling.n,
        echo=params.echo,
        prepare=lambda: prepare_completion(state, caller, body, params, prompts),
        blamed=params.blamed,
        is_long=body.is_large or sum(map(len, prompts)) > LONG_TEXT,
        has_long_answer=params.num_logprobs is not None or body.prompt_logprobs is not None,
        formatter=formatter,
    )
    return GenerationResponse(state, caller, spec)


@router.post("/v1/chat/completions", **documented(ChatBody, ChatCompletion, events=ChatChunk))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, through the checkpoint's chat template."""
    state, options = state_of(request), state_of(request).options
    body = await read_json(request, ChatBody, options)
    model = state.check_model(body.model)
    state.check_task("generate")
    caller = caller_of(request)
    params = await state.in_thread_if(body.is_large, caller, lambda: chat_params(state, body))
    check_answers(state, 1, params.sampling.n)
    request_id = body.request_id or f"chatcmpl-{secrets.token_hex(16)}"

    def formatter(created: int) -> ChatFormatter:
        return ChatFormatter(
            *(request_id, created, model, state.frontend.tokenizer),
            num_logprobs=params.num_logprobs,
            **_common(state, body),
            with_reasoning=body.include_reasoning is not False,
        )

    spec = GenerationSpec(
        RequestHead("/v1/chat/completions", request_id, model, *_place(body)),
        num_answers=params.sampling.n,
        echo=False,
        prepare=lambda: prepare_chat(
            state,
            caller,
            chat_request(body),
            params,
            priority=body.priority or 0,
            user=body.user,
            cache_salt=body.cache_salt or "",
        ),
        blamed=params.blamed,
        is_long=True,  # a template is rendered by another process
        has_long_answer=params.num_logprobs is not None or body.prompt_logprobs is not None,
        formatter=formatter,
    )
    return GenerationResponse(state, caller, spec)


def _place(body: GenerationBody) -> tuple[bool, int, str | None]:
    return bool(body.stream), body.priority or 0, body.user


def _common(state: ServerState, body: GenerationBody) -> dict[str, Any]:
    asked = body.stream_options
    return {
        "fingerprint": state.fingerprint,
        "with_ids": bool(body.return_token_ids),
        "with_usage": bool(asked and asked.include_usage),
        "with_usage_so_far": bool(asked and asked.include_usage and asked.continuous_usage_stats),
        "num_prompt_logprobs": body.prompt_logprobs,
    }
