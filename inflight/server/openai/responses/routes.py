"""/v1/responses."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.server.access.admission import counted
from inflight.server.engine_response import RequestHead
from inflight.server.errors import ApiError
from inflight.server.formatters import encode
from inflight.server.generation_response import GenerationResponse, GenerationSpec
from inflight.server.http.body import read_json
from inflight.server.observability.request_log import LoggedRequest
from inflight.server.openai.params import conversation_params
from inflight.server.openai.responses.conversation import text_constraint, user_of
from inflight.server.openai.responses.formatter import ResponsesFormatter, head_of
from inflight.server.openai.responses.input_listing import PageQuery
from inflight.server.openai.responses.schemas import (
    DeletedResponse,
    InputItemList,
    ResponseEvent,
    ResponseObject,
    ResponsesBody,
)
from inflight.server.openai.responses.store import ResponseContent, not_stored
from inflight.server.openai.responses.turn import ResponseTurn
from inflight.server.openapi import documented, respond
from inflight.server.state import caller_of, state_of

router = APIRouter()

ROUTE = "/v1/responses"


@router.post(ROUTE, **documented(ResponsesBody, ResponseObject, events=ResponseEvent))
async def create_response(request: Request) -> Response:
    """Answer a conversation, given as items, perhaps as what follows on an earlier response."""
    state, options = state_of(request), state_of(request).options
    body = await read_json(request, ResponsesBody, options)
    model = state.check_model(body.model)
    state.check_task("generate")
    caller = caller_of(request)
    params = await state.in_thread_if(
        body.is_large,
        caller,
        lambda: conversation_params(
            state,
            body,
            max_tokens=body.max_output_tokens,
            max_tokens_name="max_output_tokens",
            constraint=text_constraint(body),
        ),
    )
    turn = ResponseTurn(state, caller, body)
    response_id = body.request_id or f"resp_{secrets.token_hex(24)}"

    def formatter(created: int) -> ResponsesFormatter:
        head = head_of(response_id, created, model, body, params.sampling)
        return ResponsesFormatter(head, turn.ended if body.store is not False else None)

    spec = GenerationSpec(
        RequestHead(ROUTE, response_id, model, bool(body.stream), body.priority or 0, user_of(body)),
        num_answers=1,
        echo=False,
        prepare=lambda: turn.prepare(params),
        blamed=params.blamed,
        is_long=True,
        has_long_answer=False,
        formatter=formatter,
        before_prepare=turn.look_up,
        before_end=turn.keep,
    )
    return GenerationResponse(state, caller, spec)


@router.get(f"{ROUTE}/{{response_id}}", **documented(None, ResponseObject, 400, 404, 429))
async def response(request: Request) -> Response:
    """A response of yours that is stored, or as far as it is."""
    if request.query_params.get("stream", "false") != "false":
        message = "stream is not supported here: a stream is told once, to whoever asked the question"
        raise ApiError(400, message, code="unsupported_parameter", param="stream")
    return CountedResponse(request, lambda: _found(request))


@router.get(f"{ROUTE}/{{response_id}}/input_items", **documented(None, InputItemList, 400, 404, 429))
async def list_input_items(request: Request) -> Response:
    """List what a stored response of yours was made from: `limit`, `order` and `after` choose the page."""
    query, response_id = PageQuery.of(request.query_params), request.path_params["response_id"]

    async def read() -> ResponseContent:
        page = await state_of(request).responses.input_page(caller_of(request), response_id, query)
        if page is None:
            raise not_stored(response_id)
        return ResponseContent(page.encode())

    return CountedResponse(request, read)


@router.delete(f"{ROUTE}/{{response_id}}", **documented(None, DeletedResponse, 404))
async def delete_response(request: Request) -> Response:
    """Forget a response of yours. Those that went on from it have what they need."""
    response_id = request.path_params["response_id"]
    await state_of(request).responses.remove(caller_of(request), response_id)
    return respond(DeletedResponse(id=response_id))


@router.post(f"{ROUTE}/{{response_id}}/cancel", **documented(None, ResponseObject, 404, 429, 503))
async def cancel_response(request: Request) -> Response:
    """End a response of yours; one that has ended stays as it is."""
    running = _running(request)
    if running is not None:
        logged, formatter = running
        await state_of(request).request_log.cancel(logged)
        return Response(encode(formatter.so_far("cancelled")), media_type="application/json")
    return CountedResponse(request, lambda: _found(request))


def _running(request: Request) -> tuple[LoggedRequest, ResponsesFormatter] | None:
    """Return the response that is being written, even if an earlier one of the same id is stored."""
    response_id = request.path_params["response_id"]
    logged = state_of(request).request_log.find_running(caller_of(request), response_id)
    if logged is None or not isinstance(logged.formatter, ResponsesFormatter):
        return None
    return logged, logged.formatter


async def _found(request: Request) -> ResponseContent:
    """Return a response that is being written or stored. Raises ApiError 404 where there is none."""
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
