"""Replicas that come and go while requests run: real processes over the fake runner."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint.checkpoint import fingerprint_now
from inflight.config import EngineConfig, ProcessConfig
from inflight.engine.client import Sleep, WakeUp
from inflight.engine.inproc import InprocClient
from inflight.engine.remote.process_client import ProcessClient
from inflight.errors import (
    CheckpointChangedError,
    ConfigError,
    EngineAsleepError,
    EngineDeadError,
    EngineError,
    KVBudgetError,
    QueueFullError,
    RequestError,
)
from inflight.processes.child import ProcessNotStartedError
from inflight.router import start as start_module
from inflight.router.router import Router
from inflight.router.start import MachineShares, check_gpu_memory, check_unchanged, visible_gpus
from tests.engine.faulty import NUM_BLOCKS, SLOW
from tests.engine.test_sleep import FakeSleepSupport
from tests.router.replicas import Script, answer, in_process, process_id, processes, read, strike
from tests.support.fake_runner import expected_tokens
from tests.support.processes import exists
from tests.support.requests import FakeEngine, make_request
from tests.support.waiting import until


async def test_rolling_restart_and_removal_under_load_fail_no_request() -> None:
    async with processes(2) as router:
        before = [process_id(replica.client) for replica in router.replicas.members]
        is_done = False
        num_answers = 0

        async def ask(index: int) -> None:
            nonlocal num_answers
            while not is_done:
                assert await answer(router, [SLOW, index], 40) == expected_tokens([SLOW, index], 40)
                num_answers += 1

        asking = [asyncio.create_task(ask(index)) for index in range(6)]
        await router.replicas.roll(0.05)  # shorter than an answer takes: it goes on elsewhere
        assert not any(map(exists, before))
        assert await router.replicas.add() == "2"
        await router.replicas.remove("0", 0.05)
        await until(lambda: all(replica.requests for replica in router.replicas.members) and num_answers > 6)
        is_done = True
        await asyncio.gather(*asking)
        assert sorted(replica.replica_id for replica in router.replicas.members) == ["1", "2"]
        assert (await router.stats()).num_output_tokens >= 40 * num_answers - 40 * 6
        health = await router.health()
        assert (health.healthy, health.num_restarts) == (True, 0)


async def test_all_or_no_replicas_sleep_including_later_ones() -> None:
    async with in_process(2) as (router, engines):
        engines[0].core._sleep_support = FakeSleepSupport(engines[0])
        with pytest.raises(EngineError, match="cannot sleep"):
            await router.command(Sleep())
        assert engines[0].core._sleep_support.calls == ["check", "sleep", "wake"]
        engines[1].core._sleep_support = FakeSleepSupport(engines[1])
        await router.command(Sleep())
        assert (await router.stats()).is_sleeping
        with pytest.raises(EngineAsleepError):
            await router.add(make_request([1, 2], 5))
        await router.replicas.add()
        engines[2].core._sleep_support = FakeSleepSupport(engines[2])
        await until(lambda: engines[2].core.is_sleeping)
        await router.command(WakeUp())
        assert not any(engine.core.is_sleeping for engine in engines)
        assert await answer(router, [1, 2], 5) == expected_tokens([1, 2], 5)


async def test_last_replica_cannot_be_removed() -> None:
    async with in_process(2) as (router, _):
        router.replicas.drain("0")
        with pytest.raises(RequestError, match="replica 1 is the last one that takes requests") as refused:
            router.replicas.drain("1")
        assert refused.value.code == "last_replica"
        with pytest.raises(RequestError, match="there is no replica '7': there are 0, 1"):
            await router.replicas.remove("7", 0)
        await router.replicas.remove("0", 0)
        assert await answer(router, [1, 2], 5) == expected_tokens([1, 2], 5)


async def test_replica_that_became_the_last_cannot_be_removed() -> None:
    async with in_process(2) as (router, _):
        async with router.replicas._changing:  # another change is being made
            removing = asyncio.ensure_future(router.replicas.remove("0", 0.0))
            await asyncio.sleep(0)
            router.replicas.drain("1")
        with pytest.raises(RequestError, match="replica 0 is the last one that takes requests"):
            await removing
        assert await answer(router, [1, 2], 5) == expected_tokens([1, 2], 5)


async def test_failed_start_of_one_replica_closes_all() -> None:
    with pytest.raises(KVBudgetError, match="too few blocks"):
        async with processes(2, model="refuse"):
            pass


@pytest.mark.parametrize("change", [{"block_size": 8}, {"max_model_len": 90}])
async def test_replica_with_another_model_or_a_shorter_context_is_rejected(change: dict[str, int]) -> None:
    changes = iter(({"max_model_len": 100}, {"max_model_len": 120}, {"max_model_len": 100}, change))

    async def start(replica_id: str, beside: object = None) -> InprocClient:  # noqa: ARG001
        engine = FakeEngine()
        return InprocClient(engine.core, replace(engine.facts, **next(changes)))  # type: ignore[arg-type]

    router = await Router.start(start, 2)
    try:
        assert router.facts.max_model_len == 100  # that all can hold
        assert await router.replicas.add() == "2"
        with pytest.raises(ConfigError, match="replica 3 has another model or other limits"):
            await router.replicas.add()
        assert len(router.replicas.members) == 3
    finally:
        await router.close()


async def test_later_engines_have_as_many_blocks_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    num_blocks: list[int | None] = []
    start = ProcessClient.start

    async def remembered(config: EngineConfig, *more: Any) -> ProcessClient:
        num_blocks.append(config.cache.num_blocks)
        return await start(config, *more)

    monkeypatch.setattr(ProcessClient, "start", remembered)
    async with processes(1) as router:
        await router.replicas.add()
        await router.replicas.restart("0", 0)
    assert num_blocks == [None, NUM_BLOCKS, NUM_BLOCKS]


async def test_full_queue_sends_to_the_next_replica_and_rejects_when_all_are_full() -> None:
    async with in_process(2, max_num_seqs=1, num_blocks=8192) as (router, engines):
        for engine in engines:
            engine.core.max_queue = 1
        streams = []
        for index in range(4):  # one runs and one waits on each
            await router.add(request := make_request([index], 20_000))
            streams.append(router.stream(request.request_id))
        with pytest.raises(QueueFullError, match="the queues of all replicas are full"):
            await router.add(make_request([9], 1))
        for stream in streams:
            await stream.aclose()
        await until(lambda: not any(engine.core.has_work for engine in engines))


async def test_viewers_get_the_steps_of_all_replicas_with_their_ids() -> None:
    async with in_process(2, "round_robin") as (router, _):
        shown: list[str] = []
        stop = router.watch_timeline(lambda replica, _: shown.append(replica))
        await asyncio.gather(*(read(router, make_request([index], 3)) for index in range(4)))
        await until(lambda: set(shown) == {"0", "1"})
        await router.replicas.add()
        for index in range(3):
            await answer(router, [7, index], 2)
        await until(lambda: set(shown) == {"0", "1", "2"})
        stop()
        num_shown = len(shown)
        await asyncio.gather(*(read(router, make_request([index], 3)) for index in range(6)))
        assert len(shown) == num_shown


async def test_invalid_requests_are_rejected() -> None:
    async with in_process(2, num_blocks=8192) as (router, _):
        await router.add(make_request([1], 20_000, "twice"))
        with pytest.raises(RequestError, match="'twice' is already in use"):
            await router.add(make_request([1], 50, "twice"))
        with pytest.raises(RequestError, match="there is no request 'nobody'"):
            router.stream("nobody")
        assert await router.abort("nobody") == 0
        assert await router.describe("nobody") is None
        stream = router.stream("twice")
        await anext(stream)
        await router.abort("twice")
        assert [delta async for delta in stream][-1].finish_reason == "abort"


async def test_facts_and_stats_cover_all_replicas() -> None:
    async with in_process(3) as (router, _):
        assert router.facts.num_blocks == 3 * 32
        assert router.facts.max_num_seqs == 3 * 8
        await asyncio.gather(*(read(router, make_request([index], 4)) for index in range(9)))
        stats = await router.stats()
        assert (stats.num_output_tokens, stats.num_running, stats.kv.num_blocks) == (36, 0, 96)


# ---- shares of the machine ----


def test_threads_and_memory_of_a_cpu_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(start_module, "num_threads", lambda: 9)
    config, host = MachineShares(EngineConfig.create(device="cpu"), {}, 4).share_and_host(2)
    assert host.environment == {"OMP_NUM_THREADS": "2"}
    assert config.cache.num_neighbours == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    _, host = MachineShares(EngineConfig.create(device="cpu"), {"OTHER": "1"}, 4).share_and_host(2)
    assert host.environment == {"OTHER": "1"}


def test_gpus_are_assigned_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
    shares = MachineShares(EngineConfig.create(gpu_memory_utilization=0.8), {}, 4)
    replicas = [shares.share_and_host(index) for index in range(4)]
    assert [host.environment["CUDA_VISIBLE_DEVICES"] for _, host in replicas] == ["3", "5", "3", "5"]
    assert {config.cache.gpu_memory_utilization for config, _ in replicas} == {0.4}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []


def test_replicas_on_a_named_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    config, host = MachineShares(
        EngineConfig.create(device="cuda:1", gpu_memory_utilization=0.8), {}, 4
    ).share_and_host(3)
    assert (config.model.device, config.cache.gpu_memory_utilization) == ("cuda:1", 0.2)
    assert "CUDA_VISIBLE_DEVICES" not in host.environment


def test_ranks_of_a_replica_get_gpus_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    config = EngineConfig.create(tensor_parallel_size=2, gpu_memory_utilization=0.8)
    replicas = [MachineShares(config, {}, 3).share_and_host(index) for index in range(3)]
    assert [host.environment["CUDA_VISIBLE_DEVICES"] for _, host in replicas] == ["0,1", "2,3", "0,1"]
    assert {config.cache.gpu_memory_utilization for config, _ in replicas} == {0.4}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert MachineShares(config, {}, 1).share_and_host(0)[1].environment["CUDA_VISIBLE_DEVICES"] == "7"


async def test_replica_that_starts_after_the_router_closed_is_closed() -> None:
    engines, may_start = [FakeEngine(), FakeEngine()], asyncio.Event()
    clients: list[InprocClient] = []

    async def start(replica_id: str, beside: object = None) -> InprocClient:  # noqa: ARG001
        if replica_id == "1":
            await may_start.wait()
        engine = engines[int(replica_id)]
        clients.append(InprocClient(engine.core, engine.facts))
        return clients[-1]

    router = await Router.start(start, 1)
    adding = asyncio.create_task(router.replicas.add())
    await until(lambda: router.replicas.starting == ["1"])
    await router.close()
    may_start.set()
    with pytest.raises(EngineDeadError, match="closing"):
        await adding
    assert not any(client._thread.is_alive() for client in clients)


# ---- restarts ----


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path / "script")


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine fits beside another one."""
    monkeypatch.setattr(start_module, "available_memory", lambda: 0)


