"""The seam between deciding and computing."""

from __future__ import annotations

from typing import Protocol, TypeVar

from inflight.scheduling.batch import Batch, Sampled

HandleT = TypeVar("HandleT")


class Runner(Protocol[HandleT]):
    """Executes batches in the order they are launched.

    `launch` enqueues and returns at once where the device allows it; `collect` waits for one launched
    batch. The model runner, the fake runner of the tests and the simulator implement it.
    """

    def launch(self, batch: Batch) -> HandleT: ...

    def collect(self, handle: HandleT) -> Sampled: ...

    def close(self) -> None:
        """Give back what the runner holds."""
