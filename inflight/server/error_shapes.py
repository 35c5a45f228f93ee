"""Errors in the shape of the API that they are answers to, also where no route was reached yet."""

from __future__ import annotations

from starlette.responses import Response

from inflight.server.errors import ApiError


def error_at(path: str, error: ApiError) -> Response:  # noqa: ARG001
    """What a client of this path is told. All are clients of OpenAI's API."""
    return error.response()
