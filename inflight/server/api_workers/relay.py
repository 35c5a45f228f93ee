"""HTTP requests that another process must answer: the main process, or the API worker that has the request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.errors import EngineDeadError
from inflight.server.access.keys import Caller
from inflight.server.access.middleware import ADMIN, ADMIN_ALONE, shows
from inflight.server.api_workers.messages import MAIN, RelayedRequest, RelayedResponse
from inflight.server.errors import ApiError, error_response, of_exception
from inflight.server.http.bodies import PacedSend
from inflight.server.state import ServerState

# The main process answers these paths and those below ADMIN. No other process has the admin key.
COMMON = frozenset({"/health", "/ping", "/ready", "/metrics", "/load", "/v1/requests", ADMIN}) | ADMIN_ALONE
REQUESTS = "/v1/requests/"  # followed by an id; answered by the worker that has or had the request
# Followed by an id; answered by the worker that writes it, or by any once it is stored.
RESPONSES = "/v1/responses/"

Relay = Callable[[RelayedRequest], Awaitable[RelayedResponse]]
# Called with the caller, or None for any, the request's id, and whether it must be running.
Find = Callable[[str | None, str, bool], Awaitable[int | None]]


class RelayMiddleware:
    """The outermost middleware of an API worker. A relayed request is checked by the process that answers it."""

    def __init__(self, app: ASGIApp, state: ServerState, number: int, find: Find, relay: Relay) -> None:
        self._app = app
        self._state = state
        self._number = number
        self._find = find
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            target = await self._target(scope)
            if target == self._number:
                return await self._app(scope, receive, send)
            relayed = await self._relay(relayed_request(scope, target))
        except EngineDeadError:
            message = "the process that has this request or response has just ended: send the request again"
            error = ApiError(503, message, code="api_worker_unavailable", retry_after=1)
            return await error_response(scope, error)(scope, receive, send)
        except Exception as raised:
            return await error_response(scope, of_exception(raised))(scope, receive, send)
        response = Response(relayed.body, relayed.status)
        response.raw_headers = relayed.headers
        paced = PacedSend(scope, send, self._state.unsent)
        try:
            return await response(scope, receive, paced)
        finally:
            paced.close()

    async def _target(self, scope: Scope) -> int:
        path: str = scope["path"]
        headers = Headers(scope=scope)
        if path in COMMON or path.startswith(f"{ADMIN}/"):
            with suppress(ApiError):  # the response counts against the key until it is read
                scope["inflight.caller"] = self._caller(headers)
            return MAIN
        route = next((prefix for prefix in (REQUESTS, RESPONSES) if path.startswith(prefix)), None)
        if route is None:
            return self._number
        request_id = path.removeprefix(route).partition("/")[0]
        if shows(scope) and self._state.keys.is_admin(headers.get("authorization")):
            number = await self._find(None, request_id, False)
            return self._number if number is None else number
        try:
            caller = self._caller(headers)
        except ApiError:  # this process rejects it as well as any other
            return self._number
        scope["inflight.caller"] = caller
        number = await self._find(caller.name, request_id, route == RESPONSES)
        return self._number if number is None else number

    def _caller(self, headers: Headers) -> Caller:
        return self._state.keys.find(headers.get("authorization"), headers.get("x-api-key"))


def relayed_request(scope: Scope, target: int) -> RelayedRequest:
    """Return an HTTP request as a message to another process."""
    return RelayedRequest(
        target,
        scope["method"],
        scope["path"],
        scope["query_string"],
        scope["scheme"],
        [(name, value) for name, value in scope["headers"] if name not in (b"content-length",)],
    )


async def answer_with(app: ASGIApp, request: RelayedRequest) -> RelayedResponse:
    """Return the response of this process's application to a request that another process relayed."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": None,
        "server": None,
        "state": {},
    }
    status, headers, parts = 500, list[tuple[bytes, bytes]](), list[bytes]()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return RelayedResponse(status, headers, b"".join(parts))
