"""Every error that inflight raises on purpose.

    InflightError
    ├── ConfigError            what the engine was told at start cannot work
    │   ├── ModelError         the checkpoint cannot be served
    │   │   ├── UnknownArchitectureError
    │   │   └── WeightsError   a weight file is missing, damaged, unsafe or of the wrong shape
    │   ├── KVBudgetError      the memory given holds too few KV blocks
    │   └── CheckpointChangedError  the files of the model are not those that the server started with
    ├── RequestError           one request is refused; the engine and its neighbours go on
    │   ├── ParameterError     a sampling parameter is out of range
    │   ├── PromptError        empty, too long, or ids outside the vocabulary
    │   └── TemplateError      the chat template failed, or broke its time or size limit
    ├── QueueFullError         the waiting queue is at its limit; try again later
    ├── TemplateWorkerError    the process that renders chat templates died or cannot be started; try again
    ├── GrammarWorkerError     the process that tries grammars died or cannot be started; try again
    └── EngineError            a step failed, or the engine has stopped
        ├── EngineAsleepError  the engine sleeps, and takes requests when it was woken up
        ├── DeviceLostError    the device does nothing any more; only a new process can use it again
        └── EngineDeadError    the engine is not there: it died, is being restarted, hangs or was closed

`RequestError` and its children are also `ValueError`, so code written for other engines catches them.
Messages say what was wrong, what was given and what is allowed. They are for people: what a program needs to know is
the class, `param` and `code`.
"""

from __future__ import annotations


def shown(value: object) -> str:
    """What was given, short enough for a message."""
    try:
        return f"{value!r:.100}"
    except ValueError:  # Python spells out no integer of thousands of digits
        return f"a huge {type(value).__name__}"


class InflightError(Exception):
    """The root of the tree."""

    param: str | None = None  # the parameter that is to blame, by the name under which it was given
    code: str | None = None  # what happened, for programs

    def __init__(self, *args: object, param: str | None = None, code: str | None = None) -> None:
        super().__init__(*args)
        if param is not None:
            self.param = param
        if code is not None:
            self.code = code


class ConfigError(InflightError, ValueError):
    """What the engine was told at start cannot work."""


class ModelError(ConfigError):
    """The checkpoint cannot be served."""


class UnknownArchitectureError(ModelError):
    """No family in `models/decoders/families.py` has this architecture."""


class WeightsError(ModelError):
    """A weight file is missing, damaged, unsafe or of the wrong shape."""


class KVBudgetError(ConfigError):
    """The memory given holds too few KV blocks."""


class CheckpointChangedError(ConfigError):
    """The files of the model are not those that the server started with."""

    code = "checkpoint_changed"


class RequestError(InflightError, ValueError):
    """One request is refused; the engine and its neighbours go on."""


class ParameterError(RequestError):
    """A sampling parameter is out of range."""


class PromptError(RequestError):
    """The prompt is empty, too long, or has ids outside the vocabulary."""


class TemplateError(RequestError):
    """The chat template failed, or broke its time or size limit."""


class QueueFullError(InflightError):
    """The waiting queue is at its limit; try again later."""

    code = "queue_full"


class TemplateWorkerError(InflightError, RuntimeError):
    """The process that renders chat templates died or cannot be started; try again."""

    code = "template_unavailable"


class GrammarWorkerError(InflightError, RuntimeError):
    """The process that tries grammars died or cannot be started; try again."""

    code = "grammar_unavailable"


class EngineError(InflightError, RuntimeError):
    """A step failed, or the engine has stopped."""

    code = "engine_error"


class EngineAsleepError(EngineError):
    """The engine sleeps, and takes requests when it was woken up."""

    code = "engine_asleep"


class DeviceLostError(EngineError):
    """The device does nothing any more; only a new process can use it again."""


class EngineDeadError(EngineError):
    """The engine is not there: it died, is being restarted, hangs or was closed."""

    code = "engine_unavailable"
