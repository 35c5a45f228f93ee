"""Engine processes as Ray actors, each in its own placement group.

Ray chooses the node, accounts for its resources, and stops the actor with this process. It does not restart the actor:
the supervisor does so with a new actor in a new group, since a restarted engine needs a new connection, counts against
`max_restarts`, and may fit on another node.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import math
import textwrap
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from inflight.processes.channel import ConnectionInfo
from inflight.processes.child import ProcessNotStartedError
from inflight.router.ray_cluster.actor import EngineActor, installed_version

logger = logging.getLogger(__name__)

KILL_TIMEOUT = 3.0  # seconds for Ray to report that an actor ended; longer if its node is lost
MAX_REASON = 300  # characters of Ray's messages
WARN_AFTER = 5.0  # seconds without resources before a warning


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that a replica requests, for all its ranks together."""

    num_cpus: float
    num_gpus: float

    def bundle(self) -> dict[str, float]:
        return {"CPU": self.num_cpus} | ({"GPU": self.num_gpus} if self.num_gpus else {})

    def __str__(self) -> str:
        return " and ".join(f"{amount:g} {name}" for name, amount in self.bundle().items())


@dataclass(slots=True)
class RayHost:
    """Implements `ProcessHost`, for one replica."""

    name = "engine process"
    address: str
    resources: Resources
    environment: Mapping[str, str]
    patience: float  # seconds that the first process waits for resources

    def create_process(self, connection: ConnectionInfo) -> RayProcess:
        patience = self.patience
        self.patience = math.inf  # a restarted engine waits for its old resources
        return RayProcess(self, connection, patience)


class RayProcess:
    """Implements `HostedProcess`."""

    process_id = None  # it runs on another machine

    def __init__(self, host: RayHost, connection: ConnectionInfo, patience: float) -> None:
        self._host = host
        self._connection = connection
        self._patience = patience
        self._woken = threading.Event()  # it ended or is to be killed
        self._killed = False
        self.is_waiting_for_machine = True

    def run(self) -> str:
        from ray.util import placement_group, remove_placement_group

        try:
            # One bundle: the ranks of a model share the memory of one machine, and its GPUs go to one actor.
            group = placement_group([self._host.resources.bundle()], strategy="STRICT_PACK")
        except Exception as error:
            raise ProcessNotStartedError(
                f"Ray cannot create a placement group: {_first_line(error)}"
            ) from error
        try:
            self._wait_for_resources(group)
            self.is_waiting_for_machine = False
            return f"the engine's actor ended: {self._run(group)}"
        finally:
            with contextlib.suppress(Exception):  # the cluster is gone
                remove_placement_group(group)

    def kill(self) -> None:
        self._killed = True
        self._woken.set()

    def _wait_for_resources(self, group: Any) -> None:
        """Wait for resources, which may take long in a cluster that grows on demand."""
        began, warned = time.monotonic(), False
        while not self._is_placed(group):
            waited = time.monotonic() - began
            if self._killed:
                raise ProcessNotStartedError("the engine was stopped before Ray had resources for it")
            if waited >= self._patience:
                raise ProcessNotStartedError(
                    f"Ray found no node {self._lacking()} within {waited:.0f} seconds"
                )
            if waited >= WARN_AFTER and not warned:
                warned = True
                logger.warning("an engine is waiting: Ray has no node %s", self._lacking())

    def _is_placed(self, group: Any) -> bool:
        try:
            return bool(group.wait(timeout_seconds=1))
        except Exception as error:
            raise ProcessNotStartedError(f"Ray does not answer: {_first_line(error)}") from error

    def _lacking(self) -> str:
        return f"with {self._host.resources} free"

    def _run(self, group: Any) -> str:
        """Run the engine in Ray and return how it ended."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._host.resources
        options = {
            "num_cpus": resources.num_cpus,
            "num_gpus": resources.num_gpus,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        connection = msgspec.json.encode(self._connection)
        actor = ray.remote(EngineActor).options(**options).remote()
        try:
            ended = actor.run.remote(connection, dict(self._host.environment), installed_version()).future()
            ended.add_done_callback(lambda _: self._woken.set())
            self._woken.wait()
            if self._killed:
                ray.kill(actor)
            return _how(ended)
        except Exception as error:
            return _first_line(error)
        finally:
            with contextlib.suppress(Exception):
                ray.kill(actor)  # a finished actor would stay alive


def _how(ended: concurrent.futures.Future[str]) -> str:
    try:
        return ended.result(KILL_TIMEOUT)
    except TimeoutError:
        return "it was killed, and Ray has not confirmed yet that it is gone"
    except Exception as error:
        return _first_line(getattr(error, "cause", None) or error)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error: Ray's messages can be long."""
    return textwrap.shorten(next(iter(str(error).splitlines()), type(error).__name__), MAX_REASON)