def ids(router: Router) -> dict[str, int]:
    return {replica.replica_id: process_id(replica.client) for replica in router.replicas.members}


async def test_new_engine_is_ready_before_the_old_one_is_ended(script: Script) -> None:
    async with processes(1, model=script.model) as router:
        (old,) = router.replicas.members
        stream = asyncio.create_task(answer(router, [SLOW, 1], 100))
        await until(lambda: bool(old.requests))
        script.say("crawl:3")
        restarting = asyncio.create_task(router.replicas.restart("0", 0.05))
        while not restarting.done():
            assert (await router.health()).healthy
            assert await answer(router, [1, 2], 5) == expected_tokens([1, 2], 5)
        await restarting
        assert router.replicas.find("0") is not old
        assert not exists(process_id(old.client))
        assert await stream == expected_tokens([SLOW, 1], 100)
        assert (await router.stats()).num_output_tokens >= 100


@pytest.mark.parametrize("fault", ["raise", "die"])
async def test_failed_restart_leaves_the_old_engine_running(script: Script, fault: str) -> None:
    async with processes(1, model=script.model) as router:
        before = ids(router)
        stream = asyncio.create_task(answer(router, [SLOW, 1], 100))
        script.say(fault)
        with pytest.raises(EngineError, match=r"unlucky|ended with code 7 while it was starting"):
            await router.replicas.restart("0", 0.0)
        assert (ids(router), router.replicas.find("0").available) == (before, True)
        assert await stream == expected_tokens([SLOW, 1], 100)


