"""Replicas on a real Ray cluster of two nodes: what its actors and nodes do is not seen in what a client gets."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, AsyncEngine
from inflight.config import EngineConfig, ProcessConfig, RouterConfig
from inflight.outputs import RequestOutput
from inflight.processes.child import ProcessNotStartedError
from inflight.router.router import Router
from inflight.router.start import start_router
from inflight.timeline.chunks import TimelineQuery, decode_chunk
from tests.e2e.test_replicas import CASES, PROMPTS, begun, generate, same
from tests.engine.faulty import BUILD
from tests.router.replicas import until_all_run
from tests.support.waiting import until

WATCHED = ProcessConfig(heartbeat=0.05, silent_after=60.0)


def started(start: Callable[[], Any]) -> Any:
    """Ray gives the helpers of a node 15 seconds to start, and no option for more (its issue 65983). On a busy machine
    that may be too short for once."""
    for _ in range(2):
        with contextlib.suppress(Exception):
            return start()
    return start()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with the resources of exactly one replica each."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # what else runs here is not its business
        folder = tempfile.mkdtemp(prefix="ray-")  # not pytest's, whose names are too long for sockets
        # Not `temp_dir`: Cluster also writes its address to Ray's default folder, and fails where that does not exist.
        patch.setenv("RAY_TMPDIR", folder)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "include_dashboard": False}
        made = started(lambda: Cluster(initialize_head=True, head_node_args=dict(head)))
        try:
            started(lambda: made.add_node(num_cpus=1))
            yield made
        finally:
            made.shutdown()
            signal.signal(signal.SIGTERM, before)
            shutil.rmtree(folder, ignore_errors=True)


def raylet_of(node: Any) -> int:
    """The process that has those of a node's actors."""
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


def actors(cluster: Any) -> dict[int, int]:
    """Processes of engines, each with its parent's: the raylet of its node."""
    raylets = set(map(raylet_of, cluster.list_all_nodes()))
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in raylets and (folder / "cmdline").read_bytes().startswith(b"ray::EngineActor"):
                parents[int(folder.name)] = parent
    return parents


async def disturbed(engine: AsyncEngine, router: Router, disturb: Callable[[], None]) -> list[RequestOutput]:
    """Return the outputs of requests that run on both replicas while `disturb` is called."""
    running = asyncio.create_task(generate(engine))
    await until(lambda: all(len(replica.requests) >= 3 for replica in router.replicas.members))
    await begun(router)
    await asyncio.to_thread(disturb)
    return await running


def actor_on(cluster: Any, node: Any) -> int:
    (actor_id,) = (actor for actor, parent in actors(cluster).items() if parent == raylet_of(node))
    return actor_id


def lose_node(cluster: Any, node: Any, engine: int) -> None:
    """Remove a node with all its processes.

    Its engine is stopped first, so that it cannot finish its answers while Ray ends the others.
    """
    os.kill(engine, signal.SIGSTOP)
    cluster.remove_node(node, allow_graceful=False)
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine, signal.SIGKILL)


@pytest.mark.timeout(600)  # three nodes and four engines are started, each of which is several processes
async def test_streams_outlive_actors_and_nodes(cluster: Any) -> None:
    with LLM(num_blocks=1024) as llm:
        undisturbed = llm.generate(PROMPTS, CASES, use_tqdm=False)
    routing: dict[str, Any] = {"replicas": 2, "routing": "round_robin", "ray_address": cluster.address}
    async with asyncio.timeout(400):
        async with await AsyncEngine.start(process=WATCHED, num_blocks=1024, **routing) as engine:
            router = engine.client
            assert isinstance(router, Router)
            assert len(set(actors(cluster).values())) == 2, "one on each node"

            (node,) = cluster.worker_nodes
            lose = partial(lose_node, cluster, node, actor_on(cluster, node))
            same(await disturbed(engine, router, lose), undisturbed)
            await until(lambda: len(router.replicas.available) == 1)
            assert (await router.health()).healthy
            started(lambda: cluster.add_node(num_cpus=1))  # in the main thread, or it fails
            await until_all_run(router)
            assert sum(replica.health.num_restarts for replica in router.replicas.members) == 1

            past = await router.read_timeline(TimelineQuery(-math.inf))
            assert sum(decode_chunk(data).num_steps for _, data in past.chunks) > 0, "of the survivor"
            watched: set[str] = set()  # replicas whose steps arrive while they run
            stop = router.watch_timeline(lambda replica, _: watched.add(replica))
            kill_one = partial(os.kill, max(actors(cluster)), signal.SIGKILL)
            same(await disturbed(engine, router, kill_one), undisturbed)
            stop()
            assert watched == {replica.replica_id for replica in router.replicas.members}
            records = [router._history.get(name) for name in router._history._records]
            assert sum(state.record.num_failovers for state in records if state is not None) >= 4
        # Closed while another actor is on its way.
        await until(lambda: not actors(cluster))
        await check_that_no_room_is_one_line(cluster)


async def check_that_no_room_is_one_line(cluster: Any) -> None:
    """Here, since a second test may be run by another process, with another cluster."""
    options = RouterConfig(ray_address=cluster.address, ray_num_cpus=64, ray_timeout=0)
    with pytest.raises(ProcessNotStartedError, match=r"^Ray found no node with 64 CPU free within"):
        await start_router(EngineConfig.create(model="faulty"), options, build=BUILD)
