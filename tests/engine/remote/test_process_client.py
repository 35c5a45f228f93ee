"""The client of an engine in a process of its own: a real one, over the fake runner, whose answers are known."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from inflight.config import EngineConfig, ProcessConfig
from inflight.engine.remote import supervisor as supervisor_module
from inflight.engine.remote.process_client import ProcessClient
from inflight.engine.remote.supervisor import Supervisor
from inflight.engine.remote.wire import Failed, Progress
from inflight.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    KVBudgetError,
    QueueFullError,
    RequestError,
)
from inflight.events import CACHE_HASH_LENGTH, CacheUpdate, Delta
from inflight.processes import child, connected_process
from inflight.processes.channel import RemoteError
from inflight.scheduling.policies.continuous import Continuous
from tests.engine import late
from tests.engine.faulty import BUILD, DIE, HANG, NUM_BLOCKS, RAISE, SLOW, STOP, TELL
from tests.support.fake_runner import expected_tokens
from tests.support.processes import exists, runs
from tests.support.requests import make_request
from tests.support.waiting import is_idle, until, wait_until

LONG = 3000  # tokens: a request that a test must end; each with SLOW takes some milliseconds
QUICK = ProcessConfig(heartbeat=0.05)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which sockets are created. It must be empty before and after each test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextlib.asynccontextmanager
async def running(process: ProcessConfig = QUICK, **options: Any) -> AsyncIterator[ProcessClient]:
    """A client that must leave nothing behind: no process, no file, no complaint of the event loop."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with asyncio.timeout(120):
        client = await start(process, **options)
        yield client
        await client.close()
    gc.collect()
    await asyncio.sleep(0)
    assert (client._open, len(client._calls)) == ({}, 0)
    assert not exists(process_id(client))
    assert list(Path(tempfile.gettempdir()).iterdir()) == []
    assert complaints == []


def supervisor_of(client: ProcessClient) -> Supervisor:
    assert isinstance(client._connection, Supervisor)
    return client._connection


async def start(process: ProcessConfig = QUICK, **options: Any) -> ProcessClient:
    return await ProcessClient.start(
        EngineConfig.create(**({"model": "faulty"} | options)), process, build=BUILD
    )


@pytest.fixture
async def client() -> AsyncIterator[ProcessClient]:
    async with running() as client:
        yield client


def process_id(client: ProcessClient) -> int:
    process_id = client.process_id
    assert process_id is not None
    return process_id


async def read(client: ProcessClient, request_id: str) -> tuple[list[int], Delta]:
    tokens: list[int] = []
    async for delta in client.stream(request_id):
        tokens += delta.token_ids
    return tokens, delta


async def answer(client: ProcessClient, prompt: list[int], count: int, name: str) -> list[int]:
    await client.add(make_request(prompt, count, name))
    return (await read(client, name))[0]


async def until_idle(client: ProcessClient) -> None:
    async def idle() -> bool:
        return not client._open and await is_idle(client)

    await until(idle, "an idle engine")


async def until_healthy(client: ProcessClient) -> None:
    async def healthy() -> bool:
        return (await client.health()).healthy

    await until(healthy, "a healthy engine")


async def open_streams(client: ProcessClient, count: int = 3) -> list[Any]:
    """Requests that run, each with a token read."""
    streams = []
    for index in range(count):
        await client.add(make_request([SLOW, index], LONG, f"open{index}"))
        streams.append(client.stream(f"open{index}"))
    for stream in streams:
        await anext(stream)
    return streams


async def rest(stream: Any) -> list[Delta]:
    return [delta async for delta in stream]


# ---- streams ----


