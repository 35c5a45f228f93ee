"""Things that go wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inflight.engine.core import EngineCore
from inflight.scheduling.batch import Batch, Sampled
from tests.support.seen import SeenBatch, SeenRows


class BreakingRunner:
    """Passes on to a real runner, but raises at the given call of `launch` or of `collect`."""

    def __init__(self, core: EngineCore, method: str, at: int) -> None:
        self.real = core.runner
        self.method = method
        self.at = at
        self.num_calls = {"launch": 0, "collect": 0}
        core.runner = self

    def _count(self, method: str) -> None:
        self.num_calls[method] += 1
        if method == self.method and self.num_calls[method] == self.at:
            raise RuntimeError("broken on purpose")

    def launch(self, batch: Batch) -> Any:
        self._count("launch")
        return self.real.launch(batch)

    def collect(self, handle: Any) -> Sampled:
        self._count("collect")
        return self.real.collect(handle)

    def close(self) -> None:
        self.real.close()


class PoisonedRunner:
    """Passes on to a real runner, but every batch that `fault` finds bad raises, at `launch` or at `collect`.

    A batch that raises has been computed: what it leaves in memory is there, good or bad.
    """

    def __init__(self, core: EngineCore, fault: Callable[[SeenBatch], bool], method: str = "launch") -> None:
        self.real = core.runner
        self.rows = SeenRows()
        self.fault = fault
        self.method = method
        core.runner = self

    def launch(self, batch: Batch) -> tuple[Any, bool]:
        bad = self.fault(self.rows.see(batch))
        handle = self.real.launch(batch)
        if bad and self.method == "launch":
            self.real.collect(handle)
            raise RuntimeError("poisoned")
        return handle, bad

    def collect(self, handle: tuple[Any, bool]) -> Sampled:
        inner, bad = handle
        sampled = self.real.collect(inner)
        if bad:
            raise RuntimeError("poisoned")
        return sampled

    def close(self) -> None:
        self.real.close()


def begins_with(token_id: int) -> Callable[[SeenBatch], bool]:
    """A fault: the batch has a request whose prompt begins with the token."""
    return lambda batch: any(request.token_ids[0] == token_id for request in batch.requests)
