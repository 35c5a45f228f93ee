"""Log lines for people and for programs."""

from __future__ import annotations

import json
import logging
from typing import Any

from inflight.logs import JsonFormatter, TextFormatter, request_id


def record(message: str, **extra: Any) -> logging.LogRecord:
    found = logging.makeLogRecord({"name": "x", "levelno": 20, "levelname": "INFO", "msg": message, **extra})
    found.created = 1.25
    return found


def test_json_lines_have_time_level_message_and_request_id() -> None:
    token = request_id.set("req-1")
    try:
        line = JsonFormatter().format(record('a "quoted"\nline', status=200))
    finally:
        request_id.reset(token)
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.250Z",
        "level": "info",
        "logger": "x",
        "message": 'a "quoted"\nline',
        "request_id": "req-1",
        "status": 200,
    }
    assert json.loads(JsonFormatter("engine").format(record("x")))["process"] == "engine"


def test_text_lines_have_time_level_and_request_id() -> None:
    assert TextFormatter().format(record("hello")) == "1970-01-01T00:00:01.250Z INFO    hello"
    assert TextFormatter().format(record("hello", request_id="r")).endswith("[r] hello")
    assert TextFormatter("engine").format(record("hello")) == "1970-01-01T00:00:01.250Z INFO    engine: hello"
