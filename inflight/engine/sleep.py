"""Sleep mode: a sleeping engine keeps its weights in host memory and has no KV memory."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, Protocol

from inflight.engine.runner import Runner
from inflight.errors import EngineAsleepError, EngineError
from inflight.scheduling import Batch, Sampled

# The operations of an engine besides requests.
Command = Literal["reset_prefix_cache", "sleep", "wake_up"]


class SleepSupport(Protocol):
    """Moves the weights out of device memory and back, for an engine that sleeps without a runner."""

    def check(self) -> None:
        """Raise EngineError if the engine cannot sleep."""

    def sleep(self) -> None:
        """Move the weights to host memory. The runner is already closed."""

    def wake(self) -> Runner[Any]:
        """Move the weights back and return a new runner with empty KV memory."""


class NoSleepSupport:
    """Implements `SleepSupport` for engines that cannot sleep."""

    def check(self) -> NoReturn:
        raise EngineError(
            "this engine cannot sleep: sleep mode needs a model on exactly one GPU", code="cannot_sleep"
        )

    def sleep(self) -> NoReturn:
        raise AssertionError("unreachable: check() raises")

    wake = sleep


class SleepingRunner:
    """Implements `Runner` while the engine sleeps: it rejects every batch."""

    def launch(self, batch: Batch) -> NoReturn:  # noqa: ARG002
        raise asleep()

    def collect(self, handle: object) -> Sampled:  # noqa: ARG002
        raise AssertionError("nothing was launched")

    def close(self) -> None:
        """Do nothing: there are no resources to free."""


def asleep() -> EngineAsleepError:
    return EngineAsleepError("the engine is asleep: wake it up first")