async def test_many_concurrent_requests_get_their_own_tokens(client: ProcessClient) -> None:
    prompts = [[i % 40, i // 40, *range(i % 7)] for i in range(400)]
    answers = await asyncio.gather(
        *(answer(client, prompt, 1 + i % 5, f"r{i}") for i, prompt in enumerate(prompts))
    )
    assert answers == [expected_tokens(prompt, 1 + i % 5) for i, prompt in enumerate(prompts)]
    assert client._requests == {}
    stats = await client.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv.num_used) == (0, 0, 0)
    assert stats.num_output_tokens == sum(map(len, answers))
    assert client.facts.num_blocks == NUM_BLOCKS


async def test_slow_reader_gets_merged_deltas(client: ProcessClient) -> None:
    await client.add(make_request([1, 2, 3], 30, "slow"))
    await until_idle(client)
    (delta,) = await rest(client.stream("slow"))
    assert delta.token_ids == expected_tokens([1, 2, 3], 30)
    assert (delta.finish_reason, delta.record and delta.record.num_output_tokens) == ("length", 30)


async def test_blocked_client_loses_nothing_and_does_not_delay_the_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    told = tmp_path_factory.mktemp("told") / "file"
    async with running(model=f"tell:{told}") as client:
        prompts = [*([index] for index in range(8)), [TELL]]
        for index, prompt in enumerate(prompts):
            await client.add(make_request(prompt, 300, f"r{index}"))
        wait_until(told.exists, "hundreds of steps")  # the event loop does nothing meanwhile
        for index, prompt in enumerate(prompts):
            assert (await read(client, f"r{index}"))[0] == expected_tokens(prompt, 300)


async def test_reused_id_gets_no_deltas_of_the_earlier_request(client: ProcessClient) -> None:
    for number in range(20):
        await client.add(make_request([SLOW, number], LONG, "again"))
        stream = client.stream("again")
        await anext(stream)
        await stream.aclose()
    assert await answer(client, [1], 30, "again") == expected_tokens([1], 30)
    await until_idle(client)


async def test_invalid_requests_are_rejected(client: ProcessClient) -> None:
    await client.add(make_request([SLOW], 20, "twice"))
    with pytest.raises(RequestError, match="'twice' is already in use"):
        await client.add(make_request([2], 20, "twice"))
    with pytest.raises(RequestError, match="Unicode"):
        await client.add(make_request([2], 20, "odd", tenant="\ud800"))
    with pytest.raises(RequestError, match="'nobody'"):
        client.stream("nobody")
    assert (await read(client, "twice"))[0] == expected_tokens([SLOW], 20)


async def test_full_queue_rejects_requests() -> None:
    async with running(max_queue=2, max_num_seqs=1) as client:
        streams = await open_streams(client, 1)
        for name in ("q0", "q1"):
            await client.add(make_request([1], 3, name))
        with pytest.raises(QueueFullError, match="max_queue") as full:
            await client.add(make_request([1], 3, "q2"))
        assert full.value.code == "queue_full"
        assert not len(client._calls)
        leaving = asyncio.ensure_future(client.add(make_request([1], 3, "q3")))
        await asyncio.sleep(0)
        leaving.cancel()  # its refusal comes when nobody waits for it any more
        await until(lambda: leaving.done() and len(client._open) == 3)
        await client.abort("open0")
        assert (await rest(streams[0]))[-1].finish_reason == "abort"
        assert (await read(client, "q1"))[0] == expected_tokens([1], 3)


async def test_observer_gets_changes_of_the_prefix_cache(client: ProcessClient) -> None:
    """First all that is there, also of the process after a restart."""
    updates: list[CacheUpdate] = []
    await answer(client, [*range(9)], 1, "before")
    client.watch_cache(updates.append)
    await until(lambda: len(updates) == 1)
    assert (updates[0].cleared, len(updates[0].stored), updates[0].evicted) == (
        True,
        2 * CACHE_HASH_LENGTH,
        b"",
    )
    await answer(client, [*range(13)], 1, "after")
    assert [(update.cleared, len(update.stored)) for update in updates[1:]] == [(False, CACHE_HASH_LENGTH)]
    os.kill(process_id(client), signal.SIGKILL)
    await until(lambda: len(updates) == 3)
    assert updates[2] == (True, b"", b"")


# ---- ending early ----


async def test_abort_frees_blocks_and_ends_the_stream(client: ProcessClient) -> None:
    (stream,) = await open_streams(client, 1)
    assert await client.abort("open0") > 0
    assert (await client.stats()).kv.num_used == 0
    assert (await rest(stream))[-1].finish_reason == "abort"
    assert await client.abort("open0") == 0
    assert await client.abort("nobody") == 0


async def test_leaving_a_stream_aborts_its_request(client: ProcessClient) -> None:
    await client.add(make_request([SLOW], LONG, "left"))
    async for _ in client.stream("left"):
        break
    await client.add(make_request([SLOW], LONG, "dropped"))
    client.stream("dropped")
    adding = asyncio.ensure_future(client.add(make_request([SLOW], LONG, "cancelled")))
    await asyncio.sleep(0)
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    gc.collect()
    await until_idle(client)
    assert client._requests == {}


# ---- what it shows ----


async def test_describe_lists_what_a_request_waited_for() -> None:
    async with running(max_num_seqs=2) as client:
        streams = await open_streams(client, 2)
        for name in ("late", "later"):
            await client.add(make_request([SLOW, 5, 6], 4, name, tenant="t"))
        state = await client.describe("later")
        assert state is not None
        assert (state.status, state.num_ahead) == ("waiting", 1)
        assert state.waited_for == ("open0", "open1")
        running_one = await client.describe("open0")
        assert running_one is not None
        assert running_one.status == "running"
        assert running_one.num_computed >= 2
        assert running_one.num_blocks >= 1
        await streams[1].aclose()
        await read(client, "late")
        await read(client, "later")
        state = await client.describe("later")
        assert state is not None
        assert (state.status, state.record.tenant, state.record.num_output_tokens) == ("finished", "t", 4)
        assert state.waited_for == ("open1", "late")
        assert await client.describe("nobody") is None


# ---- faults ----


async def test_killed_process_ends_its_streams_and_is_restarted(client: ProcessClient) -> None:
    first = process_id(client)
    streams = await open_streams(client)
    await client.add(make_request([1], 2, "complete"))
    complete = client.stream("complete")
    await until(lambda: client._requests["complete"].queue._ended)
    os.kill(first, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDeadError, match="ended by SIGKILL"):
            await rest(stream)
    health = await client.health()
    assert (health.healthy, health.state) == (False, "restarting")
    with pytest.raises(EngineDeadError, match="SIGKILL; it is being restarted"):
        await client.add(make_request([1], 2, "meanwhile"))
    with pytest.raises(EngineDeadError):
        await client.stats()
    assert [delta.finish_reason for delta in await rest(complete)] == ["length"]
    state = await client.describe("open0")
    assert state is not None
    assert state.record.finish_reason == "error"
    await until_healthy(client)
    assert process_id(client) != first
    assert (await client.health()).num_restarts == 1
    assert await answer(client, [4, 5], 9, "open0") == expected_tokens([4, 5], 9)
    assert (await client.stats()).kv.num_used == 0


async def test_calls_do_not_hang_when_the_process_dies(client: ProcessClient) -> None:
    num_begun = 0

    async def use(index: int) -> str:
        nonlocal num_begun
        try:
            await client.add(make_request([SLOW, index], LONG, f"r{index}"))
            stream = client.stream(f"r{index}")
            await anext(stream)
            num_begun += 1
            if num_begun == 10:
                os.kill(process_id(client), signal.SIGKILL)
            await asyncio.gather(client.abort(f"r{index}"), client.describe(f"r{index}"))
            return (await rest(stream))[-1].finish_reason or ""
        except EngineDeadError:
            return "dead"

    ends = await asyncio.gather(*(use(index) for index in range(60)))
    assert set(ends) <= {"dead", "abort"}
    assert "dead" in ends
    assert await client.abort("r0") == 0
    await until_healthy(client)
    assert await answer(client, [1], 3, "after") == expected_tokens([1], 3)


async def test_restarts_are_limited() -> None:
    async with running(ProcessConfig(max_restarts=1, heartbeat=0.05)) as client:
        for _ in range(2):
            await until_healthy(client)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await answer(client, [DIE], 3, "deadly")

        async def dead() -> bool:
            return (await client.health()).state == "dead"

        await until(dead)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await client.add(make_request([1], 3, "more"))
        assert (await client.health()).num_restarts == 1


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervisor_module, "LONGEST_PAUSE", 0.02)


