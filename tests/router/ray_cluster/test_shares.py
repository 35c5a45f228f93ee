"""The resources that replicas request from a cluster, tested without one."""

from __future__ import annotations

import math
import socket
import sys
from typing import Any, cast

import pytest

from inflight.config import EngineConfig, RouterConfig
from inflight.errors import ConfigError
from inflight.processes.channel import ConnectionInfo
from inflight.router.ray_cluster.actor import EngineActor
from inflight.router.ray_cluster.cluster import ClusterShares, RayCluster
from inflight.router.ray_cluster.host import Resources
from inflight.router.start import start_router


class FakeCluster:
    node_address = "10.0.0.1"

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.nodes = list(nodes)
        self.total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}


def shares(*nodes: dict[str, float], config: dict[str, Any] | None = None, **options: Any) -> ClusterShares:
    cluster = cast(RayCluster, FakeCluster(*nodes))
    fields: dict[str, Any] = {"replicas": 6, "ray_address": "auto"} | options
    routing = RouterConfig(**fields)
    return ClusterShares(cluster, EngineConfig.create(**config or {}), routing, {"OTHER": "1"})


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_on_cpus_memory_is_shared_with_those_that_fit_on_the_same_node() -> None:
    config, host = shares({"CPU": 16}, {"CPU": 8}, ray_num_cpus=4).share_and_host(0)
    assert host.resources == Resources(4, 0)
    assert (config.model.device, config.cache.num_neighbours) == ("cpu", 3)
    assert host.environment == {"OMP_NUM_THREADS": "4", "OTHER": "1"}
    config, _ = shares({"CPU": 64}, replicas=2).share_and_host(0)
    assert config.cache.num_neighbours == 1


def test_each_rank_gets_a_gpu_where_there_are_some() -> None:
    config, host = shares({"CPU": 8, "GPU": 4}, config={"tensor_parallel_size": 2}).share_and_host(0)
    assert (host.resources, str(host.resources)) == (Resources(2, 2), "2 CPU and 2 GPU")
    assert (config.model.device, config.cache.gpu_memory_utilization) == ("cuda", 0.9)
    _, host = shares({"CPU": 8, "GPU": 4}, config={"device": "cpu"}).share_and_host(0)
    assert host.resources == Resources(1, 0)
    _, host = shares({"CPU": 8}, config={"device": "cuda"}).share_and_host(0)
    assert host.resources == Resources(1, 1), "a cluster may grow"


def test_part_of_a_gpu_is_part_of_its_memory() -> None:
    config, host = shares({"CPU": 8, "GPU": 1}, ray_num_gpus=0.5).share_and_host(0)
    assert (host.resources.num_gpus, config.cache.gpu_memory_utilization) == (0.5, 0.45)


def test_new_replica_waits_for_resources_and_a_restarted_one_waits_longer() -> None:
    connection = ConnectionInfo("", "", "", 0, 0, "text")
    replica_shares = shares({"CPU": 8}, ray_timeout=5)
    for index in range(2):
        _, host = replica_shares.share_and_host(index)
        assert [host.create_process(connection)._patience for _ in range(3)] == [5, math.inf, math.inf]


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({}, {"device": "cuda:1"}, "Ray chooses the GPU"),
        ({"ray_num_gpus": 1.5}, {}, "ray_num_gpus is 1.5: allowed are a part of one GPU, or whole ones"),
        ({"ray_num_gpus": -1}, {}, "ray_num_gpus is -1"),
        ({"ray_num_cpus": 0}, {}, "ray_num_cpus is 0: allowed is None or a positive number"),
        ({"ray_address": ""}, {}, "ray_address is ''"),
    ],
)
def test_impossible_resources_are_rejected(
    options: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shares({"CPU": 8}, config=config, **options)


async def test_server_outside_the_cluster_is_rejected() -> None:
    with pytest.raises(ConfigError, match="must run on a machine of the cluster"):
        await start_router(EngineConfig(), RouterConfig(ray_address="ray://head:10001"))


async def test_address_without_a_cluster_is_a_one_line_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"^ray_address is '{address}', but no cluster answers there: .*refused"
        ):
            await start_router(EngineConfig(), RouterConfig(ray_address=address))


async def test_missing_extra_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^ray_address needs ray: install inflight-llm\[ray,server\]$"):
        await start_router(EngineConfig(), RouterConfig(ray_address="auto"))


def test_node_with_another_version_is_rejected() -> None:
    assert "and the server has 0.0.0" in EngineActor().run(b"", {}, "0.0.0")
