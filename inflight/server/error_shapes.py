"""Errors in the shape of the API that they are answers to, also where no route was reached yet."""

from __future__ import annotations

from starlette.responses import Response

from inflight.logs import request_id
from inflight.server.anthropic.errors import error_response
from inflight.server.errors import ApiError

ANTHROPIC = "/v1/messages"


def is_anthropic(path: str) -> bool:
    """Whether it is one that Anthropic's API has, and not OpenAI's."""
    return path == ANTHROPIC or path.startswith(f"{ANTHROPIC}/")


def error_at(path: str, error: ApiError) -> Response:
    """What a client of this path is told."""
    if is_anthropic(path):
        return error_response(error, request_id.get())
    return error.response()
