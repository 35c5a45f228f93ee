"""The connection of this process to a Ray cluster. Ray has one for each process, however many engines use it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from inflight.config import EngineConfig, RouterConfig
from inflight.errors import ConfigError
from inflight.ray_cluster.host import RayHost, Resources

CONNECT_TIMEOUT = 10.0  # seconds

_lock = threading.Lock()
_num_users = 0
_is_ours = False  # the connection was made here, and is ended here


class RayCluster:
    """Connected until it is closed. Both may take seconds, and so are not for an event loop's thread; nor is the first
    for the main thread, where Ray would take SIGTERM for itself."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError where there is no such cluster, or no Ray."""
        global _num_users, _is_ours
        ray = import_ray()
        if address.startswith("ray://"):
            raise ConfigError(
                f"ray_address is {address!r}: the server must run on a machine of the cluster, where 'auto' finds it"
            )
        with _lock:
            if not ray.is_initialized():
                _connect(ray, address)
                _is_ours = True
            elif address not in ("auto", found := ray.get_runtime_context().gcs_address):
                raise ConfigError(f"ray_address is {address!r}, but this process is connected to {found!r}")
            _num_users += 1
        self._ray = ray
        self._is_open = True

    @property
    def node_address(self) -> str:
        """Of this machine, as the others know it."""
        found: str = self._ray.util.get_node_ip_address()
        return found

    @property
    def total(self) -> Mapping[str, float]:
        """Of all nodes together, by resource."""
        found: Mapping[str, float] = self._ray.cluster_resources()
        return found

    @property
    def nodes(self) -> list[Mapping[str, float]]:
        """What each node has, by resource."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """Disconnect, if no one else needs the connection."""
        global _num_users, _is_ours
        with _lock:
            if not self._is_open:
                return
            self._is_open = False
            _num_users -= 1
            if _is_ours and not _num_users:
                _is_ours = False
                self._ray.shutdown()


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"ray_address needs {error.name}: install inflight-llm[ray,server]") from error
    return ray


def _connect(ray: Any, address: str) -> None:
    try:
        _check_reachable(address)
        with _quiet():
            # What engines log stays with Ray, whose own words before each line would spoil logs of one object a line.
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"ray_address is {address!r}, where no cluster answers: {first}") from error


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes, and then end the process."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray warns that it does not take SIGTERM."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


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
