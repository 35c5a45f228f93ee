"""Hundreds of requests of all kinds, more than a third of which end at random moments: nothing is left behind. Nor is
anything left of an engine that was killed meanwhile.

INFLIGHT_SOAK=20000 makes it thousands, has the engine hang too, and prints what was seen.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from inflight import LLM
from inflight.constraints import trial_worker, validator
from inflight.frontend.text import render_worker
from inflight.frontend.text.chat_template import RenderLimits
from tests.server.live import ProcessBackend, live_server
from tests.server.soak import NUM_AT_ONCE, Question, Soak, questions_of
from tests.server.test_command import serving
from tests.support.processes import children
from tests.support.waiting import SECONDS, until, wait_until

IS_LONG = "INFLIGHT_SOAK" in os.environ
NUM_REQUESTS = int(os.environ.get("INFLIGHT_SOAK", "160"))
NUM_KILLS, NUM_HANGS = (12, 4) if IS_LONG else (1, 0)  # a hang takes a minute to be found
NUM_BLOCKS = 1024
MIB = 1 << 20
# The worker processes of a server besides engines, and their maximum number. They come and go.
MOST_WORKERS = {
    render_worker.__file__: RenderLimits().max_workers,
    trial_worker.__file__: validator.NUM_WORKERS,
}
HANGS_AFTER = 3600 if IS_LONG else 300  # seconds
pytestmark = pytest.mark.timeout(HANGS_AFTER)


@pytest.fixture(scope="module")
def questions(llm: LLM) -> list[Question]:
    return questions_of(llm)


def test_soak_leaves_no_request_task_or_block_behind(questions: list[Question]) -> None:
    backend = ProcessBackend(num_blocks=512, max_num_seqs=24, max_queue=256)
    try:
        with live_server(backend) as live:
            asyncio.run(Soak(live.url, questions, seed=0).run(2 * NUM_AT_ONCE))
            live.wait_until_idle()
            num_tasks = backend.run(num_tasks_of(live.server))
            soak = Soak(live.url, questions, seed=1)
            asyncio.run(soak.run(NUM_REQUESTS))
            assert not soak.seen["lost"]
            live.wait_until_idle()
            client = backend.client
            assert not client._requests
            assert not client._open
            assert not client._calls
            assert not any(caller.num_running for caller in live.state.keys.callers)
            assert live.state.metrics.num_disconnects > 0
            backend.run(num_tasks_of(live.server))  # all that were theirs are over
            live.wait_until("no more tasks than before", lambda: len(asyncio.all_tasks()) <= num_tasks)
            kv = backend.run(backend.engine.stats()).kv
            assert (kv.num_used, kv.num_empty + kv.num_cached) == (0, 512)
    finally:
        backend.close()


async def num_tasks_of(server: Any) -> int:
    """Return the number of tasks once the server has no connections."""
    state = server.server_state
    await until(lambda: not state.connections and not state.tasks, "the end of all connections")
    return len(asyncio.all_tasks())


# ---- the command, seen from outside ----


@dataclass(frozen=True)
class Serving:
    """`inflight serve`, and the folder that it has for temporary files."""

    process: subprocess.Popen[str]
    http: httpx.Client
    folder: Path

    def soak(self, questions: list[Question], seed: int) -> Soak:
        return Soak(str(self.http.base_url), questions, seed)

    def engines(self) -> list[int]:
        return sorted(children(self.process.pid, "inflight.engine.remote.worker"))

    def samples(self, name: str) -> list[Sample]:
        """The values of a metric."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return [sample for family in families if family.name == name for sample in family.samples]

    def blocks(self) -> dict[str, float]:
        return {sample.labels["state"]: sample.value for sample in self.samples("inflight:kv_blocks")}

    def num_disconnects(self) -> float:
        return sum(sample.value for sample in self.samples("inflight:disconnects"))

    def wait_until_idle(self) -> None:
        wait_until(
            lambda: self.http.get("/ready").status_code == 200 and not self.blocks()["used"],
            "an idle server",
            3 * SECONDS,  # a hang has to be found first
        )


