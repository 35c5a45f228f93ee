"""Paths that clients look for and that are not here: what to say about them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from inflight import __version__
from inflight.errors import InflightError
from inflight.server.anthropic import routes as messages
from inflight.server.anthropic.errors import error_at
from inflight.server.errors import ApiError, of_exception
from inflight.server.http.middleware import AccessMiddleware
from inflight.server.openai import routes as generation
from inflight.server.openai.responses import routes as responses
from inflight.server.openapi import document
from inflight.server.routes import control, health, replicas, service
from inflight.server.scoring import routes as pooling
from inflight.server.state import ServerState, state_of

_TEXT_ONLY = "only text is read and written"
_NO_LORA = "there are no adapters yet: merge it into a checkpoint"
_NO_PROFILER = "/v1/requests/{id} says where a request's time went, and /metrics what the engine does"
_NO_RPC = "there are no workers that run code of callers"

# By clients whose base URL lacks /v1.
_FORGOTTEN = ("/chat/completions", "/completions", "/messages", "/responses", "/embeddings", "/models")

MISSING_ROUTES: dict[str, str] = {
    "/pooling": "use /v1/embeddings, /score or /classify",
    "/v1/audio/transcriptions": _TEXT_ONLY,
    "/v1/audio/translations": _TEXT_ONLY,
    "/v1/audio/speech": _TEXT_ONLY,
    "/v1/images/generations": _TEXT_ONLY,
    "/v1/realtime": _TEXT_ONLY,
    "/v1/load_lora_adapter": _NO_LORA,
    "/v1/unload_lora_adapter": _NO_LORA,
    "/start_profile": _NO_PROFILER,
    "/stop_profile": _NO_PROFILER,
    "/collective_rpc": _NO_RPC,
    "/invocations": "use the route of what is asked for, as /v1/chat/completions",
    "/inference/v1/generate": "use /v1/completions with token ids and return_token_ids",
    "/tokenizer_info": "the tokenizer's files are the checkpoint's; /tokenize and /detokenize are here",
    "/scale_elastic_ep": "use /v1/replicas",
    "/is_scaling_elastic_ep": "use /v1/replicas",
    "/reset_mm_cache": _TEXT_ONLY,
    "/reset_encoder_cache": _TEXT_ONLY,
    "/pause": "use /v1/replicas/{id}/drain, or /sleep when no request is left",
    "/resume": "use /v1/replicas, or /wake_up",
    "/v1/files": "nothing is kept here; send what is to be read",
    "/v1/batches": "send the requests themselves: the queue takes --max-queue of them",
    "/v1/assistants": "use /v1/responses",
    "/v1/threads": "use /v1/responses with previous_response_id",
    "/v1/moderations": "no one looks at what is written here",
    "/redoc": "use /docs",
    "/generate": "use /v1/completions",
    "/v1/engines": "use /v1/models",
    "/v1": "routes begin with it, as /v1/models does; it is the base URL of OpenAI's clients",
}


def hint_for(path: str) -> str:
    """What follows the words that there is nothing at this path."""
    if path in _FORGOTTEN:
        return f": it is at /v1{path}"
    known = MISSING_ROUTES.get(path.rstrip("/"))
    if known is None and path.endswith("/"):
        return ": try it without the slash at its end"
    return "" if known is None else f": {known}"


def create_app(state: ServerState) -> ASGIApp:
    """Everything between the wire and the engine."""
    app = FastAPI(
        title="inflight",
        version=__version__,
        description="An LLM serving engine with OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    for routes in (generation, responses, messages, pooling, service, replicas, control, health):
        app.include_router(routes.router)
    app.add_exception_handler(ApiError, _failed)
    app.add_exception_handler(InflightError, _failed)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(Exception, _failed)

    def openapi() -> dict[str, Any]:
        return document(app, with_keys=state.keys.required)

    app.openapi = openapi  # type: ignore[method-assign]
    return _with_cors(AccessMiddleware(app, state), state)


def _with_cors(app: ASGIApp, state: ServerState) -> ASGIApp:
    """Outermost: a browser asks before it sends a key."""
    options = state.options
    if not options.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=["x-request-id", "retry-after"],
    )


async def _failed(request: Request, error: Exception) -> Response:
    state = state_of(request)
    told = of_exception(error, state.request_log.retry_after())
    state.metrics.refused[told.code or str(told.status)] += 1
    return error_at(request.url.path, told)


async def _gone(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """The client left before its request was complete. No one reads this; the log and the counters see it."""
    return Response(status_code=499)


async def _not_routed(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = request.url.path
        message = f"there is nothing at {path!r:.200}{hint_for(path)}"
        return error_at(path, ApiError(404, message, code="unknown_path"))
    if error.status_code == 405:
        message = f"{request.method} is not allowed at {request.url.path!r:.200}"
        told = ApiError(405, message, code="method_not_allowed", headers=error.headers)
        return error_at(request.url.path, told)
    return error_at(request.url.path, ApiError(error.status_code, str(error.detail), headers=error.headers))
