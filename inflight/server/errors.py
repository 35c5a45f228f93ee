"""Errors as clients of OpenAI's API expect them: a status, and an object with message, type, param and code.

What is told is what the client can act on. What went wrong inside is logged, never sent: no paths, no addresses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from inflight.errors import EngineDeadError, EngineError, QueueFullError, RequestError
from inflight.request import SamplingParams

logger = logging.getLogger(__name__)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer that is an error."""

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
        """The JSON that says it."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": _TYPES.get(self.status, "server_error"),
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


def of_exception(error: BaseException, retry_after: int = 1) -> ApiError:
    """What a client is told about an error raised below."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        if "max_model_len" in str(error):
            return too_long(str(error).replace("the prompt has", "it has"))
        return ApiError(400, str(error), param=_param(str(error)))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=retry_after)
    if isinstance(error, EngineError):
        return of_engine(str(error), dead=isinstance(error, EngineDeadError))
    logger.error("a request failed inside the server", exc_info=error)
    return ApiError(500, "the server made a mistake and has logged it", code="internal_error")


def too_long(detail: str) -> ApiError:
    """The prompt does not fit. Routers know such a refusal by these words, and try a model with more room."""
    message = f"the prompt is longer than the model's context length: {detail}"
    return ApiError(400, message, code="context_length_exceeded", param="prompt")


def of_engine(reason: str, dead: bool) -> ApiError:
    """The engine failed under a request: its batch's step, or as a whole."""
    logger.error("the engine ended a request: %s", reason)
    if dead:
        message = "the engine is not running at the moment: send the request again in a while"
        return ApiError(503, message, code="engine_unavailable", retry_after=5)
    message = "the engine failed while it computed this request: it may be sent again"
    return ApiError(500, message, code="engine_error")


def of_answer(reason: str, params: SamplingParams) -> ApiError:
    """An answer ended with an error: its step failed, or its own parameters forbid every token."""
    constrained = (
        params.min_tokens or params.allowed_token_ids or params.bad_words or params.repetition_penalty != 1
    )
    if constrained and "no token is allowed" in reason:
        message = (
            "the parameters leave no token that may come next: look at allowed_token_ids, bad_words, "
            "min_tokens and repetition_penalty"
        )
        return ApiError(400, message, code="no_token_allowed")
    return of_engine(reason, dead=False)


_NAMES = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop", "seed"),
    *("repetition_penalty", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "stop_token_ids"),
    *("logit_bias", "allowed_token_ids", "bad_words", "priority", "cache_salt", "prompt", "messages"),
)


def _param(message: str) -> str | None:
    """The parameter that a refusal is about: the one named first."""
    words = message.replace("[", " ").replace("a stop string", "stop").replace("the prompt", "prompt").split()
    return next((word for word in words[:8] if word in _NAMES), None)


def of_validation(errors: list[Any], unsupported: Mapping[str, str]) -> ApiError:
    """The first thing that is wrong with a body, in words."""
    # Of a union's members the one that went deepest is what the client meant.
    error = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    place = _place(error)
    name = _spell(place)
    param = name or None
    if place and place[0] in unsupported:
        return ApiError(
            400,
            f"{place[0]} is not supported here: {unsupported[str(place[0])]}",
            code="unsupported_parameter",
            param=str(place[0]),
        )
    if error["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {name:.200}", code="unknown_parameter", param=name[:200])
    if error["type"] == "missing":
        return ApiError(400, f"missing parameter: {name}", code="missing_parameter", param=param)
    shown = _shown(error.get("input"))
    messages = dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in errors if _place(e) == place)
    message = " or ".join(text[0].lower() + text[1:] for text in messages)
    where = f"{name} is {shown}" if name else f"the body is {shown}"
    return ApiError(400, f"{where}: {message}", code="invalid_value", param=param)


_TYPE_NAMES = ("str", "int", "float", "bool", "constrained-str")


def _place(error: Any) -> list[Any]:
    """Where an error is, less the names of union members, which clients have not written."""
    return [
        part
        for part in error["loc"]
        if not (isinstance(part, str) and (part in _TYPE_NAMES or part.startswith(("list[", "literal["))))
    ]


def _spell(place: list[Any]) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _shown(value: object) -> str:
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python spells out no integer of thousands of digits
        return f"a huge {type(value).__name__}"
