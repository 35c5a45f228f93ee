"""What the loop of an engine process tells of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inflight.engine.engine_loop import EngineLoop


class Surprised:
    """A core that is given work while it is asked for the time."""

    def __init__(self) -> None:
        self.now, self.has_work, self.work_comes = 0.0, False, False

    def clock(self) -> float:
        self.has_work = self.work_comes
        return self.now

    def stats(self) -> None: ...


def test_work_that_comes_now_has_not_waited_since_the_last_step() -> None:
    core: Any = Surprised()
    sockets: Any = SimpleNamespace(send=lambda _: None, incoming=SimpleNamespace(num_dropped=0))
    loop = EngineLoop(core, sockets)
    core.now, core.work_comes = 100.0, True  # after a long rest
    assert not loop.heartbeat().working
    assert loop.heartbeat().working
