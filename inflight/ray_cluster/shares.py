"""What each replica asks of a cluster, and what it is told in return."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace

from inflight.config import EngineConfig, RouterConfig
from inflight.errors import ConfigError
from inflight.ray_cluster.cluster import RayCluster
from inflight.ray_cluster.host import RayHost, Resources

THREADS = "OMP_NUM_THREADS"


class ClusterShares:
    """The same for all replicas: where each of them runs is Ray's choice."""

    def __init__(
        self,
        cluster: RayCluster,
        config: EngineConfig,
        options: RouterConfig,
        environment: Mapping[str, str],
    ) -> None:
        self.count = options.replicas or 1
        self._cluster = cluster
        self._resources = _resources(cluster, config, options)
        self._config = self._share_of(config)
        self._environment = {THREADS: self._threads(config), **environment}
        self._address = cluster.node_address
        self._patience = options.ray_timeout

    @classmethod
    async def ask(
        cls, address: str, config: EngineConfig, options: RouterConfig, environment: Mapping[str, str]
    ) -> ClusterShares:
        """Connect to a cluster. Raises ConfigError where that cannot be, or Ray is not installed."""

        def connect() -> ClusterShares:
            cluster = RayCluster(address)
            try:
                return cls(cluster, config, options, environment)
            except BaseException:
                cluster.close()
                raise

        return await asyncio.to_thread(connect)

    def of(self, index: int) -> tuple[EngineConfig, RayHost]:  # noqa: ARG002
        host = RayHost(self._address, self._resources, self._environment, self._patience)
        return self._config, host

    def beside(self, index: int, process_id: int | None) -> tuple[EngineConfig, RayHost]:  # noqa: ARG002
        """Ray knows whether there is room: where it finds none at once, there is none."""
        return self._config, RayHost(self._address, self._resources, self._environment, 0.0)

    async def close(self) -> None:
        await asyncio.to_thread(self._cluster.close)

    def _share_of(self, config: EngineConfig) -> EngineConfig:
        """Of a machine's memory: what is asked of its GPUs or, on a CPU, what others that fit beside it leave."""
        asked, cache = self._resources, config.cache
        if asked.num_gpus:
            share = min(1.0, asked.num_gpus / config.parallel.num_ranks)
            cache = replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization * share)
        else:
            largest = max((node.get("CPU", 0.0) for node in self._cluster.nodes), default=0.0)
            together = min(self.count, max(1, int(largest // asked.num_cpus)))
            cache = replace(cache, num_neighbours=together - 1)
        device = "cuda" if asked.num_gpus else "cpu"  # and nothing that was not asked for
        return replace(config, cache=cache, model=replace(config.model, device=device))

    def _threads(self, config: EngineConfig) -> str:
        """Of each rank."""
        asked = int(self._resources.num_cpus // config.parallel.num_ranks)
        return os.environ.get(THREADS) or str(max(1, asked))


def _resources(cluster: RayCluster, config: EngineConfig, options: RouterConfig) -> Resources:
    device, num_ranks = config.model.device, config.parallel.num_ranks
    if device.startswith("cuda:"):
        raise ConfigError(f"device is {device!r}: with ray_address, Ray chooses the GPU; allowed is 'cuda'")
    num_gpus = options.ray_num_gpus
    if num_gpus is None:
        is_wanted = device == "cuda" or (device == "auto" and cluster.total.get("GPU", 0) > 0)
        num_gpus = num_ranks if is_wanted else 0
    if num_gpus > 1 and num_gpus != int(num_gpus):
        raise ConfigError(f"ray_num_gpus is {num_gpus}: allowed are a part of one GPU, or whole ones")
    return Resources(float(options.ray_num_cpus or num_ranks), float(num_gpus))
