"""An engine of replicas for callers who wait: what an interrupt leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from inflight import router
from inflight.config import EngineConfig, RouterConfig
from inflight.entrypoints.offline import ReplicatedEngine


def test_interrupted_start_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def start_router(*_: object, **__: object) -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)  # as it takes to end the engines that are on their way
            told.append("cleaned up")

    monkeypatch.setattr(router, "start_router", start_router)
    with pytest.raises(KeyboardInterrupt):
        ReplicatedEngine(EngineConfig.create(), RouterConfig(replicas=2), None)
    assert told == ["cleaned up"]
    assert not [thread for thread in threading.enumerate() if thread.name == "inflight-router"]