@pytest.mark.usefixtures("no_pauses")
async def test_missing_folder_for_a_moment_costs_no_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(ProcessConfig(max_restarts=1, heartbeat=0.05)) as client:
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
        os.kill(process_id(client), signal.SIGKILL)
        await until(lambda: caplog.text.count("could not be started") >= 5)
        assert (await client.health()).state == "restarting"
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        await until_healthy(client)
        assert (await client.health()).num_restarts == 1
        assert await answer(client, [1], 3, "after") == expected_tokens([1], 3)


@pytest.mark.usefixtures("no_pauses")
async def test_lack_of_descriptors_for_a_moment_costs_no_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    async with running(ProcessConfig(max_restarts=1, heartbeat=0.05)) as client:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[0]), limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            os.kill(process_id(client), signal.SIGKILL)
            await until(lambda: caplog.text.count("Too many open files") >= 5)
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await until_healthy(client)
        assert (await client.health()).num_restarts == 1
        assert await answer(client, [1], 3, "after") == expected_tokens([1], 3)


@pytest.mark.usefixtures("no_pauses")
async def test_bug_while_restarting_is_logged_and_the_restart_retried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as client:
        real = supervisor_of(client).launch
        mistakes = [KeyError("a mistake"), OSError("another")]

        async def launch() -> Any:
            if mistakes:
                raise mistakes.pop()
            return await real()

        monkeypatch.setattr(supervisor_of(client), "launch", launch)
        os.kill(process_id(client), signal.SIGKILL)
        await until(lambda: not mistakes)
        await until_healthy(client)
        assert caplog.text.count("the engine could not be restarted") == 2
        assert await answer(client, [1], 3, "after") == expected_tokens([1], 3)


