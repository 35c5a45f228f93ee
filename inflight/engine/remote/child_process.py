"""Processes of ours as children of this one."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from inflight.engine.remote.host import ProcessNotStartedError
from inflight.engine.remote.wire import ConnectionInfo

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.engine.remote.worker")


@dataclass(frozen=True, slots=True)
class ChildHost:
    """Implements `ProcessHost`."""

    environment: Mapping[str, str] = field(default_factory=dict)  # beside that of this process
    name: str = "engine process"
    command: Sequence[str] = field(default_factory=lambda: COMMAND)
    descriptors: Collection[int] = ()  # that it inherits

    @property
    def address(self) -> None:
        return None

    def hosted(self, connection: ConnectionInfo) -> ChildProcess:
        return ChildProcess(self, connection)


class ChildProcess:
    """Implements `HostedProcess`. It ends with this process, however this one ends."""

    def __init__(self, host: ChildHost, connection: ConnectionInfo) -> None:
        self._host = host
        self._connection = connection
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_waiting_for_room(self) -> bool:
        return False

    def live(self) -> str:
        host = self._host
        spare = _take_spare(host)
        try:
            if spare is None:
                process = start_child(host.command, host.descriptors, host.environment)
            else:
                process = spare.process.result()
        except OSError as error:
            raise ProcessNotStartedError(f"the {host.name} could not be started: {error}") from error
        self._process = process
        if self._killed:  # before it was there
            process.kill()
        if spare is not None:
            end = spare.connect(self._connection)
        else:
            tell_child(process, self._connection)
            end = end_of_child(process)
        return f"the {host.name} ended {end}"

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.kill()


class SpareEngine:
    """An engine process that is started before it is needed, and imports torch and the loader meanwhile."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.process: Future[subprocess.Popen[bytes]] = Future()
        self._connection: queue.SimpleQueue[ConnectionInfo] = queue.SimpleQueue()
        self._end: Future[str] = Future()
        # One thread from its start to its end: for the system, that is the parent.
        threading.Thread(target=self._live, name="inflight-spare", daemon=True).start()

    def _live(self) -> None:
        try:
            process = start_child((*COMMAND, "--preload"), (), self.environment)
        except OSError as error:
            self.process.set_exception(error)
            return
        self.process.set_result(process)
        tell_child(process, self._connection.get())
        self._end.set_result(end_of_child(process))

    def connect(self, connection: ConnectionInfo) -> str:
        """Hand it over and wait for its end. Returns how it ended."""
        self._connection.put(connection)
        return self._end.result()


_spares: list[SpareEngine] = []  # at most one


def start_spare(environment: Mapping[str, str]) -> None:
    """Start an engine process for the first host that would start the same. It ends with this process."""
    _spares[:] = [SpareEngine(environment)]


def _take_spare(host: ChildHost) -> SpareEngine | None:
    """Return the spare engine process if it is what this host would start. The list is popped only once."""
    if host.command != COMMAND or host.descriptors or not _spares:
        return None
    if dict(host.environment) != dict(_spares[0].environment):
        return None
    with contextlib.suppress(IndexError):  # another thread was faster
        return _spares.pop()
    return None


def start_child(
    command: Sequence[str], descriptors: Collection[int], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """In the thread that waits for its end: for the system, that is the parent."""
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=2,  # whatever it prints is no output of this process
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            **(environment or {}),
        },
        start_new_session=True,  # Ctrl-C is for the parent
        pass_fds=tuple(descriptors),
    )


def tell_child(process: subprocess.Popen[bytes], message: msgspec.Struct) -> None:
    """The one line that it reads, as JSON."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it is gone already
        process.stdin.write(msgspec.json.encode(message) + b"\n")
        process.stdin.flush()  # not closed: its end is how the process learns of ours


def end_of_child(process: subprocess.Popen[bytes]) -> str:
    """Waits for it. How it ended."""
    code = process.wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with code {code}"
