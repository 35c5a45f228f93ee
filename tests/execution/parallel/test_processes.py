"""Ranks in their own processes: the same answers, one error when one of them is lost, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from inflight import LLM, AsyncEngine, RequestOutput, SamplingParams
from inflight.config import ProcessConfig
from inflight.engine.remote.process_client import ProcessClient
from inflight.errors import ConfigError, DeviceLostError, EngineDeadError, WeightsError
from inflight.execution.parallel import rank_processes, starting
from inflight.execution.parallel.layout import RankLayout
from inflight.execution.parallel.messages import Begin, Begun, Loaded, Loading, RankStart
from inflight.execution.parallel.rank_processes import RankProcesses
from inflight.layers.native.library import native_library
from tests.e2e.conftest import Folder
from tests.e2e.policies import SLOW
from tests.e2e.reference import PROMPTS
from tests.support.processes import children, runs
from tests.support.steps import observe
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.skipif(native_library() is None, reason="ranks on a CPU need the compiled kernels")

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=400)
WITHIN = 60.0  # seconds to wait for what takes less than 5 where nothing else runs


def ranks(of: int | None = None) -> set[int]:
    """Rank processes that a process has, by default this one."""
    return children(of, "execution.parallel.worker")


def shared_memory() -> set[str]:
    """Descriptors that this process has of it: the files have no names, and go with the last who has them."""
    names = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "inflight-ranks" in os.readlink(link):
                names.add(link.name)
    return names


async def end(stream: AsyncGenerator[RequestOutput]) -> None:
    async for _ in stream:
        pass


@pytest.fixture(scope="module")
def expected(folder: Folder) -> list[list[int]]:
    llm = LLM(folder("qwen3"), show_progress=False)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture
def before() -> set[str]:
    """Shared memory that other tests have left to this process: their ranks are threads."""
    return shared_memory()


@pytest.fixture
def llm(folder: Folder, before: set[str]) -> Iterator[LLM]:  # noqa: ARG001
    llm = LLM(folder("qwen3"), show_progress=False, tensor_parallel_size=2)
    yield llm
    llm.close()


def test_dead_rank_ends_the_engine_with_an_error_that_names_it(
    before: set[str], llm: LLM, expected: list[list[int]]
) -> None:
    token_ids = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert token_ids == expected
    assert shared_memory() - before
    (rank,) = ranks()

    def kill(_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)

    observe(llm._engine.core, kill)
    with pytest.raises(DeviceLostError, match=rf"rank 1 of 2 \(process {rank}\) ended by SIGKILL"):
        llm.generate([PROMPTS[0]] * 64, LONG, use_tqdm=False)
    with pytest.raises(DeviceLostError, match="rank 1 of 2"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()
    assert not ranks()
    assert not shared_memory() - before


def test_hanging_stage_ends_the_engine_with_an_error_that_names_it(
    folder: Folder, expected: list[list[int]]
) -> None:
    llm = LLM(folder("qwen3"), show_progress=False, pipeline_parallel_size=2)
    token_ids = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert token_ids == expected
    (rank,) = ranks()
    os.kill(rank, signal.SIGSTOP)
    with pytest.raises(DeviceLostError, match=rf"rank 1 of 2 \(process {rank}\) sent no heartbeat"):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    llm.close()
    assert not ranks()


def hang(config: object, memory: object, progress: object) -> None:  # noqa: ARG001
    """Replaces `load_rank` in its own process."""
    time.sleep(3600)


def test_rank_that_hangs_while_loading_is_killed_and_named(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "LOADER", "tests.execution.parallel.test_processes:hang")
    text = r"rank 1 of 2 \(process \d+\) made no progress for 1 seconds while it was starting"
    with pytest.raises(DeviceLostError, match=text):
        LLM(folder("qwen3"), show_progress=False, tensor_parallel_size=2, start_timeout=1)
    assert not ranks()


class SilentRank:
    """Replaces a rank's process; the test sends its reports."""

    process_id = 7

    def __init__(self, start: RankStart, *_: object) -> None:
        self.rank = start.rank
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True

    def join(self) -> None:
        pass


def test_progress_of_any_rank_counts_and_the_slowest_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, heard = 0.0, []
    monkeypatch.setattr(rank_processes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rank_processes, "RankProcess", SilentRank)
    library = native_library()
    assert library is not None
    layout = RankLayout(4, 1, 1, 4096, 0, ())
    ranks = RankProcesses(library, layout, [], "none", {}, ["cpu"] * 4, 600.0, lambda: heard.append(now))

    def given_up() -> list[int]:
        ranks._check_progress()
        return [process.rank for process in ranks.processes if process.is_killed]  # type: ignore[attr-defined]

    try:
        for rank in (1, 2, 3):
            now += 500.0
            ranks._take_report(rank, Loading())
            assert not given_up()
        now += 500.0
        ranks.note_progress()  # of the first
        assert not given_up()
        ranks._take_report(1, Loaded())  # which then may wait for the others
        assert heard == [500.0, 1000.0, 1500.0, 2000.0]
        now += 600.0
        assert given_up() == [2]
        with pytest.raises(
            DeviceLostError, match=r"rank 2 of 4 \(process 7\) made no progress for 600 seconds"
        ):
            ranks.wait_until_loaded()
    finally:
        ranks.close()


