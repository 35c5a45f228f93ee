"""Errors in Anthropic's format, and the choice between it and OpenAI's by path."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from inflight.logs import request_id
from inflight.server.errors import ApiError

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def _status(error: ApiError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def error_body(error: ApiError, request_id: str | None) -> bytes:
    """Return the error as JSON, for a response or for the last event of a stream."""
    status = _status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail: dict[str, object] = {"type": kind, "message": error.message}
    if error.code == "unsupported_parameter" and error.param == "thread":
        # Clients that use threads by default then send whole conversations instead.
        detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})


def error_response(error: ApiError, request_id: str | None) -> Response:
    return Response(error_body(error, request_id), _status(error), error.headers, "application/json")


ANTHROPIC = "/v1/messages"


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def error_at(path: str, error: ApiError) -> Response:
    """Return the response to an error, in the format of the API that the path belongs to."""
    if is_anthropic(path):
        return error_response(error, request_id.get())
    return error.response()
