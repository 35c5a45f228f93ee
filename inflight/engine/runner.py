"""The protocol between the engine core and whatever computes its batches, awake or asleep.

A sleeping engine keeps its weights in host memory and has no KV memory.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol, TypeVar

from inflight.errors import EngineAsleepError, EngineError
from inflight.scheduling.batch import Batch, Sampled

HandleT = TypeVar("HandleT")


class Runner(Protocol[HandleT]):
    """Executes batches in the order they are launched.

    `launch` enqueues a batch and, if the device allows it, returns at once; `collect` waits for a launched batch.
    Implemented by the model runners, the fake runner of the tests and the simulator.
    """

    def launch(self, batch: Batch) -> HandleT: ...

    def collect(self, handle: HandleT) -> Sampled: ...

    def close(self) -> None:
        """Free the runner's resources."""


class ExpertCounts(Protocol):
    """Reads how many tokens each expert of a model has received."""

    def read(self, wait: bool) -> list[list[int]] | None:
        """Return the tokens so far by layer and expert. Without waiting, those at the time of the previous call, or
        None if they are not here yet."""


# ---- sleep mode ----


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
