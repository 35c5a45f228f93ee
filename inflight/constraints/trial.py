"""Tries grammars in child processes, which can be ended.

llguidance counts what it does and stops at its limits, almost everywhere: an intersection of a few dozen patterns keeps
it busy without end, in code that cannot be interrupted, and what it has no limit for ends the process that it is in. So
whatever a user asks for is compiled by a process of its own first. That one waits for work with the vocabulary in its
hands, and so takes no longer than compiling does; where it dies, another takes its place.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from inflight.constraints import trial_worker
from inflight.constraints.attempts import AttemptDiedError
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import GrammarWorkerError, QueueFullError

logger = logging.getLogger(__name__)

SECONDS = 1  # of the processor
WALL_SECONDS = 10  # on a very busy machine
START_SECONDS = 60
MEMORY = 512 << 20  # bytes of address space
STACK = 1 << 20  # bytes: threads that compile and fill masks have twice as many at least
NUM_WORKERS = 2  # at once
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")


class _TrialProcess:
    """One child process, which starts on its own. It has no use after an error: then it must be killed."""

    def __init__(self, vocabulary: bytes) -> None:
        # The whole path is passed on, so neither site packages nor the script's own folder are looked at.
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._is_ready = False
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(vocabulary)
            file.seek(0)
            limits = map(str, (SECONDS, MEMORY, STACK, file.fileno()))
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-P", trial_worker.__file__, *limits],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # last words of a library that a user has brought down
                    pass_fds=(file.fileno(),),
                    env=environment,
                )
            except OSError as error:
                self._socket.close()
                raise GrammarWorkerError(
                    f"the process that tries grammars cannot be started: {error}"
                ) from error

    def ask(self, job: bytes) -> str:
        """Raises AttemptDiedError, or GrammarWorkerError where the grammar is not to blame."""
        try:
            if not self._is_ready:
                self._receive(START_SECONDS)
                self._is_ready = True
            self._socket.settimeout(WALL_SECONDS)
            self._socket.sendall(trial_worker.HEADER.pack(len(job)) + job)
            return self._receive(WALL_SECONDS).decode()
        except TimeoutError:
            if self._is_ready:
                raise AttemptDiedError("compiling it takes too long") from None
            raise GrammarWorkerError("the process that tries grammars does not start") from None
        except (OSError, EOFError):
            raise self._death() from None

    def _death(self) -> Exception:
        code = self._process.wait()
        if not self._is_ready or code >= 0 or code == -signal.SIGKILL:
            return GrammarWorkerError(f"the process that tries grammars ended with {code}")
        if code == -signal.SIGPROF:
            return AttemptDiedError(f"compiling it takes more than {SECONDS} second")
        if code == -signal.SIGSEGV:
            return AttemptDiedError("it is nested too deeply, or too long a sequence")
        return AttemptDiedError("compiling it takes too much memory")

    def _receive(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        header = self._receive_exactly(trial_worker.HEADER.size, deadline)
        return self._receive_exactly(trial_worker.HEADER.unpack(header)[0], deadline)

    def _receive_exactly(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _kill_all(workers: list[_TrialProcess]) -> None:
    while workers:
        workers.pop().kill()


class GrammarTrials:
    """Any thread may have grammars tried, a few at a time."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._packed: bytes | None = None
        self._idle: list[_TrialProcess] = []
        self._places = threading.BoundedSemaphore(NUM_WORKERS)
        weakref.finalize(self, _kill_all, self._idle)  # also at the end of the program

    def start(self) -> None:
        """A worker for the first grammar, which need not wait for it then. Returns at once."""
        if not self._idle:
            self._idle.append(self._new_worker())

    def close(self) -> None:
        """End the workers that are idle now; a later grammar starts a new one."""
        _kill_all(self._idle)

    def attempt(self, grammar: str, limits: dict[str, Any]) -> str:
        """Why it cannot be used, empty if it can. Raises AttemptDiedError if it cannot even be tried."""
        job = json.dumps({"grammar": grammar, "limits": limits}).encode()
        if not self._places.acquire(timeout=WALL_SECONDS):
            raise QueueFullError("too many new grammars are being compiled: try again later")
        try:
            return self._ask(job)
        finally:
            self._places.release()

    def _ask(self, job: bytes) -> str:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._new_worker()
        is_healthy = False
        try:
            reply = worker.ask(job)
            is_healthy = True
        finally:
            if is_healthy:
                self._idle.append(worker)
            else:
                worker.kill()
                self._idle.append(self._new_worker())  # it starts while no one waits for it
        return reply

    def _new_worker(self) -> _TrialProcess:
        if self._packed is None:
            self._packed = self._make_vocabulary().packed()
        return _TrialProcess(self._packed)
