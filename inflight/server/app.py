"""The application: routes, error handlers, hints for paths that do not exist, and 503 while the model loads."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight import __version__
from inflight.errors import InflightError, shown
from inflight.server.access.middleware import AccessMiddleware
from inflight.server.anthropic import routes as messages
from inflight.server.errors import ApiError, error_response, of_exception
from inflight.server.openai import routes as generation
from inflight.server.openai.responses import routes as responses
from inflight.server.openapi import document, respond
from inflight.server.pages import PAGES, application_page, not_found_page
from inflight.server.routes import operations, replicas, requests, service, timeline
from inflight.server.routes.schemas import HealthStatus
from inflight.server.scoring import routes as pooling
from inflight.server.state import ServerState, state_of

_TEXT_ONLY = "only text input and output are supported"
_NO_LORA = "LoRA adapters are not supported yet: merge the adapter into a checkpoint"
_NO_PROFILER = "/v1/requests/{id} shows where a request's time went, and /metrics what the engine does"
_NO_RPC = "workers do not run code from clients"

# Requested by clients whose base URL lacks /v1.
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
    "/invocations": "use the route of the task, such as /v1/chat/completions",
    "/inference/v1/generate": "use /v1/completions with token ids and return_token_ids",
    "/tokenizer_info": "read the tokenizer's files in the checkpoint, or use /tokenize and /detokenize",
    "/scale_elastic_ep": "use /v1/replicas",
    "/is_scaling_elastic_ep": "use /v1/replicas",
    "/reset_mm_cache": _TEXT_ONLY,
    "/reset_encoder_cache": _TEXT_ONLY,
    "/pause": "use /v1/replicas/{id}/drain, or /sleep when no requests are running",
    "/resume": "use /v1/replicas, or /wake_up",
    "/v1/files": "files are not stored; send their text in the request",
    "/v1/batches": "send the requests one by one: the queue holds --max-queue of them",
    "/v1/assistants": "use /v1/responses",
    "/v1/threads": "use /v1/responses with previous_response_id",
    "/v1/moderations": "content is not moderated",
    "/redoc": "use /docs",
    "/generate": "use /v1/completions",
    "/v1/engines": "use /v1/models",
    "/v1": "this is the base URL for OpenAI clients; routes start with it, such as /v1/models",
}


def hint_for(path: str) -> str:
    """Return what to append to the error about a path that does not exist."""
    if path in _FORGOTTEN:
        return f": use /v1{path}"
    known = MISSING_ROUTES.get(path.rstrip("/"))
    if known is None and path.endswith("/"):
        return ": try it without the trailing slash"
    return "" if known is None else f": {known}"


def create_app(state: ServerState) -> ASGIApp:
    """Return the application that serves a state."""
    app = FastAPI(
        title="inflight",
        version=__version__,
        description="An LLM serving engine with OpenAI's and Anthropic's API.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    for routes in (
        generation,
        responses,
        messages,
        pooling,
        service,
        requests,
        timeline,
        replicas,
        operations,
    ):
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
    """Wrap the application in CORS, outermost since a browser's preflight request has no key."""
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
    api_error = of_exception(error, state.request_log.retry_after())
    state.metrics.refused[api_error.code or str(api_error.status)] += 1
    return error_response(request.scope, api_error)


async def _gone(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Answer a client that disconnected while sending its request. Only the log and the metrics see this."""
    return Response(status_code=499)


async def _not_routed(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path, or with a method that is not allowed."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        path = request.url.path
        message = f"unknown path {shown(path, 200)}{hint_for(path)}"
        if request.method == "GET" and _is_browser(request.scope):
            return not_found_page(message, request.scope.get("root_path", "") + "/")
        return error_response(request.scope, ApiError(404, message, code="unknown_path"))
    if error.status_code == 405:
        message = f"{request.method} is not allowed at {shown(request.url.path, 200)}"
        api_error = ApiError(405, message, code="method_not_allowed", headers=error.headers)
        return error_response(request.scope, api_error)
    return error_response(
        request.scope, ApiError(error.status_code, str(error.detail), headers=error.headers)
    )


# ---- before the model is loaded ----

RETRY_AFTER = 5  # seconds; the remaining load time is not known


class LoadingApp:
    """Answers 503 until `open` is called; then the application takes over on the same socket."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._progress: float | None = None

    def progress(self, num_done: int, num_total: int) -> None:
        """Set how many bytes of the weights are loaded. Any thread may call this."""
        self._progress = num_done / num_total if num_total else None

    def open(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._loading(scope) if self._app is None else self._app
        await app(scope, receive, send)

    def _loading(self, scope: Scope) -> Response:
        error = ApiError(
            503, "the model is loading: please retry later", code="loading", retry_after=RETRY_AFTER
        )
        if scope["path"] in PAGES and scope["method"] == "GET" and _is_browser(scope):
            page = application_page(error.status)
            page.headers.update(error.headers)
            return page
        if scope["path"] not in ("/health", "/ready", "/ping") or scope["method"] not in ("GET", "HEAD"):
            return error_response(scope, error)
        health = HealthStatus(
            status="loading", seconds_since_step=0.0, num_running=0, num_waiting=0, progress=self._progress
        )
        response = respond(health, error.status)
        response.headers.update(error.headers)
        return response


def _is_browser(scope: Scope) -> bool:
    """Return whether the client is a browser, which shows pages rather than JSON."""
    return "text/html" in Headers(scope=scope).get("accept", "")