@pytest.mark.usefixtures("no_room")
async def test_last_replica_is_not_stopped_for_a_restart(script: Script) -> None:
    async with processes(1, model=script.model) as router:
        before = ids(router)
        with pytest.raises(
            RequestError, match="replica 0 is the last one that takes requests: it is not"
        ) as refused:
            await router.replicas.restart("0", 0.0)
        assert refused.value.code == "last_replica"
        assert (ids(router), router.replicas.find("0").available) == (before, True)
        await router.replicas.add()
        router.replicas.drain("0")
        with pytest.raises(RequestError, match="replica 1 is the last one that takes requests"):
            await router.replicas.restart("1", 0.0)
        assert await answer(router, [1, 2], 5) == expected_tokens([1, 2], 5)


@pytest.mark.usefixtures("no_room")
async def test_failed_restart_in_place_is_retried_and_the_replica_stays_listed(
    script: Script,
) -> None:
    async with processes(2, model=script.model) as router:
        streams = [asyncio.create_task(answer(router, [SLOW, index], 100)) for index in range(4)]
        await until(lambda: all(replica.requests for replica in router.replicas.members))
        script.say("die")
        restarting = asyncio.create_task(router.replicas.restart("1", 0.0))
        await until(lambda: script.num_starts >= 4)  # two at first, one that failed, and one more
        assert router.replicas.find("1").state == "restarting"
        assert router.replicas.find("0").available
        script.say("")
        await restarting
        assert all(replica.available for replica in router.replicas.members)
        assert await asyncio.gather(*streams) == [expected_tokens([SLOW, index], 100) for index in range(4)]


