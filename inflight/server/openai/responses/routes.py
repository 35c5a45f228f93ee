"""/v1/responses."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.frontend.chat import num_characters
from inflight.server.access.keys import counted
from inflight.server.engine_response import EngineCall, EngineResponse
from inflight.server.errors import ApiError
from inflight.server.formatters import encode
from inflight.server.http.bodies import read_json
from inflight.server.observability.request_log import LoggedRequest
from inflight.server.openai.responses.conversation import (
    ResponseInput,
    ResponseTurn,
    text_constraint,
    user_of,
)
from inflight.server.openai.responses.formatter import ResponsesFormatter, head_of
from inflight.server.openai.responses.schemas import (
    TEXT_LOGPROBS,
    DeletedResponse,
    InputItemList,
    InputTokenCount,
    InputTokensBody,
    ResponseEvent,
    ResponseObject,
    ResponsesBody,
)
from inflight.server.openai.responses.store import PageQuery, ResponseContent, not_stored
from inflight.server.openai.responses.tools import ResponseTools
from inflight.server.openapi import documented, respond
from inflight.server.prepare import check_tokenizer, conversation_params
from inflight.server.routes.service import check_size, text_limit
from inflight.server.state import caller_of, state_of

logger = logging.getLogger(__name__)
router = APIRouter()

ROUTE = "/v1/responses"


@router.post(ROUTE, **documented(ResponsesBody, ResponseObject, events=ResponseEvent))
async def create_response(request: Request) -> Response:
    """Answer a conversation, given as items; it may continue an earlier response."""
    call = await EngineCall.read(request, ResponsesBody, "generate", "resp_", 24)
    state, caller, model, body = call.state, call.caller, call.model, call.body
    num_logprobs = _num_logprobs(body)
    params = await state.in_thread_if(
        body.is_large,
        caller,
        lambda: conversation_params(
            model,
            body,
            max_tokens=body.max_output_tokens,
            max_tokens_name="max_output_tokens",
            num_logprobs=num_logprobs,
            constraint=text_constraint(body),
        ),
    )
    tools = ResponseTools.from_body(body)
    if tools.dropped:
        logger.info("ignoring tools that this server does not run: %s", ", ".join(tools.dropped))
    turn = ResponseTurn(state, model, caller, body)
    reasoning = body.reasoning
    head = head_of(call.request_id, int(time.time()), call.model_name, body, params.sampling)

    async def answer(response: EngineResponse) -> None:
        await turn.look_up()
        prepared = await state.in_thread(caller, lambda: turn.prepare(params, response.context))
        await response.generate(prepared, params, before_end=turn.store)

    formatter = ResponsesFormatter(
        head,
        turn.set_ended if body.store is not False else None,
        tools=tools.by_name,
        with_summary=bool(reasoning and (reasoning.summary or reasoning.generate_summary)),
        num_logprobs=num_logprobs,
        tokenizer=model.frontend.tokenizer,
    )
    return EngineResponse(call, answer, user_of(body), stream=body.stream, formatter=formatter)


def _num_logprobs(body: ResponsesBody) -> int | None:
    """Return how many candidates each token is returned with, or None if there are no logprobs."""
    if TEXT_LOGPROBS in (body.include or ()):
        return body.top_logprobs or 0
    if body.top_logprobs:
        message = f"top_logprobs is given: it needs include to have {TEXT_LOGPROBS}"
        raise ApiError(400, message, param="top_logprobs")
    return None


@router.post(f"{ROUTE}/input_tokens", **documented(InputTokensBody, InputTokenCount, 429))
async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""
    state, caller = state_of(request), caller_of(request)
    body = await read_json(request, InputTokensBody, state.options)
    model, _ = state.find_model(body.model, "generate")
    check_tokenizer(model)
    conversation = ResponseInput(state, caller, body)

    def answer() -> Response:
        chat = conversation.chat()
        check_size(state, "input", num_characters([*chat.messages, *chat.offered_tools]), "characters")
        _, token_ids = model.frontend.encode_chat(chat, text_limit(state))
        return respond(InputTokenCount(input_tokens=len(token_ids)))

    async with counted(state.admission, caller):
        await conversation.look_up()
        return await state.in_service_thread(answer)


@router.get(f"{ROUTE}/{{response_id}}", **documented(None, ResponseObject, 400, 404, 429))
async def response(request: Request) -> Response:
    """Return one of your responses: stored, or in progress with the output so far."""
    if request.query_params.get("stream", "false") != "false":
        message = "stream is not supported here: a stored response cannot be streamed again"
        raise ApiError(400, message, code="unsupported_parameter", param="stream")
    return CountedResponse(request, lambda: _content(request))


@router.get(f"{ROUTE}/{{response_id}}/input_items", **documented(None, InputItemList, 400, 404, 429))
async def list_input_items(request: Request) -> Response:
    """List the input items of one of your stored responses; `limit`, `order` and `after` choose the page."""
    query, response_id = PageQuery.from_params(request.query_params), request.path_params["response_id"]

    async def read() -> ResponseContent:
        page = await state_of(request).responses.input_page(caller_of(request), response_id, query)
        if page is None:
            raise not_stored(response_id)
        return ResponseContent(page.encode())

    return CountedResponse(request, read)


@router.delete(f"{ROUTE}/{{response_id}}", **documented(None, DeletedResponse, 404))
async def delete_response(request: Request) -> Response:
    """Delete one of your responses. Responses that continue it are not affected."""
    response_id = request.path_params["response_id"]
    await state_of(request).responses.remove(caller_of(request), response_id)
    return respond(DeletedResponse(id=response_id))


@router.post(f"{ROUTE}/{{response_id}}/cancel", **documented(None, ResponseObject, 400, 404, 429, 503))
async def cancel_response(request: Request) -> Response:
    """Cancel one of your responses. One that was cancelled before is returned as it is."""
    running = _running(request)
    if running is not None:
        logged, formatter = running
        await state_of(request).request_log.cancel(logged)
        return Response(encode(formatter.so_far("cancelled")), media_type="application/json")
    return CountedResponse(request, lambda: _cancelled_content(request))


class _StatusOnly(msgspec.Struct):
    status: str


async def _cancelled_content(request: Request) -> ResponseContent:
    content = await _content(request)
    status = msgspec.json.decode(content.data, type=_StatusOnly).status
    if status != "cancelled":
        message = f"the response is {status}: only a response that is in progress can be cancelled"
        raise ApiError(400, message, code="response_ended")
    return content


def _running(request: Request) -> tuple[LoggedRequest, ResponsesFormatter] | None:
    """Return the response in progress, even if an earlier one of the same id is stored."""
    response_id = request.path_params["response_id"]
    logged = state_of(request).request_log.find_running(caller_of(request), response_id)
    if logged is None or not isinstance(logged.formatter, ResponsesFormatter):
        return None
    return logged, logged.formatter


async def _content(request: Request) -> ResponseContent:
    """Return a response that is in progress or stored. Raise ApiError 404 if there is none."""
    running = _running(request)
    if running is not None:
        return ResponseContent(encode(running[1].so_far()))
    response_id = request.path_params["response_id"]
    content = await state_of(request).responses.content(caller_of(request), response_id)
    if content is None:
        raise not_stored(response_id)
    return content


class CountedResponse(Response):
    """A response that counts against the limits of its key until its last byte is written."""

    background = None

    def __init__(self, request: Request, read: Callable[[], Awaitable[ResponseContent]]) -> None:
        self._state, self._caller, self._read = state_of(request), caller_of(request), read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with counted(self._state.admission, self._caller):
            content = await self._read()  # held to the end: other readers share it
            await Response(content.data, media_type="application/json")(scope, receive, send)
