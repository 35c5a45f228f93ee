"""Things that go wrong on purpose."""

from __future__ import annotations

from typing import Any

from inflight.engine import EngineCore
from inflight.scheduling import Batch, Sampled


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

    def collect(self, ticket: Any) -> Sampled:
        self._count("collect")
        return self.real.collect(ticket)

    def close(self) -> None:
        self.real.close()
