"""The connection of this process to a Ray cluster, and the resources that each replica requests from it.

Ray has one connection per process, however many engines use it.
"""

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
from inflight.router.ray_cluster.host import RayHost, Resources

CONNECT_TIMEOUT = 10.0  # seconds

_lock = threading.Lock()
_num_users = 0
_is_ours = False  # the connection was made here, and is closed here


class RayCluster:
    """A connection to a cluster. Opening and closing take seconds, so do not call them in an event loop; nor open one
    in the main thread, where Ray would take over SIGTERM."""

    def __init__(self, address: str) -> None:
        """Connect. Raises ConfigError if the cluster does not answer or Ray is not installed."""
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
            elif address not in ("auto", current := ray.get_runtime_context().gcs_address):
                raise ConfigError(f"ray_address is {address!r}, but this process is connected to {current!r}")
            _num_users += 1
        self._ray = ray
        self._is_open = True

    @property
    def node_address(self) -> str:
        """The address of this machine in the cluster."""
        address: str = self._ray.util.get_node_ip_address()
        return address

    @property
    def total(self) -> Mapping[str, float]:
        """The resources of all nodes together."""
        resources: Mapping[str, float] = self._ray.cluster_resources()
        return resources

    @property
    def nodes(self) -> list[Mapping[str, float]]:
        """The resources of each node."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """Disconnect, unless the connection is still in use."""
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
            # Engine logs stay with Ray: its line prefix would break JSON logs.
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"ray_address is {address!r}, but no cluster answers there: {first}") from error


def _check_reachable(address: str) -> None:
    """Fail fast: Ray itself would try for minutes and then exit the process."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Ray's warning that it does not handle SIGTERM."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


THREADS = "OMP_NUM_THREADS"


class ClusterShares:
    """The resources of each replica. They are the same for all: Ray chooses where each runs."""

    def __init__(
        self, cluster: RayCluster, config: EngineConfig, options: RouterConfig, environment: Mapping[str, str]
    ) -> None:
        self.count = options.replicas or 1
        self._cluster = cluster
        self._resources = _resources(cluster, config, options)
        self._config = self._share_of(config)
        self._environment = {THREADS: self._threads(config), **environment}
        self._address = cluster.node_address
        self._patience = options.ray_timeout

    @classmethod
    async def connect(
        cls, address: str, config: EngineConfig, options: RouterConfig, environment: Mapping[str, str]
    ) -> ClusterShares:
        """Connect to a cluster. Raises ConfigError if that fails or Ray is not installed."""

        def open_cluster() -> ClusterShares:
            cluster = RayCluster(address)
            try:
                return cls(cluster, config, options, environment)
            except BaseException:
                cluster.close()
                raise

        return await asyncio.to_thread(open_cluster)

    def share_and_host(self, index: int) -> tuple[EngineConfig, RayHost]:  # noqa: ARG002
        host = RayHost(self._address, self._resources, self._environment, self._patience)
        return self._config, host

    def beside(self, index: int, process_id: int | None) -> tuple[EngineConfig, RayHost]:  # noqa: ARG002
        """Return the same without patience: if Ray has no resources at once, there are none."""
        return self._config, RayHost(self._address, self._resources, self._environment, 0.0)

    async def close(self) -> None:
        await asyncio.to_thread(self._cluster.close)

    def _share_of(self, config: EngineConfig) -> EngineConfig:
        """Return a config with the replica's share of memory: of its GPUs, or of the machine."""
        resources, cache = self._resources, config.cache
        if resources.num_gpus:
            share = min(1.0, resources.num_gpus / config.parallel.num_ranks)
            cache = replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization * share)
        else:
            largest = max((node.get("CPU", 0.0) for node in self._cluster.nodes), default=0.0)
            together = min(self.count, max(1, int(largest // resources.num_cpus)))
            cache = replace(cache, num_neighbours=together - 1)
        device = "cuda" if resources.num_gpus else "cpu"  # never a device that was not requested
        return replace(config, cache=cache, model=replace(config.model, device=device))

    def _threads(self, config: EngineConfig) -> str:
        """Return the number of threads of each rank."""
        num_threads = int(self._resources.num_cpus // config.parallel.num_ranks)
        return os.environ.get(THREADS) or str(max(1, num_threads))


def _resources(cluster: RayCluster, config: EngineConfig, options: RouterConfig) -> Resources:
    device, num_ranks = config.model.device, config.parallel.num_ranks
    if device.startswith("cuda:"):
        raise ConfigError(f"device is {device!r}: with ray_address, Ray chooses the GPU; allowed is 'cuda'")
    num_gpus = options.ray_num_gpus
    if num_gpus is None:
        uses_gpus = device == "cuda" or (device == "auto" and cluster.total.get("GPU", 0) > 0)
        num_gpus = num_ranks if uses_gpus else 0
    if num_gpus > 1 and num_gpus != int(num_gpus):
        raise ConfigError(f"ray_num_gpus is {num_gpus}: allowed are a part of one GPU, or whole ones")
    return Resources(float(options.ray_num_cpus or num_ranks), float(num_gpus))