@pytest.mark.usefixtures("no_room")
async def test_failed_restarts_are_limited_and_stop_a_rolling_restart(script: Script) -> None:
    async with processes(2, ProcessConfig(heartbeat=0.05, max_restarts=1), model=script.model) as router:
        script.say("raise")
        with pytest.raises(EngineDeadError, match=r"could not be restarted: .*unlucky"):
            await router.replicas.roll(0.0)
        assert [replica.state for replica in router.replicas.members] == ["dead", "running"]
        script.say("")
        router.replicas._members = dict(
            reversed(router.replicas._members.items())
        )  # the other one is the next
        with pytest.raises(RequestError, match="stops before replica 1: replica 0 is dead") as refused:
            await router.replicas.roll(0.0)
        assert refused.value.code == "replica_missing"
        for change in (router.replicas.remove("1", 0.0), router.replicas.restart("1", 0.0)):
            with pytest.raises(RequestError, match=r"replica 1 is the (last|only) one that takes requests"):
                await change
        assert await answer(router, [1, 2], 5) == expected_tokens([1, 2], 5)
        await router.replicas.restart("0", 0.0)
        await router.replicas.roll(0.0)
        assert all(replica.available for replica in router.replicas.members)


# ---- one checkpoint ----


async def test_restart_with_other_weights_is_rejected(script: Script) -> None:
    script.say("weights:old")
    async with processes(2, model=script.model) as router:
        before = ids(router)
        script.say("weights:new")
        for change in (router.replicas.roll(0.0), router.replicas.restart("1", 0.0), router.replicas.add()):
            with pytest.raises(CheckpointChangedError, match="start another server"):
                await change
        assert ids(router) == before
        assert all(replica.available for replica in router.replicas.members)


async def test_stream_never_continues_with_other_weights(script: Script) -> None:
    script.say("weights:old")
    process = ProcessConfig(heartbeat=0.05, max_restarts=1)
    async with processes(1, process, model=script.model) as router:
        stream = asyncio.create_task(answer(router, [SLOW, 1], 100))
        await until(lambda: any(routed.output_ids for routed in router._requests.values()))
        script.say("weights:new")
        strike(router, "0")
        with pytest.raises(EngineDeadError, match="the checkpoint has changed since the server started"):
            await stream


async def test_changed_checkpoint_is_noticed_before_an_engine_is_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    config = EngineConfig.create(folder, load_format="dummy")
    known_as = fingerprint_now(config.model)
    assert known_as is not None
    check_unchanged(config, known_as)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointChangedError, match="has changed since the server started"):
        check_unchanged(config, known_as)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointChangedError, match="can no longer be read"):
        check_unchanged(config, known_as)
    check_unchanged(EngineConfig.create("owner/name"), known_as)  # of the hub: the engine checks


def test_free_gpu_memory_is_read_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in --id=3,5) echo '50000, 80000'; echo '40000, 80000';; *) exit 9;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check_gpu_memory("3,5", 0.5)
    with pytest.raises(
        ProcessNotStartedError, match=r"needs 51% of a GPU's 78.12 GiB, but only 39.06 GiB are free"
    ):
        check_gpu_memory("3,5", 0.51)
    with pytest.raises(ProcessNotStartedError, match="free memory of GPU 7 is unknown"):
        check_gpu_memory("7", 0.1)
