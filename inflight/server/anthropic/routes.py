"""/v1/messages, as in Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from inflight.frontend.chat import num_characters
from inflight.server.access.keys import counted
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
from inflight.server.engine_response import EngineCall, EngineResponse
from inflight.server.http.bodies import read_json
from inflight.server.openapi import documented, respond
from inflight.server.prepare import check_tokenizer, conversation_params, prepare_conversation
from inflight.server.routes.service import check_size, text_limit
from inflight.server.state import caller_of, state_of

router = APIRouter()

ROUTE = "/v1/messages"


@router.post(
    ROUTE, **documented(MessagesBody, MessageObject, 529, events=MessageEvent, error=MessageErrorBody)
)
async def create_message(request: Request) -> Response:
    """Answer a conversation, given as messages of content blocks."""
    call = await EngineCall.read(request, MessagesBody, "generate", "msg_", 12)
    state, caller, model, body = call.state, call.caller, call.model, call.body
    check(body)
    params = await state.in_thread_if(
        body.is_large,
        caller,
        lambda: conversation_params(
            model,
            body,
            max_tokens=body.max_tokens,
            stop=body.stop_sequences or (),
            stop_name="stop_sequences",
            constraint=text_constraint(body),
        ),
    )
    shows_thinking = body.thinking is None or body.thinking.display != "omitted"

    async def answer(response: EngineResponse) -> None:
        prepared = await state.in_thread(
            caller, lambda: prepare_conversation(model, chat_of(body), params, response.context)
        )
        await response.generate(prepared, params)

    formatter = MessagesFormatter(call.request_id, call.model_name, shows_thinking)
    return EngineResponse(call, answer, user_of(body), stream=body.stream, formatter=formatter)


@router.post(f"{ROUTE}/count_tokens", **documented(CountTokensBody, TokenCount, 529, error=MessageErrorBody))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""
    state = state_of(request)
    body = await read_json(request, CountTokensBody, state.options)
    model, _ = state.find_model(body.model, "generate")
    check_tokenizer(model)

    def answer() -> Response:
        chat = chat_of(body)
        check_size(state, "messages", num_characters([chat.messages, chat.tools]), "characters")
        _, token_ids = model.frontend.encode_chat(chat, text_limit(state))
        return respond(TokenCount(input_tokens=len(token_ids)))

    async with counted(state.admission, caller_of(request)):
        return await state.in_service_thread(answer)
