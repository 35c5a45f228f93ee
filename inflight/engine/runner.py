"""The protocol between the engine core and whatever computes its batches."""

from __future__ import annotations

from typing import Protocol, TypeVar

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