@pytest.mark.usefixtures("no_pauses")
async def test_process_that_never_starts_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(ProcessConfig(restart_window=0.3, heartbeat=0.05)) as client:
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
        os.kill(process_id(client), signal.SIGKILL)

        async def dead() -> bool:
            return (await client.health()).state == "dead"

        await until(dead)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))


async def test_stopped_loop_reports_its_error(client: ProcessClient) -> None:
    with pytest.raises(EngineDeadError, match=r"^the engine stopped: MemoryError: no more$"):
        await answer(client, [STOP], 3, "stop")
    await until_healthy(client)
    assert await answer(client, [1], 3, "after") == expected_tokens([1], 3)


async def test_failed_step_ends_only_its_requests(client: ProcessClient) -> None:
    await client.add(make_request([RAISE], 3, "bad"))
    _, last = await read(client, "bad")
    assert (last.finish_reason, last.error) == ("error", "RuntimeError in step 0")
    assert last.error_code == "step_failed"
    assert await answer(client, [1], 3, "good") == expected_tokens([1], 3)
    assert (await client.health()).num_restarts == 0


async def test_hanging_step_makes_the_engine_unhealthy() -> None:
    async with running(ProcessConfig(heartbeat=0.05, stalled_after=1.5)) as client:
        await client.add(make_request([HANG], 3, "stuck"))
        asking = asyncio.ensure_future(client.describe("stuck"))

        async def is_reported() -> bool:
            """Return whether the engine itself reports that it hangs: late heartbeats would look the same."""
            supervisor = client._connection
            assert isinstance(supervisor, Supervisor)
            return supervisor.working and supervisor._received_at - supervisor._progress_at >= 1.5

        await until(is_reported)
        health = await client.health()
        assert (health.healthy, health.state) == (False, "stalled")
        assert health.seconds_since_step >= 1.5
        up = supervisor_of(client).engine_process._up
        wait_until(lambda: up.poll(0), "a heartbeat that no one has read")
        assert (await client.health()).state == "stalled"
        for call in (asking, client.add(make_request([1], 3, "new")), client.abort("stuck")):
            with pytest.raises(EngineDeadError, match="no step for"):
                await call
        supervisor_of(client).engine_process.kill()


async def test_hanging_process_can_be_replaced() -> None:
    limits = ProcessConfig(heartbeat=0.05, stalled_after=1.5, kill_stalled_after=3.0)
    async with running(limits) as client:
        with pytest.raises(EngineDeadError, match="the engine was killed: the engine has made no step"):
            await answer(client, [HANG], 3, "stuck")
        await until_healthy(client)
        assert await answer(client, [1], 3, "after") == expected_tokens([1], 3)


async def test_stopped_process_is_replaced_even_if_it_was_idle() -> None:
    limits = ProcessConfig(heartbeat=0.05, silent_after=1.0, kill_silent_after=1.5)
    async with running(limits) as client:
        os.kill(process_id(client), signal.SIGSTOP)
        await until(lambda: supervisor_of(client).health().num_restarts == 1)
        await until_healthy(client)
        assert await answer(client, [1], 3, "after") == expected_tokens([1], 3)


