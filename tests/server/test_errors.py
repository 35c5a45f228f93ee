"""Clients get errors by the exception's class and code, never by the words of its message."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inflight.errors import (
    DeviceLostError,
    EngineDeadError,
    EngineError,
    GrammarWorkerError,
    InflightError,
    ParameterError,
    PromptError,
    QueueFullError,
    RequestError,
    TemplateError,
    TemplateWorkerError,
)
from inflight.events import Delta
from inflight.processes.channel import RemoteError
from inflight.server.errors import ApiError, of_answer, of_exception

# Words that a message must not be read for.
MISLEADING = "top_p: the prompt is over max_model_len, the sampling parameters allow no token"

ROWS: list[tuple[InflightError, int, str, str | None, str | None]] = [
    (RequestError(MISLEADING), 400, "invalid_request_error", None, None),
    (ParameterError(MISLEADING, param="n"), 400, "invalid_request_error", "n", None),
    (PromptError(MISLEADING, param="prompt"), 400, "invalid_request_error", "prompt", None),
    (PromptError("x", param="prompt", code="odd"), 400, "invalid_request_error", "prompt", "odd"),
    (TemplateError(MISLEADING), 400, "invalid_request_error", None, None),
    (QueueFullError(MISLEADING), 429, "rate_limit_error", None, "queue_full"),
    (TemplateWorkerError(MISLEADING), 503, "service_unavailable_error", None, "template_unavailable"),
    (GrammarWorkerError(MISLEADING), 503, "service_unavailable_error", None, "grammar_unavailable"),
    (EngineError(MISLEADING), 500, "server_error", None, "engine_error"),
    (EngineError("x", code="step_failed"), 500, "server_error", None, "engine_error"),
    (DeviceLostError(MISLEADING), 500, "server_error", None, "engine_error"),
    (EngineDeadError(MISLEADING), 503, "service_unavailable_error", None, "engine_unavailable"),
    (InflightError(MISLEADING), 500, "server_error", None, "internal_error"),
]


def sent(error: ApiError) -> tuple[int, Any]:
    error_object = msgspec.json.decode(error.body())["error"]
    assert set(error_object) == {"message", "type", "param", "code"}
    return error.status, error_object


@pytest.mark.parametrize(("error", "status", "kind", "param", "code"), ROWS)
@pytest.mark.parametrize("is_remote", [False, True], ids=["here", "over the wire"])
def test_exceptions_get_their_status_type_and_code(
    error: InflightError, status: int, kind: str, param: str | None, code: str | None, is_remote: bool
) -> None:
    raised = RemoteError.from_exception(error).error() if is_remote else error
    sent_status, error_object = sent(of_exception(raised, retry_after=7))
    assert (sent_status, error_object["type"], error_object["param"], error_object["code"]) == (
        status,
        kind,
        param,
        code,
    )
    # Internal details are not sent to clients.
    assert (error_object["message"] == str(error)) == (status in (400, 429))


def test_retry_after_is_sent_where_a_retry_can_help() -> None:
    assert of_exception(QueueFullError("full"), retry_after=7).headers["retry-after"] == "7"
    assert "retry-after" in of_exception(EngineDeadError("it restarts")).headers
    assert "retry-after" not in of_exception(EngineError("broken")).headers


@pytest.mark.parametrize(
    ("code", "status", "sent_code"),
    [
        ("no_token_allowed", 400, "no_token_allowed"),
        ("step_failed", 500, "engine_error"),
        ("logits_not_finite", 500, "engine_error"),
        (None, 500, "engine_error"),
    ],
)
def test_failed_answers_get_their_status_and_code(code: str | None, status: int, sent_code: str) -> None:
    delta = Delta("r", [], finish_reason="error", error=MISLEADING, error_code=code)
    sent_status, error_object = sent(of_answer(delta))
    assert (sent_status, error_object["code"], error_object["param"]) == (status, sent_code, None)
    assert MISLEADING not in error_object["message"]
