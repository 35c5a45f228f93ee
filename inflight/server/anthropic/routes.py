"""/v1/messages, as Anthropic's API has it."""

from __future__ import annotations

import secrets

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.frontend.chat import num_characters
from inflight.server.access.admission import counted
from inflight.server.anthropic.conversation import chat_of, check, text_constraint, user_of
from inflight.server.anthropic.formatter import MessagesFormatter
from inflight.server.anthropic.schemas import (
    CountTokensBody,
    MessageErrorBody,
    MessageEvent,
    MessageObject,
    MessagesBody,
    TokenCount,
)
from inflight.server.engine_response import RequestHead
from inflight.server.generation_response import GenerationResponse, GenerationSpec
from inflight.server.http.body import read_json
from inflight.server.openai.params import conversation_params
from inflight.server.openapi import documented, respond
from inflight.server.prepare import check_tokenizer, prepare_chat
from inflight.server.routes.service import check_size, text_limit
from inflight.server.state import caller_of, state_of

router = APIRouter()

ROUTE = "/v1/messages"


@router.post(
    ROUTE, **documented(MessagesBody, MessageObject, 529, events=MessageEvent, error=MessageErrorBody)
)
async def create_message(request: Request) -> Response:
    """Answer a conversation, given as messages of content blocks."""
    state, options = state_of(request), state_of(request).options
    body = await read_json(request, MessagesBody, options)
    model = state.check_model(body.model)
    state.check_task("generate")
    check(body)
    caller, user = caller_of(request), user_of(body)
    params = await state.in_thread_if(
        body.is_large,
        caller,
        lambda: conversation_params(
            state,
            body,
            max_tokens=body.max_tokens,
            stop=body.stop_sequences or (),
            stop_name="stop_sequences",
            constraint=text_constraint(body),
        ),
    )
    request_id = body.request_id or f"msg_{secrets.token_hex(12)}"
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"
    priority = body.priority or 0
    spec = GenerationSpec(
        RequestHead(ROUTE, request_id, model, bool(body.stream), priority, user),
        num_answers=1,
        echo=False,
        prepare=lambda: prepare_chat(
            *(state, caller, chat_of(body), params),
            priority=priority,
            user=user,
            cache_salt=body.cache_salt or "",
        ),
        blamed=params.blamed,
        is_long=True,  # a template is rendered by another process
        has_long_answer=False,
        formatter=lambda _: MessagesFormatter(request_id, model, shows_thinking),
    )
    return GenerationResponse(state, caller, spec)


@router.post(f"{ROUTE}/count_tokens", **documented(CountTokensBody, TokenCount, 529, error=MessageErrorBody))
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    state, options = state_of(request), state_of(request).options
    body = await read_json(request, CountTokensBody, options)
    state.check_model(body.model)
    state.check_task("generate")
    check_tokenizer(state)

    def answer() -> Response:
        chat = chat_of(body)
        check_size(state, "messages", num_characters([chat.messages, chat.tools]), "characters")
        _, token_ids = state.frontend.encode_chat(chat, text_limit(state))
        return respond(TokenCount(input_tokens=len(token_ids)))

    async with counted(state.admission, caller_of(request)):
        return await state.in_service_thread(answer)
