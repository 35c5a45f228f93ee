"""Errors that clients get, in OpenAI's format or in Anthropic's.

Clients get what they can act on. Internal details, such as paths and addresses, are logged and never sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from inflight.errors import (
    EngineAsleepError,
    EngineDeadError,
    EngineError,
    GrammarWorkerError,
    QueueFullError,
    RequestError,
    TemplateWorkerError,
    clipped,
    shown,
)
from inflight.events import Delta
from inflight.logs import request_id

logger = logging.getLogger(__name__)

MESSAGES = "/v1/messages"
MODELS = "/v1/models"  # both APIs have it: Anthropic's clients send a header
OVERLOADED = 529  # Anthropic's status for 503

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class ApiError(Exception):
    """An error that is sent to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    def body(self) -> bytes:
        """Return the error as JSON in OpenAI's format."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _OPENAI_TYPES.get(self.status, "server_error"),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def response(self) -> Response:
        """Return the response in OpenAI's format."""
        return Response(self.body(), self.status, self.headers, "application/json")

    def anthropic_body(self, request_id: str | None) -> bytes:
        """Return the error as JSON in Anthropic's format, for a response or for the last event of a stream."""
        default_type = "invalid_request_error" if self.status < 500 else "api_error"
        detail: dict[str, object] = {
            "type": _ANTHROPIC_TYPES.get(self._anthropic_status, default_type),
            "message": self.message,
        }
        if self.code == "unsupported_parameter" and self.param == "thread":
            # Clients that use threads by default then send whole conversations instead.
            detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return msgspec.json.encode({"type": "error", "error": detail, "request_id": request_id})

    def anthropic_response(self, request_id: str | None) -> Response:
        """Return the response in Anthropic's format."""
        body = self.anthropic_body(request_id)
        return Response(body, self._anthropic_status, self.headers, "application/json")

    @property
    def _anthropic_status(self) -> int:
        return OVERLOADED if self.status == 503 else self.status


def invalid(param: str, message: str) -> ApiError:
    """Return the error for a parameter whose value is not allowed."""
    return ApiError(400, message, code="invalid_value", param=param)


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API."""
    path: str = scope["path"]
    if path == MODELS or path.startswith(f"{MODELS}/"):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return the response to an error, in the format of the API that the request is one of."""
    return error.anthropic_response(request_id.get()) if is_anthropic(scope) else error.response()


def of_exception(error: BaseException, retry_after: int = 1) -> ApiError:
    """Return the error to send to the client for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code=error.code, param=error.param)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code=error.code, retry_after=retry_after)
    if isinstance(error, TemplateWorkerError | GrammarWorkerError):
        logger.error("%s", error)
        is_template = isinstance(error, TemplateWorkerError)
        what = "chat templates cannot be rendered" if is_template else "constraints cannot be compiled"
        return ApiError(503, f"{what} at the moment: please retry", code=error.code, retry_after=1)
    if isinstance(error, EngineAsleepError):
        return ApiError(503, str(error), code=error.code, retry_after=5)
    if isinstance(error, EngineError):
        return _of_engine(str(error), isinstance(error, EngineDeadError), error.code)
    logger.error("internal server error in a request", exc_info=error)
    return ApiError(500, "internal server error (details are in the server log)", code="internal_error")


def _of_engine(reason: str, dead: bool, code: str | None) -> ApiError:
    """Return the error for a request whose engine failed, in one step or as a whole."""
    logger.error("the engine failed a request: %s", reason)
    if dead:
        message = "the engine is not running at the moment: please retry later"
        return ApiError(503, message, code="engine_unavailable", retry_after=5)
    if code == "poison_request":
        message = "several engines crashed while computing this request: do not send it again"
        return ApiError(500, message, code="poison_request")
    message = "the engine failed while computing this request: it is safe to retry"
    return ApiError(500, message, code="engine_error")


def of_answer(delta: Delta) -> ApiError:
    """Return the error for an answer that failed: its step did, or its parameters forbid every token."""
    if delta.error_code == "no_token_allowed":
        message = (
            "the parameters allow no next token: check allowed_token_ids, bad_words, "
            "min_tokens, repetition_penalty and constraints on the text"
        )
        return ApiError(400, message, code=delta.error_code)
    if delta.error_code == "constraint_failed":
        message = "the constraint on the answer became too complex: simplify it"
        return ApiError(400, message, code=delta.error_code)
    return _of_engine(str(delta.error), dead=False, code=delta.error_code)


def of_validation(errors: list[Any], unsupported: Mapping[str, str]) -> ApiError:
    """Return the error for the first problem of a body that pydantic has rejected."""
    # Where a union failed, the member that was matched deepest is the one that the client meant.
    error = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    path = _path(error)
    name = _spell(path)
    param = name or None
    if path and path[0] in unsupported:
        return ApiError(
            400,
            f"{path[0]} is not supported here: {unsupported[str(path[0])]}",
            code="unsupported_parameter",
            param=str(path[0]),
        )
    if error["type"] == "json_invalid":
        # Say where and why: some parsers accept nesting or lone surrogates that this one refuses.
        reason = error["msg"].removeprefix("Invalid JSON: ")
        return ApiError(400, f"the body is not valid JSON: {clipped(reason, 200)}", code="invalid_json")
    if error["type"] == "extra_forbidden":
        return ApiError(
            400, f"unknown parameter: {clipped(name, 200)}", code="unknown_parameter", param=name[:200]
        )
    if error["type"] == "missing":
        return ApiError(400, f"missing parameter: {name}", code="missing_parameter", param=param)
    value = shown(error.get("input"))
    messages = dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in errors if _path(e) == path)
    message = " or ".join(text[0].lower() + text[1:] for text in messages)
    where = f"{name} is {value}" if name else f"the body is {value}"
    return ApiError(400, f"{where}: {message}", code="invalid_value", param=param)


_TYPE_NAMES = ("str", "int", "float", "bool", "constrained-str")
_UNION_MEMBERS = ("list[", "dict[", "literal[", "tagged-union[", "<")  # the last one: tags of `by_type`


def _path(error: Any) -> list[Any]:
    """Return the location of an error, without the names of union members, which clients did not write."""
    return [
        part
        for part in error["loc"]
        if not (isinstance(part, str) and (part in _TYPE_NAMES or part.startswith(_UNION_MEMBERS)))
    ]


def _spell(path: list[Any]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
