"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.server.engine_response import EngineCall, EngineResponse
from inflight.server.openai.formatters import ChatFormatter, CompletionFormatter
from inflight.server.openai.schemas import ChatBody, ChatChunk, ChatCompletion, Completion, CompletionBody
from inflight.server.openapi import documented
from inflight.server.prepare import (
    GenerationParams,
    chat_params,
    chat_request,
    check_answers,
    completion_params,
    prepare_completion,
    prepare_conversation,
    prompts_of_body,
)
from inflight.server.schemas import GenerationBody
from inflight.server.state import ServedModel

router = APIRouter()

LONG_TEXT = 2000  # characters or token ids above which prompts are prepared in a thread


@router.post("/v1/completions", **documented(CompletionBody, Completion, events=Completion))
async def completions(request: Request) -> Response:
    """Continue prompts, given as text or token ids."""
    call = await EngineCall.read(request, CompletionBody, "generate", "cmpl-")
    state, caller, model, body = call.state, call.caller, call.model, call.body
    params = await state.in_thread_if(body.is_large, caller, lambda: completion_params(model, body))
    prompts = prompts_of_body(model, body, params.sampling.n)
    is_long = body.is_large or sum(map(len, prompts)) > LONG_TEXT

    async def answer(response: EngineResponse) -> None:
        prepared = await state.in_thread_if(
            is_long, caller, lambda: prepare_completion(model, body, params, prompts, response.context)
        )
        await response.generate(prepared, params)

    options = _format_options(model, body, params)
    formatter = CompletionFormatter(call.request_id, call.model_name, **options)
    return EngineResponse(call, answer, body.user, stream=body.stream, formatter=formatter)


@router.post("/v1/chat/completions", **documented(ChatBody, ChatCompletion, events=ChatChunk))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, through the checkpoint's chat template."""
    call = await EngineCall.read(request, ChatBody, "generate", "chatcmpl-")
    state, caller, model, body = call.state, call.caller, call.model, call.body
    params = await state.in_thread_if(body.is_large, caller, lambda: chat_params(model, body))
    check_answers(model, 1, params.sampling.n)

    async def answer(response: EngineResponse) -> None:
        prepared = await state.in_thread(
            caller, lambda: prepare_conversation(model, chat_request(body), params, response.context)
        )
        await response.generate(prepared, params)

    options = _format_options(model, body, params) | {"with_reasoning": body.include_reasoning is not False}
    formatter = ChatFormatter(call.request_id, call.model_name, **options)
    return EngineResponse(call, answer, body.user, stream=body.stream, formatter=formatter)


def _format_options(model: ServedModel, body: GenerationBody, params: GenerationParams) -> dict[str, Any]:
    stream_options = body.stream_options
    with_usage = bool(stream_options and stream_options.include_usage)
    return {
        "created": int(time.time()),
        "tokenizer": model.frontend.tokenizer,
        "fingerprint": model.fingerprint,
        "num_logprobs": params.num_logprobs,
        "with_ids": bool(body.return_token_ids),
        "with_usage": with_usage,
        "with_usage_so_far": bool(with_usage and stream_options and stream_options.continuous_usage_stats),
        "num_prompt_logprobs": body.prompt_logprobs,
    }
