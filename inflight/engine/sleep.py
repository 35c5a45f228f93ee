"""An engine that sleeps: it keeps its weights in host memory, and no KV memory at all."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, Protocol

from inflight.engine.runner import Runner
from inflight.errors import EngineAsleepError, EngineError
from inflight.scheduling import Batch, Sampled

# What an engine can be told beside requests.
Command = Literal["reset_prefix_cache", "sleep", "wake_up"]


class SleepSupport(Protocol):
    """What a runner was made of, for an engine that is to do without it for a while."""

    def check(self) -> None:
        """Raises EngineError where it cannot be."""

    def sleep(self) -> None:
        """The runner is closed: put the weights into host memory."""

    def wake(self) -> Runner[Any]:
        """Bring them back. A runner over them, whose KV memory is empty."""


class NoSleepSupport:
    """Implements `SleepSupport` for those that cannot."""

    def check(self) -> NoReturn:
        raise EngineError(
            "this engine cannot sleep: its model is on several GPUs, or there is none", code="cannot_sleep"
        )

    def sleep(self) -> NoReturn:
        raise AssertionError("it cannot")

    wake = sleep


class SleepingRunner:
    """Implements `Runner`: there is none."""

    def launch(self, batch: Batch) -> NoReturn:  # noqa: ARG002
        raise asleep()

    def collect(self, handle: object) -> Sampled:  # noqa: ARG002
        raise AssertionError("nothing was launched")

    def close(self) -> None:
        """There is nothing to give back."""


def asleep() -> EngineAsleepError:
    return EngineAsleepError("the engine sleeps: wake it up first")