async def test_idle_engine_is_not_killed_for_lack_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ProcessConfig(heartbeat=0.05, silent_after=0.5, kill_stalled_after=0.1)
    async with running(limits) as client:
        first, hangs = process_id(client), supervisor_of(client)._hangs
        checks: list[bool] = []

        def check() -> bool:
            checks.append(hangs())
            return checks[-1]

        monkeypatch.setattr(supervisor_of(client), "_hangs", check)
        os.kill(first, signal.SIGSTOP)
        await until(lambda: len(checks) >= 3)
        assert not any(checks)
        os.kill(first, signal.SIGCONT)
        await until_healthy(client)
        assert process_id(client) == first


async def test_silent_process_is_unhealthy() -> None:
    async with running(ProcessConfig(heartbeat=0.05, silent_after=1.5)) as client:
        os.kill(process_id(client), signal.SIGSTOP)

        async def silent() -> bool:
            return "silent" in str((await client.health()).error)

        await until(silent)
        os.kill(process_id(client), signal.SIGCONT)
        await until_healthy(client)


async def test_invalid_frames_are_dropped(client: ProcessClient) -> None:
    (stream,) = await open_streams(client, 1)
    for frame in (b"", b"noise", bytes(supervisor_of(client).engine_process.codec._secret) + b"\xc1"):
        supervisor_of(client).engine_process._down.send(frame)
    tokens = (await anext(stream)).token_ids
    assert tokens
    await stream.aclose()
    assert await answer(client, [1], 3, "after") == expected_tokens([1], 3)


async def test_over_loopback_frames_without_the_secret_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected_process, "MAX_IPC_PATH", 0)
    async with running() as client:
        endpoint = supervisor_of(client).engine_process._up.get_string(zmq.LAST_ENDPOINT)
        assert endpoint.startswith("tcp://127.0.0.1:")
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(endpoint)
            stranger.send(b"x" * 16 + b"\x91\xa4Stop")
            await until(lambda: supervisor_of(client).engine_process.codec.num_dropped == 1)
        assert await answer(client, [1], 30, "same") == expected_tokens([1], 30)


# ---- starting ----


async def test_start_raises_the_error_of_the_engine() -> None:
    with pytest.raises(KVBudgetError, match=r"^too few blocks: 7 – see\na note$") as caught:
        await start(model="refuse")
    assert str(caught.value) == "too few blocks: 7 – see"
    with pytest.raises(EngineError, match=r"^ZeroDivisionError: unlucky$"):
        await start(model="raise")
    with pytest.raises(EngineDeadError, match="ended with code 7 while it was starting"):
        await start(model="die")
    with pytest.raises(ConfigError, match="unknown policy 'nosuch'"):
        await start(policy="nosuch")


async def test_last_messages_of_a_dead_process_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    noticed, end = tmp_path_factory.mktemp("late") / "noticed", connected_process.ConnectedProcess._end

    def note(process: Any, *args: Any) -> None:
        end(process, *args)
        noticed.touch()

    monkeypatch.setattr(connected_process.ConnectedProcess, "_end", note)
    monkeypatch.setattr(
        supervisor_module, "COMMAND", (sys.executable, "-m", "tests.engine.late", str(noticed))
    )
    with pytest.raises(EngineError, match=f"^ValueError: {late.TEXT}$"):
        await start()


async def test_options_that_cannot_be_encoded_are_rejected_before_the_start() -> None:
    with pytest.raises(ConfigError, match="by name, or as module:Class"):
        await start(policy=Continuous)
    with pytest.raises(ConfigError, match="cannot be sent"):
        await start(hf_config={"x": object()})
    async with running(policy="inflight.scheduling.policies.continuous:Continuous") as client:
        assert await answer(client, [1], 3, "x") == expected_tokens([1], 3)


async def test_bug_in_a_host_keeps_no_caller_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def run(_: object) -> str:
        raise KeyError("a mistake")

    monkeypatch.setattr(child.ChildProcess, "run", run)
    with pytest.raises(EngineDeadError, match="the process could not be watched: KeyError: 'a mistake'"):
        await start()
    assert "a process could not be watched" in caplog.text


async def test_cancelled_start_leaves_nothing_behind(folder: Path) -> None:
    starting = asyncio.ensure_future(start())
    await until(lambda: list(folder.iterdir()), "a folder")
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o700]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert list(folder.iterdir()) == []


