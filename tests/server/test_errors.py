"""What clients are told about errors from below: by class and code, never by the words of a message."""

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


def told(error: ApiError) -> tuple[int, Any]:
    found = msgspec.json.decode(error.body())["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return error.status, found


@pytest.mark.parametrize(("error", "status", "kind", "param", "code"), ROWS)
@pytest.mark.parametrize("far", [False, True], ids=["here", "over the wire"])
def test_errors_from_below(
    error: InflightError, status: int, kind: str, param: str | None, code: str | None, far: bool
) -> None:
    raised = RemoteError.of(error).error() if far else error
    found_status, found = told(of_exception(raised, retry_after=7))
    assert (found_status, found["type"], found["param"], found["code"]) == (status, kind, param, code)
    # What went wrong inside is not for clients.
    assert (found["message"] == str(error)) == (status in (400, 429))


def test_when_to_come_back() -> None:
    assert of_exception(QueueFullError("full"), retry_after=7).headers["retry-after"] == "7"
    assert "retry-after" in of_exception(EngineDeadError("it restarts")).headers
    assert "retry-after" not in of_exception(EngineError("broken")).headers


@pytest.mark.parametrize(
    ("code", "status", "told_code"),
    [
        ("no_token_allowed", 400, "no_token_allowed"),
        ("step_failed", 500, "engine_error"),
        ("logits_not_finite", 500, "engine_error"),
        (None, 500, "engine_error"),
    ],
)
def test_answers_that_end_with_an_error(code: str | None, status: int, told_code: str) -> None:
    delta = Delta("r", [], finish_reason="error", error=MISLEADING, error_code=code)
    found_status, found = told(of_answer(delta))
    assert (found_status, found["code"], found["param"]) == (status, told_code, None)
    assert MISLEADING not in found["message"]
