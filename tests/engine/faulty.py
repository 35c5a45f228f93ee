"""Engines for their own process, over the fake runner, that go wrong when a prompt tells them to.

`build` is what `ProcessClient.start(..., build="tests.engine.faulty:build")` names. The first token of a prompt is
the fault; the engine's `model` option is one that happens at the start. `script:FILE` reads it from a file, so that it
can be another one at each start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from inflight.config import EngineConfig
from inflight.engine.client import ModelFacts
from inflight.engine.core import EngineCore
from inflight.errors import KVBudgetError
from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import ChainHashCache
from inflight.scheduling.batch import Batch, Sampled
from inflight.scheduling.policy import make_policy
from inflight.scheduling.request_pool import Limits
from inflight.scheduling.scheduler import Scheduler
from tests.support.fake_runner import FakeRunner
from tests.support.seen import SeenRows

BUILD = "tests.engine.faulty:build"
NUM_BLOCKS = 4096
HANG, RAISE, DIE, STOP, SLOW, TELL = 40, 41, 42, 43, 44, 45  # first tokens of prompts
TELLS_AT = 300  # tokens


class FaultyRunner(FakeRunner):
    """The fake runner, with faults."""

    def __init__(self, num_blocks: int, tells: Path | None = None) -> None:
        """`tells`: the file to create when a request that begins with `TELL` has many tokens."""
        super().__init__(num_blocks, KVLayout(4))
        self._seen = SeenRows()
        self._tells = tells

    def launch(self, batch: Batch) -> Sampled:
        seen = self._seen.see(batch)
        for request, end in zip(seen.requests, seen.ends, strict=True):
            match request.token_ids[0]:
                case 40:
                    time.sleep(3600)
                case 41:
                    raise RuntimeError("broken on purpose")
                case 42:
                    os.kill(os.getpid(), signal.SIGKILL)
                case 44:
                    time.sleep(0.005)
                case 45 if end == TELLS_AT and self._tells is not None:
                    self._tells.touch()
        return super().launch(batch)


class StoppingCore(EngineCore):
    """A loop that ends with an error."""

    def step(self) -> list[object]:  # type: ignore[override]
        if any(request.token_ids[0] == STOP for request in self.scheduler.pool.requests.values()):
            raise MemoryError("no more")
        return super().step()  # type: ignore[return-value]


def build(config: EngineConfig, progress: Callable[[int, int], None]) -> tuple[EngineCore, ModelFacts]:
    fault, _, argument = (config.model.model or "").partition(":")
    if fault == "script":
        script = Path(argument)
        with script.with_suffix(".starts").open("a") as starts:
            starts.write(f"{os.getpid()}\n")
        fault, _, argument = script.read_text().partition(":")
    match fault:
        case "hang":
            time.sleep(3600)
        case "crawl":  # progress, and in the end an engine
            for done in range(int(argument)):
                progress(done, int(argument))
                time.sleep(0.1)
        case "refuse":
            error = KVBudgetError("too few blocks: 7 – see")
            error.add_note("a note")
            raise error
        case "raise":
            raise ZeroDivisionError("unlucky")
        case "die":
            os._exit(7)
    progress(1, 2)
    limits = Limits(config.scheduler.max_num_seqs or 256, 64, 1 << 30)
    num_blocks = config.cache.num_blocks or NUM_BLOCKS
    scheduler = Scheduler(
        limits,
        make_policy(config.scheduler.policy),
        BlockManager(num_blocks, KVLayout(4), ChainHashCache(KVLayout(4))),
    )
    runner = FaultyRunner(num_blocks, Path(argument) if fault == "tell" else None)
    core = StoppingCore(scheduler, runner, max_queue=config.scheduler.max_queue)
    facts = ModelFacts("faulty", 50, 4096, (), {}, None, "cpu", "none", num_blocks, 4, 8, 64)
    return core, replace(facts, fingerprint=argument if fault == "weights" else "")
