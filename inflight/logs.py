"""Log formatters for text and JSON, with the id of the request. Prompts and keys are never logged."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

request_id: ContextVar[str | None] = ContextVar("inflight_request_id", default=None)

_FIELDS = ("method", "path", "status", "seconds", "key")


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line. `process` names the process that writes it."""

    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": _request_id(record),
        }
        fields |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None}, default=str)


class TextFormatter(logging.Formatter):
    """Writes the same as one line of text."""

    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = "" if process is None else f"{process}: "

    def format(self, record: logging.LogRecord) -> str:
        name = _request_id(record)
        who = f"[{name}] " if name else self._process
        text = f"{_time(record.created)} {record.levelname:7} {who}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _time(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03}Z"


def _request_id(record: logging.LogRecord) -> str | None:
    name: str | None = getattr(record, "request_id", None) or request_id.get()
    return name


def configure_logging(level: int | str, log_format: str, process: str | None = None) -> None:
    """Send all loggers of this process, and Python's warnings, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("inflight").setLevel(level.upper() if isinstance(level, str) else level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
