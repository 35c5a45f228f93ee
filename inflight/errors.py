"""Every error that inflight raises on purpose.

    InflightError
    ├── ConfigError            the configuration cannot work
    │   ├── ModelError         the checkpoint cannot be served
    │   │   ├── UnknownArchitectureError
    │   │   └── WeightsError   a weight file is missing, damaged, unsafe or of the wrong shape
    │   ├── KVBudgetError      the memory holds too few KV blocks
    │   └── CheckpointChangedError  the model's files changed since the server started
    ├── RequestError           one request is rejected; other requests are not affected
    │   ├── ParameterError     a parameter is out of range
    │   ├── PromptError        the prompt is empty, too long, or has ids outside the vocabulary
    │   └── TemplateError      the chat template failed or exceeded its time or size limit
    ├── QueueFullError         the waiting queue is full; try again later
    ├── TemplateWorkerError    the process that renders chat templates died or could not start; try again
    ├── GrammarWorkerError     the process that checks grammars died or could not start; try again
    └── EngineError            a step failed, or the engine has stopped
        ├── EngineAsleepError  the engine is sleeping; wake it up first
        ├── DeviceLostError    the device stopped working; only a new process can use it again
        └── EngineDeadError    the engine is unavailable: it died, restarts, hangs or was closed

`RequestError` and its children are also `ValueError`, so code written for other engines catches them.
Messages say what was wrong, what was given and what is allowed. Programs should rely on the class, `param` and `code`.
"""

from __future__ import annotations

from typing import Self


def clipped(text: str, limit: int) -> str:
    """Return a text that is short enough for a message. A text that was cut ends with an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def as_gib(size: float) -> str:
    """Return a number of bytes as text: in GiB, unless it is tiny."""
    return f"{size / (1 << 30):,.2f} GiB" if size >= 10 << 20 else f"{size:,.0f} bytes"


def shown(value: object, limit: int = 100) -> str:
    """Return a value's repr, short enough for a message."""
    try:
        return clipped(repr(value), limit)
    except ValueError:  # Python does not convert integers with thousands of digits
        return f"a huge {type(value).__name__}"


class InflightError(Exception):
    """The base class of all errors."""

    param: str | None = None  # the parameter at fault, as the caller named it
    code: str | None = None  # what happened, for programs

    def __init__(self, *args: object, param: str | None = None, code: str | None = None) -> None:
        super().__init__(*args)
        if param is not None:
            self.param = param
        if code is not None:
            self.code = code

    @classmethod
    def of_value(cls, param: str, value: object, reason: str) -> Self:
        """Return the error for a value that a parameter must not have."""
        return cls(f"{param} is {shown(value)}: {reason}", param=param)


class ConfigError(InflightError, ValueError):
    """The configuration cannot work."""


class ModelError(ConfigError):
    """The checkpoint cannot be served."""


class UnknownArchitectureError(ModelError):
    """No family in `models/decoders/families.py` has this architecture."""


class WeightsError(ModelError):
    """A weight file is missing, damaged, unsafe or of the wrong shape."""


class KVBudgetError(ConfigError):
    """The memory holds too few KV blocks."""


class CheckpointChangedError(ConfigError):
    """The model's files changed since the server started."""

    code = "checkpoint_changed"


class RequestError(InflightError, ValueError):
    """One request is rejected; other requests are not affected."""


class ParameterError(RequestError):
    """A parameter is out of range."""


class PromptError(RequestError):
    """The prompt is empty, too long, or has ids outside the vocabulary."""


class TemplateError(RequestError):
    """The chat template failed or exceeded its time or size limit."""


class QueueFullError(InflightError):
    """The waiting queue is full; try again later."""

    code = "queue_full"


class TemplateWorkerError(InflightError, RuntimeError):
    """The process that renders chat templates died or could not start; try again."""

    code = "template_unavailable"


class GrammarWorkerError(InflightError, RuntimeError):
    """The process that checks grammars died or could not start; try again."""

    code = "grammar_unavailable"


class EngineError(InflightError, RuntimeError):
    """A step failed, or the engine has stopped."""

    code = "engine_error"


class EngineAsleepError(EngineError):
    """The engine is sleeping; wake it up first."""

    code = "engine_asleep"


class DeviceLostError(EngineError):
    """The device stopped working; only a new process can use it again."""


class EngineDeadError(EngineError):
    """The engine is unavailable: it died, restarts, hangs or was closed."""

    code = "engine_unavailable"
