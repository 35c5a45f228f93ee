"""Errors as clients of Anthropic's API expect them."""

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
    """The JSON that says it, whether a response or the last event of a stream."""
    status = _status(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail: dict[str, object] = {"type": kind, "message": error.message}
    if error.code == "unsupported_parameter" and error.param == "thread":
        # By this, clients that thread unless told otherwise know to send whole conversations instead.
        detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})


def error_response(error: ApiError, request_id: str | None) -> Response:
    return Response(error_body(error, request_id), _status(error), error.headers, "application/json")


ANTHROPIC = "/v1/messages"


def is_anthropic(path: str) -> bool:
    """Whether it is one that Anthropic's API has, and not OpenAI's."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def error_at(path: str, error: ApiError) -> Response:
    """What a client of this path is told."""
    if is_anthropic(path):
        return error_response(error, request_id.get())
    return error.response()
