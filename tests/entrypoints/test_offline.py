"""An engine of replicas for callers who wait: what an interrupt leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import traceback

import pytest

from inflight.config import EngineConfig, RouterConfig
from inflight.entrypoints.offline import ReplicatedEngine
from inflight.router import start
from tests.support.waiting import until


def functions_of_main_thread() -> list[str]:
    """Return the names of the functions that it is in."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return [summary.name for summary in traceback.extract_stack(frame)]


def test_interrupted_start_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def start_router(*_: object, **__: object) -> None:
        try:
            await until(lambda: "result" in functions_of_main_thread(), "a caller who waits")
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:  # to end the engines that are on their way takes longer than the caller to leave
            await until(lambda: "_end_thread" in functions_of_main_thread(), "a caller who leaves")
            told.append("cleaned up")

    monkeypatch.setattr(start, "start_router", start_router)
    with pytest.raises(KeyboardInterrupt):
        ReplicatedEngine(EngineConfig.create(), RouterConfig(replicas=2), None)
    assert told == ["cleaned up"]
    assert not [thread for thread in threading.enumerate() if thread.name == "inflight-router"]
