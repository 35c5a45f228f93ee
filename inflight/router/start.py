"""From a configuration to a router: an engine process for each replica, with its part of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from inflight.config import EngineConfig, ProcessConfig, RouterConfig
from inflight.engine.process import ProcessClient
from inflight.native.library import num_threads
from inflight.router.router import Router

GPUS = Path("/proc/driver/nvidia/gpus")
THREADS, DEVICES = "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"

LoadProgress = Callable[[int, int], None]  # bytes done, bytes in all


async def start_router(
    config: EngineConfig,
    options: RouterConfig,
    process: ProcessConfig | None = None,
    progress: LoadProgress | None = None,
    build: str = "model",
) -> Router:
    """Start the replicas and wait until they are ready. What one of them cannot do with its configuration is raised."""
    shares = MachineShares(config, process or ProcessConfig(), options.replicas or 1)
    bytes_loaded = _SummedProgress(progress)
    num_blocks: dict[str, int] = {}  # of each replica that has been started

    async def start(replica_id: str) -> ProcessClient:
        given, watched = shares.of(int(replica_id))
        # Whoever comes later must hold what the others hold, whatever memory is free by then.
        held = num_blocks.get(replica_id, min(num_blocks.values(), default=given.cache.num_blocks))
        given = replace(given, cache=replace(given.cache, num_blocks=held))
        client = await ProcessClient.start(given, watched, bytes_loaded.of(replica_id), build)
        num_blocks[replica_id] = client.facts.num_blocks
        return client

    return await Router.start(start, shares.count, options.routing, options.failover_timeout)


class MachineShares:
    """What each replica gets of the machine: its threads on a CPU, its GPUs where there are some."""

    def __init__(self, config: EngineConfig, process: ProcessConfig, count: int) -> None:
        self.count = count
        self._config = config
        # A replica that says nothing is given up as soon as it counts as unhealthy: others can take over.
        silent = process.silent_after
        limit = process.kill_silent_after
        self._process = replace(process, kill_silent_after=silent if limit is None else min(silent, limit))
        self._gpus = visible_gpus() if config.model.device in ("auto", "cuda") else []

    def of(self, index: int) -> tuple[EngineConfig, ProcessConfig]:
        """The configuration of one replica."""
        config, environment = self._config, dict(self._process.environment)
        if self._gpus:
            environment[DEVICES] = self._gpus[index % len(self._gpus)]
            num_on_it = -(-self.count // len(self._gpus))
            share = config.cache.gpu_memory_utilization / num_on_it
            config = replace(config, cache=replace(config.cache, gpu_memory_utilization=share))
        else:
            config = replace(config, cache=replace(config.cache, num_neighbours=self.count - 1))
            if THREADS not in os.environ:
                num_sharing = self.count * config.parallel.num_ranks
                environment.setdefault(THREADS, str(max(1, num_threads() // num_sharing)))
        return config, replace(self._process, environment=environment)


def visible_gpus() -> list[str]:
    """Their names for CUDA_VISIBLE_DEVICES, found without CUDA: this process must not hold a GPU."""
    given = os.environ.get(DEVICES)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    try:
        return [str(index) for index in range(len(list(GPUS.iterdir())))]
    except OSError:
        return []


class _SummedProgress:
    """The replicas' loading as one."""

    def __init__(self, progress: LoadProgress | None) -> None:
        self._progress = progress
        self._parts: dict[str, tuple[int, int]] = {}

    def of(self, replica_id: str) -> LoadProgress:
        def tell(num_done: int, num_total: int) -> None:
            self._parts[replica_id] = num_done, num_total
            if self._progress is not None:
                parts = self._parts.values()
                self._progress(sum(done for done, _ in parts), sum(total for _, total in parts))

        return tell
