"""Loading an engine into a user's process must not freeze that process's objects."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import inflight
from inflight import LLM
from inflight.config import EngineConfig
from inflight.execution.gpu import platform as cuda

# They own their process: the engine's, a rank's, the server's, an API worker's, and the load generator's.
OWNERS = {
    "execution/parallel/worker.py",
    "engine/remote/worker.py",
    "server/run.py",
    "server/api_workers/worker.py",
    "bench/load_generator.py",
}


def test_gpu_runner_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "GpuRunner", lambda *_, **__: SimpleNamespace(steps=None))
    platform = object.__new__(cuda.CudaPlatform)  # made without looking for a GPU
    before = gc.get_freeze_count()
    config = EngineConfig.create(model="none")
    decoder: Any = SimpleNamespace(shard=SimpleNamespace(collective=None))
    platform.runner(config, decoder, 8, 64)
    assert gc.get_freeze_count() <= before  # some of what tests have frozen may end meanwhile


def test_engine_leaves_the_garbage_collector_unchanged() -> None:
    before = gc.get_freeze_count()
    with LLM() as llm:
        llm.generate([[1, 2, 3]], use_tqdm=False)
        assert gc.get_freeze_count() <= before  # some of what tests have frozen may end meanwhile
        assert gc.isenabled()


def test_only_our_own_processes_call_gc_freeze() -> None:
    root = Path(inflight.__file__).parent
    actual = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"gc\.freeze\(", path.read_text())
    }
    assert actual == OWNERS
