"""A pool of sandboxed worker processes: each runs a script under resource limits, and is replaced when it breaks one.

Used for code that cannot be interrupted or trusted in this process: chat templates
(`frontend/text/chat_template.py`) and grammars (`constraints/validator.py`). `sandbox_worker.py` is the worker's side.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Generic, TypeVar

from inflight.processes.sandbox_worker import receive, unpack

START_SECONDS = 60.0  # for Python and the worker's imports on a very busy machine
_PACKAGE_PARENT = str(Path(__file__).parents[2])
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "TZ", "LANG", "LC_ALL")


class SandboxWorker:
    """One worker process. It starts in the background; once it is not usable it must be killed."""

    def __init__(
        self, script: str, *arguments: object, descriptors: Collection[int] = (), stderr: int | None = None
    ) -> None:
        """Raises OSError if the process cannot be started."""
        # The whole sys.path is passed on, so the worker need not process site-packages or its script's folder. The
        # package itself may not be on it: an editable install finds it by an import hook that the worker does not have.
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([*(path for path in sys.path if path), _PACKAGE_PARENT])
        self._is_ready = False
        self._is_busy = self._is_interrupted = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-P", script, *map(str, arguments)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    pass_fds=tuple(descriptors),
                    env=environment,
                )
            except OSError:
                self._socket.close()
                raise

    @property
    def is_usable(self) -> bool:
        """Whether another call can be made: the last one was answered, and nobody interrupted it."""
        return self._is_ready and not self._is_busy and not self._is_interrupted

    def wait_until_ready(self) -> None:
        """Raises OSError, TimeoutError included, or EOFError if the process ends."""
        if not self._is_ready:
            self._receive(time.monotonic() + START_SECONDS)
            self._is_ready = True

    def call(self, request: bytes, seconds: float) -> tuple[Any, float]:
        """Send a packed request. Return the answer and the time that the worker took, by its timer.

        Raises TimeoutError after `seconds`, and OSError or EOFError if the process ends.
        """
        deadline = time.monotonic() + seconds
        self._is_busy = True
        self._socket.settimeout(seconds)
        self._socket.sendall(request)
        answer, seconds_used = self._receive(deadline)
        self._is_busy = False
        return answer, seconds_used

    def _receive(self, deadline: float) -> Any:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        body = receive(self._socket)
        if body is None:
            raise EOFError("the worker closed its connection")
        return unpack(body)

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        return self._process.wait()

    def interrupt(self) -> None:
        """Kill the process from any thread. A call that waits for it raises EOFError or OSError."""
        self._is_interrupted = True
        self._process.kill()

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


WorkerT = TypeVar("WorkerT", bound=SandboxWorker)


class SandboxPool(Generic[WorkerT]):
    """The idle workers. Its users bound how many are taken at a time. A fork has its own workers."""

    def __init__(self, start: Callable[[], WorkerT]) -> None:
        self.idle: list[WorkerT] = []
        self.start = start
        self._process = os.getpid()
        weakref.finalize(self, _kill_all, self.idle)  # also at exit

    def take(self) -> WorkerT:
        """Return an idle worker, or start one."""
        if os.getpid() != self._process:  # the workers are the parent's: both would read each other's answers
            self._process = os.getpid()
            self.idle.clear()
        try:
            return self.idle.pop()
        except IndexError:
            return self.start()

    def put_back(self, worker: WorkerT) -> None:
        """Keep a worker for the next user, or kill it if it is not usable."""
        if worker.is_usable:
            self.idle.append(worker)
        else:
            worker.kill()

    def close(self) -> None:
        """Kill the idle workers. A later user starts a new one."""
        _kill_all(self.idle)


def _kill_all(workers: list[WorkerT]) -> None:
    while workers:
        workers.pop().kill()
