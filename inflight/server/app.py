"""The application: routes, errors, the gate before them."""

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
from inflight.server.access.middleware import AccessMiddleware
from inflight.server.anthropic import routes as messages
from inflight.server.error_shapes import error_at
from inflight.server.errors import ApiError, of_exception
from inflight.server.missing_routes import hint_for
from inflight.server.openai import routes as generation
from inflight.server.openai.responses import routes as responses
from inflight.server.openapi import document
from inflight.server.routes import control, health, replicas, service
from inflight.server.scoring import routes as pooling
from inflight.server.state import ServerState, state_of


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
