"""Starts a router: an engine process for each replica, with its share of the machine or the cluster."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from inflight.checkpoint.checkpoint import fingerprint_now
from inflight.config import EngineConfig, ProcessConfig, RouterConfig
from inflight.engine.client import ReplicaClient
from inflight.engine.remote.process_client import ProcessClient
from inflight.engine.remote.supervisor import LoadProgress, engine_host
from inflight.errors import CheckpointChangedError, KVBudgetError, ModelError, as_gib
from inflight.layers.native.library import num_threads
from inflight.layers.native.memory import available_memory, used_memory
from inflight.processes.child import ChildHost, ProcessHost, ProcessNotStartedError
from inflight.router.router import Router

GPUS = Path("/proc/driver/nvidia/gpus")
THREADS, DEVICES = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"
SMI_TIMEOUT = 30.0  # seconds that nvidia-smi may take


async def start_router(
    config: EngineConfig,
    options: RouterConfig,
    process: ProcessConfig | None = None,
    progress: LoadProgress | None = None,
    build: str = "model",
) -> Router:
    """Start the replicas and wait until they are ready. Raises the error of a replica that fails to start."""
    watched = _with_short_timeout(process or ProcessConfig())
    shares = await _shares(config, options, watched.environment)
    bytes_loaded = _SummedProgress(progress)
    num_blocks: dict[str, int] = {}  # by replica
    generations: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of its engines

    async def start(replica_id: str, beside: ReplicaClient | None = None) -> ProcessClient:
        if beside is None:
            share, host = shares.share_and_host(int(replica_id))
        else:
            assert isinstance(beside, ProcessClient)
            await asyncio.to_thread(check_unchanged, config, beside.facts.fingerprint)
            share, host = await asyncio.to_thread(shares.beside, int(replica_id), beside.process_id)
        # Later replicas need as many blocks as the others, however much memory is free by then.
        replica_blocks = num_blocks.get(replica_id, min(num_blocks.values(), default=share.cache.num_blocks))
        share = replace(share, cache=replace(share.cache, num_blocks=replica_blocks))
        try:
            client = await ProcessClient.start(
                share, watched, bytes_loaded.for_replica(replica_id), build, host, generations[replica_id]
            )
        except KVBudgetError as error:
            if beside is None:
                raise
            raise ProcessNotStartedError(str(error)) from error
        num_blocks[replica_id] = client.facts.num_blocks
        return client

    try:
        return await Router.start(
            start, shares.count, options.routing, options.failover_timeout, shares.close
        )
    except BaseException:
        await shares.close()
        raise


class Shares(Protocol):
    """The resources of each replica, and where it runs."""

    count: int

    def share_and_host(self, index: int) -> tuple[EngineConfig, ProcessHost]:
        """Return the configuration of one replica, and where it runs."""

    def beside(self, index: int, process_id: int | None) -> tuple[EngineConfig, ProcessHost]:
        """Return the same for an engine that starts while the replica's current one still runs.

        `process_id` is that of the current engine, if it is on this machine. Raises ProcessNotStartedError if there is
        no room for both.
        """

    async def close(self) -> None:
        """Release everything, after all replicas are closed."""


def check_unchanged(config: EngineConfig, fingerprint: str) -> None:
    """Raise CheckpointChangedError if an engine that starts now would load a different checkpoint.

    For models from the hub this is not always known here; the engine checks again after loading.
    """
    try:
        current = fingerprint_now(config.model)
    except (ModelError, OSError) as error:
        raise CheckpointChangedError(
            f"the checkpoint has changed and can no longer be read: {error}"
        ) from error
    if fingerprint and current not in (None, fingerprint):
        raise CheckpointChangedError(
            "the checkpoint has changed since the server started: to serve other weights, start another server"
        )


async def _shares(config: EngineConfig, options: RouterConfig, environment: Mapping[str, str]) -> Shares:
    if options.ray_address is None:
        return MachineShares(config, environment, options.replicas or 1)
    from inflight.router.ray_cluster.cluster import ClusterShares

    return await ClusterShares.connect(options.ray_address, config, options, environment)


def _with_short_timeout(process: ProcessConfig) -> ProcessConfig:
    """Return a config that gives up a silent replica as soon as it is unhealthy, since others can take over."""
    silent, limit = process.silent_after, process.kill_silent_after
    return replace(process, kill_silent_after=silent if limit is None else min(silent, limit))


class MachineShares:
    """Divides this machine between replicas: GPUs if there are any, otherwise CPU threads."""

    def __init__(self, config: EngineConfig, environment: Mapping[str, str], count: int) -> None:
        self.count = count
        self._config = config
        self._environment = environment
        device = config.model.device
        gpus = visible_gpus() if device in ("auto", "cuda") else []
        self._gpus = gpu_groups(gpus, config.parallel.num_ranks)
        # All replicas share the GPU that `device` names, or are spread over the groups of GPUs.
        self._num_on_gpu = count if device.startswith("cuda:") else -(-count // max(1, len(self._gpus)))

    async def close(self) -> None:
        """Do nothing: no resources are held."""

    def share_and_host(self, index: int) -> tuple[EngineConfig, ChildHost]:
        config, environment = self._config, dict(self._environment)
        if self._gpus or config.model.device.startswith("cuda:"):
            if self._gpus:
                environment[DEVICES] = self._gpus[index % len(self._gpus)]
            share = config.cache.gpu_memory_utilization / self._num_on_gpu
            config = replace(config, cache=replace(config.cache, gpu_memory_utilization=share))
        else:
            config = replace(config, cache=replace(config.cache, num_neighbours=self.count - 1))
            if THREADS not in os.environ:
                num_sharing = self.count * config.parallel.num_ranks
                environment.setdefault(THREADS, str(max(1, num_threads() // num_sharing)))
        return config, engine_host(environment, f"engine process of replica {index}")

    def beside(self, index: int, process_id: int | None) -> tuple[EngineConfig, ChildHost]:
        config, host = self.share_and_host(index)
        if self._gpus:
            check_gpu_memory(host.environment[DEVICES], config.cache.gpu_memory_utilization)
        elif process_id is not None and (used := used_memory(process_id)) > (available := available_memory()):
            raise ProcessNotStartedError(
                f"the engine uses {as_gib(used)}, but only {as_gib(available)} are free"
            )
        return config, host


def check_gpu_memory(names: str, share: float) -> None:
    """Raise ProcessNotStartedError if one of these GPUs does not have this share of its memory free.

    This asks nvidia-smi, since this process must not open a GPU.
    """
    command = [
        "nvidia-smi",
        f"--id={names}",
        "--query-gpu=memory.free,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        output = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=SMI_TIMEOUT
        ).stdout
        rows = [[int(field) for field in line.split(",")] for line in output.splitlines()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ProcessNotStartedError(f"the free memory of GPU {names} is unknown: {error}") from error
    for free, total in rows:
        if free < share * total:
            raise ProcessNotStartedError(
                f"an engine needs {share:.0%} of a GPU's {as_gib(total << 20)}, but only {as_gib(free << 20)} are free "
                f"on GPU {names}"
            )


def visible_gpus() -> list[str]:
    """Return the GPUs as in CUDA_VISIBLE_DEVICES, without CUDA: this process must not open a GPU."""
    devices = os.environ.get(DEVICES)
    if devices is not None:
        return [name.strip() for name in devices.split(",") if name.strip() not in ("", "-1")]
    try:
        return [str(index) for index in range(len(list(GPUS.iterdir())))]
    except OSError:
        return []


def gpu_groups(gpus: list[str], num_ranks: int) -> list[str]:
    """Return the GPUs of each replica as in CUDA_VISIBLE_DEVICES. If there are too few, ranks share them."""
    size = min(num_ranks, len(gpus))
    return [",".join(gpus[size * i : size * (i + 1)]) for i in range(len(gpus) // size)] if gpus else []


class _SummedProgress:
    """The loading progress of all replicas together."""

    def __init__(self, progress: LoadProgress | None) -> None:
        self._progress = progress
        self._parts: dict[str, tuple[int, int]] = {}

    def for_replica(self, replica_id: str) -> LoadProgress:
        def report(num_done: int, num_total: int) -> None:
            self._parts[replica_id] = num_done, num_total
            if self._progress is not None:
                parts = self._parts.values()
                self._progress(sum(done for done, _ in parts), sum(total for _, total in parts))

        return report