def test_ready_ranks_need_not_make_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(rank_processes, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(rank_processes, "RankProcess", SilentRank)
    library = native_library()
    assert library is not None
    layout = RankLayout(2, 1, 1, 4096, 0, ())
    ranks = RankProcesses(library, layout, [], "none", {}, ["cpu"] * 2, 600.0, lambda: None)
    try:
        ranks._take_report(1, Loaded())
        now += 601.0
        ranks._check_progress()
        ranks.begin(Begin(1, 1, 1, 1))
        ranks._take_report(1, Begun())
        now += 601.0
        ranks._check_progress()
        ranks.wait_until_begun()
        ranks.begin(Begin(1, 1, 1, 1))  # after a sleep
        now += 601.0
        ranks._check_progress()
        with pytest.raises(DeviceLostError, match="made no progress"):
            ranks.wait_until_begun()
    finally:
        ranks.close()


async def test_supervisor_restarts_all_ranks(folder: Folder, expected: list[list[int]]) -> None:
    """A rank is killed under load; then, when no restart is left, one of an idle engine."""
    process = ProcessConfig(heartbeat=0.2, max_restarts=1)
    engine = await AsyncEngine.start(
        folder("qwen3"), in_process=False, process=process, tensor_parallel_size=2, policy=SLOW
    )
    client = engine._client
    assert isinstance(client, ProcessClient)

    async def answer(index: int) -> list[int]:
        outputs = [o async for o in engine.generate(PROMPTS[index], GREEDY, output_kind="final")]
        return outputs[0].outputs[0].token_ids

    (rank,) = ranks(client.process_id)
    streams = [engine.generate(PROMPTS[0], LONG) for _ in range(4)]
    for stream in streams:
        await anext(stream)
    os.kill(rank, signal.SIGKILL)
    async with asyncio.timeout(WITHIN):
        for stream in streams:
            with pytest.raises(EngineDeadError, match=rf"rank 1 of 2 \(process {rank}\) ended by SIGKILL"):
                await end(stream)

    async def has_state(name: str) -> bool:
        return (await engine.health()).state == name

    await until(lambda: has_state("running"), "the next engine")
    assert await asyncio.gather(*map(answer, range(len(PROMPTS)))) == expected
    (rank,) = ranks(client.process_id)
    os.kill(rank, signal.SIGKILL)
    await until(lambda: has_state("dead"), "its end", WITHIN)
    assert f"rank 1 of 2 (process {rank}) ended by SIGKILL" in str((await engine.health()).error)
    assert not runs(rank)
    await engine.close()


def test_sizes_that_do_not_divide_are_rejected(folder: Folder) -> None:
    with pytest.raises(
        ConfigError,
        match="tensor_parallel_size is 3: the model has 4 attention heads and 2 key/value heads, "
        "which can be split across 1, 2, 4 ranks",
    ):
        LLM(folder("qwen3"), tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0: allowed is an integer from 1 to 64"):
        LLM(folder("qwen3"), tensor_parallel_size=0)
    with pytest.raises(
        ConfigError,
        match="pipeline_parallel_size is 4: the model has 3 layers, and every stage needs at least one",
    ):
        LLM(folder("qwen3"), pipeline_parallel_size=4)
    with pytest.raises(ConfigError, match="that makes 128 ranks, and at most 64 are allowed"):
        LLM(folder("qwen3"), tensor_parallel_size=16, pipeline_parallel_size=8)


def test_error_of_a_starting_rank_is_one_line(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads good weights, its neighbour a file that is cut off."""
    from inflight.execution.parallel import starting

    monkeypatch.setattr(starting, "LOADER", "tests.execution.parallel.test_processes:load_badly")
    with pytest.raises(WeightsError, match=r"^rank 1 of 2: model.safetensors is cut off$"):
        LLM(folder("qwen3"), show_progress=False, tensor_parallel_size=2)
    assert not ranks()


def test_rank_that_cannot_be_started_is_reported_in_one_line(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("inflight.execution.parallel.rank_processes.os.pipe", no_pipe)
    with pytest.raises(DeviceLostError, match=r"^rank 1 of 2 could not be started: .*Too many open files$"):
        LLM(folder("qwen3"), show_progress=False, tensor_parallel_size=2)


def load_badly(*_: object) -> None:
    raise WeightsError("model.safetensors is cut off")


def test_ranks_die_with_their_parent(folder: Folder) -> None:
    code = f"""
from inflight import LLM, SamplingParams
from tests.execution.parallel.test_processes import ranks
import os
llm = LLM({str(folder("qwen3"))!r}, show_progress=False, tensor_parallel_size=2)
llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
print(*ranks(), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    rank = int(done.stdout)
    wait_until(lambda: not runs(rank), "the rank's end", WITHIN)
