"""The built-in model in its own process, whose steps go wrong when a prompt tells them to."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inflight.config import EngineConfig
from inflight.engine.client import ModelFacts
from inflight.engine.core import EngineCore
from inflight.loading.load import load_core
from inflight.scheduling.batch import Batch, Sampled
from tests.support.seen import SeenRows

BUILD = "tests.server.faulty:build"
HANG, RAISE, SLOW = 1900, 1901, 1902  # first tokens of prompts
RAISES_AT = 30  # tokens


def hold_file(process_id: int) -> Path:
    """Holds what it names until it is taken away: a step of this engine, or the start of this process's engines."""
    return Path(tempfile.gettempdir()) / f"inflight-test-hold-{process_id}"


def crawl_file(process_id: int) -> Path:
    """While it is there, slow steps of this engine take ten times as long."""
    return Path(tempfile.gettempdir()) / f"inflight-test-crawl-{process_id}"


@contextlib.contextmanager
def no_engine_starts() -> Iterator[None]:
    """Engines that this process starts meanwhile come up afterwards."""
    with _there(hold_file(os.getpid())):
        yield


@contextlib.contextmanager
def crawling(process_id: int) -> Iterator[None]:
    """Slow requests of this engine last for seconds, however long the test takes for what it does meanwhile."""
    with _there(crawl_file(process_id)):
        yield


@contextlib.contextmanager
def _there(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def wait_while(file: Path) -> None:
    while file.exists():
        time.sleep(0.01)


class FaultyRunner:
    """Passes on to the model's runner. Faults come when a request's stream has begun."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._rows = SeenRows()
        self._crawl_file = crawl_file(os.getpid())

    def launch(self, batch: Batch) -> Any:
        seen = self._rows.see(batch)
        if any(request.token_ids[0] == SLOW for request in seen.requests):
            time.sleep(0.05 if self._crawl_file.exists() else 0.005)
        for request, end in zip(seen.requests, seen.ends, strict=True):
            first, num_outputs = request.token_ids[0], end - request.num_prompt_tokens
            if first == HANG and num_outputs == 3:
                hold_file(os.getpid()).touch()
                wait_while(hold_file(os.getpid()))
            elif first == RAISE and num_outputs == RAISES_AT:
                raise RuntimeError("/secret/path: broken on purpose")
        return self._real.launch(batch)

    def collect(self, handle: Any) -> Sampled:
        sampled: Sampled = self._real.collect(handle)
        return sampled

    def close(self) -> None:
        self._real.close()


def build(config: EngineConfig, progress: Callable[[int, int], None]) -> tuple[EngineCore, ModelFacts]:
    wait_while(hold_file(os.getppid()))
    core, facts = load_core(config, progress)
    core.runner = FaultyRunner(core.runner)
    return core, facts
