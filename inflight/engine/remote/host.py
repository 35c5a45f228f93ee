"""Where an engine's process runs: the seam between whoever talks to it and whoever starts, watches and ends it.

`ChildHost` (`child_process.py`) has it as a child of this process, `RayHost` (`ray_cluster/host.py`) as an actor on a
machine that Ray chooses. All else, from the messages to the restarts, is the same.
"""

from __future__ import annotations

from typing import Protocol

from inflight.engine.remote.wire import ConnectionInfo
from inflight.errors import EngineDeadError


class ProcessNotStartedError(EngineDeadError):
    """There is no process: no descriptor, no folder for its sockets, no memory, no room. That may pass."""


class HostedProcess(Protocol):
    """A process of ours, or one that is to be."""

    @property
    def process_id(self) -> int | None:
        """None where it is not there yet, or not on this machine."""

    @property
    def is_waiting_for_room(self) -> bool:
        """Whether no process was started yet, because there is no machine for it."""

    def live(self) -> str:
        """Start it and wait for its end, in one thread. Says how it ended. Raises ProcessNotStartedError."""

    def kill(self) -> None:
        """End it now, or never start it. Does not wait."""


class ProcessHost(Protocol):
    @property
    def name(self) -> str:
        """Of what it hosts, for people."""

    @property
    def address(self) -> str | None:
        """Of this machine, as its processes reach it; None where they are on it."""

    def hosted(self, connection: ConnectionInfo) -> HostedProcess:
        """A process that is not started yet."""
