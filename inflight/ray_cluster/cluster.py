"""The connection of this process to a Ray cluster. Ray has one for each process, however many engines use it."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from inflight.errors import ConfigError

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