@pytest.fixture(scope="module")
def server(questions: list[Question], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that has already handled every kind of request."""
    folder = tmp_path_factory.mktemp("temporary")
    options = ("--max-num-seqs", "24", "--request-history", "64", "--no-log-requests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        with serving(*options, "--max-restarts", "1000") as (process, http, _):
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or it fills up
            serving_process = Serving(process, http, folder)
            asyncio.run(serving_process.soak(questions, seed=0).run(120))
            serving_process.wait_until_idle()
            yield serving_process


@dataclass(frozen=True)
class Held:
    """The resources that a server holds."""

    memory: dict[str, int]  # bytes
    num_engines: int
    num_workers: dict[str, int]  # of each script
    num_others: int  # unknown children
    num_files: int  # sockets too; without those to the workers
    num_disconnects: float  # so far
    paths: list[Path]  # in its temporary folder

    @classmethod
    def by(cls, server: Serving) -> Held:
        engines, of = server.engines(), server.process.pid
        num_workers = {script: len(children(of, script)) for script in MOST_WORKERS}
        num_others = len(children(of)) - len(engines) - sum(num_workers.values())
        num_files = len(os.listdir(f"/proc/{server.process.pid}/fd")) - sum(num_workers.values())
        memory = {"server": resident(server.process.pid), "engine": sum(map(resident, engines))}
        paths = sorted(server.folder.rglob("*"))
        return cls(memory, len(engines), num_workers, num_others, num_files, server.num_disconnects(), paths)

    def is_settled(self, num_files: int) -> bool:
        """Return whether nothing of the finished requests is left."""
        is_within = all(self.num_workers[script] <= most for script, most in MOST_WORKERS.items())
        return is_within and not self.num_others and self.num_files <= num_files


def resident(process_id: int) -> int:
    """Return the resident memory in bytes."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def print_summary(soak: Soak, seconds: float, before: Held, after: Held) -> None:
    num_disconnects = after.num_disconnects - before.num_disconnects
    memory = (
        f"{name} {before.memory[name] // MIB} -> {after.memory[name] // MIB} MiB" for name in before.memory
    )
    print(
        f"\n{soak.num_begun} requests in {seconds:.0f} s, {num_disconnects:.0f} disconnects: {dict(soak.seen)}"
    )
    print(f"{', '.join(memory)}; {before.num_files} -> {after.num_files} files and sockets")


def test_soak_does_not_grow_memory(
    server: Serving, questions: list[Question], capfd: pytest.CaptureFixture[str]
) -> None:
    before, start = Held.by(server), time.monotonic()
    soak = server.soak(questions, seed=2)
    asyncio.run(soak.run(NUM_REQUESTS))
    seconds = time.monotonic() - start
    assert not soak.seen["lost"]
    server.wait_until_idle()
    after = Held.by(server)
    if IS_LONG:
        with capfd.disabled():
            print_summary(soak, seconds, before, after)
    assert sum(server.blocks().values()) == NUM_BLOCKS
    # Memory that a new kind of request needs once is not growth; memory that every request leaves would be.
    assert all(after.memory[name] - before.memory[name] < 24 * MIB for name in before.memory)


def test_killed_engines_leave_nothing_behind(
    server: Serving, questions: list[Question], capfd: pytest.CaptureFixture[str]
) -> None:
    num_requests = NUM_REQUESTS if IS_LONG else 3 * NUM_AT_ONCE
    before, start = Held.by(server), time.monotonic()
    soak = server.soak(questions, seed=3)

    async def run() -> None:
        await asyncio.gather(soak.run(num_requests), disturb(soak, server, num_requests))

    asyncio.run(run())
    seconds = time.monotonic() - start
    server.wait_until_idle()

    def settled() -> Held | None:
        held = Held.by(server)
        return held if held.is_settled(before.num_files) else None

    after = wait_until(settled, f"an end of what was held besides {before}")
    if IS_LONG:
        with capfd.disabled():
            print_summary(soak, seconds, before, after)
    assert soak.seen["lost"] > 0
    assert sum(server.blocks().values()) == NUM_BLOCKS
    assert after.num_engines == before.num_engines == 1
    assert after.paths == before.paths
    assert sum(after.memory.values()) - sum(before.memory.values()) < 50 * MIB


async def disturb(soak: Soak, server: Serving, num_requests: int) -> None:
    """Kill the engine, or have it hang, at even distances."""

    def has_begun(num_requests: int) -> bool:
        return soak.num_begun >= num_requests

    signals = [signal.SIGKILL] * NUM_KILLS + [signal.SIGSTOP] * NUM_HANGS
    random.Random(0).shuffle(signals)
    for number, what in enumerate(signals, 1):
        num_begun = number * num_requests // (len(signals) + 1)
        await until(partial(has_begun, num_begun), "requests", HANGS_AFTER)
        engines = await until(server.engines, "an engine")
        os.kill(engines[0], what)
        soak.seen[what.name] += 1