async def test_folders_left_by_killed_servers_are_removed(folder: Path) -> None:
    left, young, other = (folder / f"inflight-{name}" for name in ("left", "young", "other"))
    for path in (left, young, other):
        path.mkdir()
    for path, name in ((left, "up"), (left, "down"), (young, "up")):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path / name))
    (other / "notes.txt").touch()
    for path in (left, other):
        os.utime(path, (0, 0))
    client = await start()
    await client.close()
    assert sorted(folder.iterdir()) == [other, young]
    shutil.rmtree(young)
    shutil.rmtree(other)


async def test_load_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    client = await ProcessClient.start(
        EngineConfig.create(model="x"), progress=lambda *done: seen.append(done), build=BUILD
    )
    await client.close()
    assert seen == [(1, 2)]


# ---- starts that hang ----


async def test_hanging_start_is_killed_with_an_error_that_names_the_process() -> None:
    text = r"the engine process \(process \d+\) was killed: it made no progress for 0.5 seconds while it was starting"
    with pytest.raises(EngineDeadError, match=text):
        await start(model="hang", start_timeout=0.5)


async def test_hanging_restart_is_retried_like_a_failed_one(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("")
    client = await start(model=f"script:{script}")
    try:
        options, starts = supervisor_of(client)._options, script.with_suffix(".starts")
        script.write_text("hang")
        options["start_timeout"] = 0.5  # from here on: the first start may have been slow
        os.kill(process_id(client), signal.SIGKILL)
        await until(lambda: "made no progress for 0.5 seconds" in str(supervisor_of(client)._error))
        options["start_timeout"] = 600.0
        script.write_text("")
        await until_healthy(client)
        assert await answer(client, [1, 2], 4, "after") == expected_tokens([1, 2], 4)
        assert (await client.health()).num_restarts >= 2
        assert starts.exists()
    finally:
        await client.close()


class StartingProcess:
    """An engine process whose start is a script: seconds that pass, and what is heard then."""

    process_id, unread, reason = 7, (), None

    def __init__(
        self, supervisor: Supervisor, *script: tuple[float, Any], is_waiting_for_machine: bool = False
    ) -> None:
        self.exited = asyncio.Event()
        self.is_waiting_for_machine = is_waiting_for_machine
        self._script = list(script)
        self._now = 0.0
        supervisor._clock = lambda: self._now

    async def receive(self, seconds: float) -> Any:  # noqa: ARG002
        passed, message = self._script.pop(0)
        self._now += passed
        return message

    def read_frames(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("script", "has_machine", "is_given_up"),
    [
        ([(500.0, Progress(1, 9))] * 5, True, False),  # slow, but it goes on
        ([(500.0, Progress(1, 9)), (300.0, None), (299.0, None)], True, False),
        ([(500.0, Progress(1, 9)), (300.0, None), (301.0, None)], True, True),
        ([(5000.0, None)], False, False),  # no machine was found for it yet
    ],
)
async def test_start_that_makes_progress_is_not_killed(
    script: list[tuple[float, Any]], has_machine: bool, is_given_up: bool
) -> None:
    options = {"start_timeout": 600.0}
    supervisor = Supervisor("none", options, QUICK, None, supervisor_module.engine_host({}))
    failed = Failed(RemoteError.from_exception(KVBudgetError("the end of the script")))
    process: Any = StartingProcess(supervisor, *script, (1.0, failed), is_waiting_for_machine=not has_machine)
    with pytest.raises(EngineDeadError if is_given_up else KVBudgetError):
        await supervisor._wait_until_ready(process)


def test_bytes_that_a_start_reads_or_writes_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    size = child.MOVED_BYTES
    amounts = iter([0, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 9])
    reports: list[int] = []
    is_over = threading.Event()

    def moved() -> int:
        amount = next(amounts, None)
        if amount is None:
            is_over.set()
            return 2 * size
        return amount

    monkeypatch.setattr(child, "_bytes_moved", moved)
    with child.reporting_input(lambda: reports.append(1), 0.001):
        assert is_over.wait(60)
    assert len(reports) == 2


def test_bytes_moved_are_those_of_this_process(tmp_path: Path) -> None:
    before = child._bytes_moved()
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    (tmp_path / "weights").read_bytes()
    assert child._bytes_moved() - before >= 2 << 20


# ---- closing ----


async def test_closing_ends_open_streams(client: ProcessClient) -> None:
    (stream,) = await open_streams(client, 1)
    await client.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await rest(stream)
    health = await client.health()
    assert (health.healthy, health.state, health.error) == (False, "closed", "the engine was closed")
    for call in (client.add(make_request([1])), client.stats()):
        with pytest.raises(EngineDeadError, match="closed"):
            await call
    await client.close()


async def test_closing_can_wait_for_running_requests(client: ProcessClient) -> None:
    await client.add(make_request([SLOW], 30, "last"))
    closing = asyncio.ensure_future(client.close(drain=60))
    await asyncio.sleep(0)
    assert (await client.health()).state == "closing"
    with pytest.raises(EngineDeadError, match="closing"):
        await client.add(make_request([1], 3, "late"))
    assert (await read(client, "last"))[0] == expected_tokens([SLOW], 30)
    await closing


async def test_closing_waits_no_longer_than_its_limit(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connected_process, "END_TIMEOUT", 0.1)
    await client.add(make_request([HANG], 3, "stuck"))
    await client.close(drain=0.1)
    with pytest.raises(EngineDeadError, match="closed"):
        await read(client, "stuck")


PARENT = """
import asyncio, sys
from inflight.config import EngineConfig
from inflight.engine.remote.process_client import ProcessClient
from tests.engine.faulty import BUILD, HANG
from tests.support.requests import make_request

async def main():
    client = await ProcessClient.start(EngineConfig.create(model="x"), build=BUILD)
    await client.add(make_request([HANG if sys.argv[1] == "hang" else 1], 3, "r"))
    print(client.process_id, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("doing", ["nothing", "hang"])
def test_process_ends_with_its_parent(doing: str, folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    command = [sys.executable, "-c", PARENT, doing]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        os.kill(worker, signal.SIGINT)  # left to the parent, as is SIGTERM
        os.kill(worker, signal.SIGTERM)
        assert exists(worker)
        parent.kill()
    wait_until(lambda: not runs(worker), "the worker's end")
    assert list(folder.iterdir()) == []


async def test_bug_while_reading_messages_keeps_no_caller_waiting(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.add(make_request([1, 2], LONG, "open"))

    def deliver(_: Any) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(client, "_deliver", deliver)
    with pytest.raises(EngineDeadError, match="could not be read"):
        await read(client, "open")
    health = await client.health()
    assert (health.healthy, health.state) == (False, "dead")
    with pytest.raises(EngineDeadError, match="KeyError"):
        await client.add(make_request([1, 2], 3, "later"))


def test_process_whose_parent_ended_first_exits_silently() -> None:
    command = supervisor_module.COMMAND
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (0, b"", b"")


async def test_spare_engine_process_is_used_once_and_by_a_matching_host_only() -> None:
    supervisor_module.start_spare_engine({"INFLIGHT_TEST": "1"})
    (spare,) = child._spares
    spare_id = (await asyncio.to_thread(spare.process.result)).pid
    async with running() as other:  # has another environment
        assert process_id(other) != spare_id
    process = ProcessConfig(heartbeat=0.05, environment={"INFLIGHT_TEST": "1"})
    async with running(process) as first, running(process) as second:
        assert process_id(first) == spare_id
        assert process_id(second) != spare_id
        assert await answer(first, [1, 2], 3, "a") == expected_tokens([1, 2], 3)


async def test_spare_engine_process_ends_with_its_parent() -> None:
    code = (
        "from inflight.engine.remote.supervisor import start_spare_engine\n"
        "from inflight.processes import child\n"
        "start_spare_engine({}); print(child._spares[0].process.result().pid, flush=True)"
    )
    parent = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    await until(lambda: not runs(int(parent.stdout)), "its end")


async def test_statistics_are_current_while_a_prompt_is_computed(client: ProcessClient) -> None:
    """A step of 64 tokens takes some milliseconds, and none brings a token before the last."""
    steps: set[int] = set()
    num_answers = 0
    while len(steps) < 2:  # on a busy machine, a prompt may be over before another step was seen
        await client.add(make_request([SLOW, *range(1, 14_000)], 1, "r", cache_salt=str(num_answers)))
        answered = asyncio.create_task(read(client, "r"))
        while not answered.done():
            stats = await client.stats()
            if (stats.num_running, stats.num_output_tokens) == (1, num_answers) and stats.num_steps:
                steps.add(stats.num_steps)
            await asyncio.sleep(0.005)
        assert len((await answered)[0]) == 1
        num_answers += 1
