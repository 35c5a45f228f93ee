"""Processes of ours as children of this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from inflight.engine.host import ProcessNotStartedError
from inflight.engine.wire import ConnectionInfo

COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inflight.engine.worker")


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

    def live(self) -> str:
        try:
            process = subprocess.Popen(
                self._host.command,
                stdin=subprocess.PIPE,
                stdout=2,  # whatever it prints is no output of this process
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                    **self._host.environment,
                },
                start_new_session=True,  # Ctrl-C is for the parent
                pass_fds=tuple(self._host.descriptors),
            )
        except OSError as error:
            raise ProcessNotStartedError(f"the {self._host.name} could not be started: {error}") from error
        self._process = process
        if self._killed:  # before it was there
            process.kill()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone already
            process.stdin.write(msgspec.json.encode(self._connection) + b"\n")
            process.stdin.flush()  # not closed: its end is how the process learns of ours
        code = process.wait()
        with contextlib.suppress(OSError):
            process.stdin.close()
        return f"the {self._host.name} ended {_how(code)}"

    def kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.kill()


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with code {code}"
