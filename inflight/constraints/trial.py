"""Tries grammars in child processes, which can be ended.

llguidance counts what it does and stops at its limits, almost everywhere: an intersection of a few dozen patterns keeps
it busy without end, in code that cannot be interrupted, and what it has no limit for ends the process that it is in. So
whatever a user asks for is compiled by a process of its own first. That one waits for work with the vocabulary in its
hands, and so takes no longer than compiling does; where it dies, another takes its place.

All that one request has tried is one trial, with one process and one budget of time. Trials have threads of their own,
which their owners share fairly: whoever sends grammars that take long waits for them alone.
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
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from inflight.constraints import trial_worker
from inflight.constraints.attempts import Attempt, AttemptDiedError, BudgetSpentError
from inflight.constraints.compiler import LIMITS
from inflight.constraints.fair_threads import FairThreads
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import GrammarWorkerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_SECONDS = 1.0  # of the processor, for one grammar
TRIAL_SECONDS = 2.0  # of the processor, for all grammars of one request
WALL_SECONDS = 10.0  # for all of them, on a very busy machine
START_SECONDS = 60
MEMORY = 512 << 20  # bytes of address space
STACK = 1 << 20  # bytes: threads that compile and fill masks have twice as many at least
NUM_WORKERS = 2  # at once
MAX_PER_OWNER = 1  # of these
MAX_WAITING = 256  # trials of one owner
_INHERITED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")


class TrialBudget:
    """The time that all attempts of one trial may take together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cpu_seconds = TRIAL_SECONDS
        self._deadline = clock() + WALL_SECONDS

    def next_attempt(self) -> tuple[float, float]:
        """Return the CPU time and the wall-clock time that the next attempt may take, in seconds. Raises
        BudgetSpentError, or GrammarWorkerError where the machine is too busy."""
        if self._cpu_seconds <= 0:
            raise _budget_spent()
        wall_seconds = self._deadline - self._clock()
        if wall_seconds <= 0:
            raise _too_busy()
        return min(ATTEMPT_SECONDS, self._cpu_seconds), wall_seconds

    def spend(self, cpu_seconds: float) -> None:
        self._cpu_seconds -= cpu_seconds


def _budget_spent() -> BudgetSpentError:
    return BudgetSpentError(f"compiling it takes more than {TRIAL_SECONDS:g} seconds")


def _too_busy() -> GrammarWorkerError:
    return GrammarWorkerError(f"a grammar could not be tried within {WALL_SECONDS:g} s on this busy machine")


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
            limits = map(str, (MEMORY, STACK, file.fileno()))
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

    def wait_until_ready(self) -> None:
        """Raises GrammarWorkerError."""
        if self._is_ready:
            return
        try:
            self._receive(START_SECONDS)
        except TimeoutError:
            self.kill()
            raise GrammarWorkerError("the process that tries grammars does not start") from None
        except (OSError, EOFError):
            self.kill()
            raise GrammarWorkerError(
                f"the process that tries grammars ended with {self._process.returncode}"
            ) from None
        self._is_ready = True

    def attempt(self, grammar: str, cpu_seconds: float, wall_seconds: float) -> tuple[str, float]:
        """Return why a grammar cannot be used, empty if it can, and the CPU time that it took to find out. Raises
        AttemptDiedError, or GrammarWorkerError where the grammar is not to blame."""
        job = json.dumps({"grammar": grammar, "limits": LIMITS, "seconds": cpu_seconds}).encode()
        try:
            self._socket.settimeout(wall_seconds)
            self._socket.sendall(trial_worker.HEADER.pack(len(job)) + job)
            error, seconds_used = json.loads(self._receive(wall_seconds))
        except TimeoutError:
            raise _too_busy() from None
        except (OSError, EOFError):
            raise self._death(cpu_seconds) from None
        return error, seconds_used

    def _death(self, cpu_seconds: float) -> Exception:
        code = self._process.wait()
        if code >= 0 or code == -signal.SIGKILL:
            return GrammarWorkerError(f"the process that tries grammars ended with {code}")
        if code == -signal.SIGPROF:
            if cpu_seconds < ATTEMPT_SECONDS:  # the rest of a budget
                return _budget_spent()
            return AttemptDiedError(f"compiling it takes more than {ATTEMPT_SECONDS:g} second")
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

    def interrupt(self) -> None:
        """End the process, whatever it does; whoever waits for it gets GrammarWorkerError. For any thread."""
        self._process.kill()

    def kill(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _kill_all(workers: list[_TrialProcess]) -> None:
    while workers:
        workers.pop().kill()


class Trial(Generic[T]):
    """A trial that waits for a process, has one, or is over. `future` has its outcome."""

    future: Future[T]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _TrialProcess | None = None  # while it works for this trial
        self.is_cancelled = False
        self.has_lost_worker = False  # its process cannot be used again

    def attempt(self, process: _TrialProcess, grammar: str, budget: TrialBudget) -> str:
        """Return why a grammar cannot be used, empty if it can."""
        cpu_seconds, wall_seconds = budget.next_attempt()
        with self._lock:
            if self.is_cancelled:
                raise GrammarWorkerError("the trial was cancelled")
            self._process = process
            self.has_lost_worker = True  # unless it answers
        error, seconds_used = process.attempt(grammar, cpu_seconds, wall_seconds)
        with self._lock:
            self._process = None
            self.has_lost_worker = self.is_cancelled  # which may have interrupted it just now
        budget.spend(seconds_used)
        return error

    def cancel(self) -> None:
        """Give up: nobody wants the outcome any more. What is being compiled is interrupted."""
        if self.future.cancel():
            return
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.interrupt()


class GrammarTrials:
    """Try grammars, a few at a time, and no more than `MAX_PER_OWNER` of one owner. For any thread."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._packed: bytes | None = None
        self._idle: list[_TrialProcess] = []
        self._is_closed = False
        self._threads = FairThreads("inflight-trials", NUM_WORKERS, MAX_PER_OWNER, MAX_WAITING)
        weakref.finalize(self, _kill_all, self._idle)  # also at the end of the program

    def start(self) -> None:
        """A worker for the first grammar, which need not wait for it then. Returns at once."""
        if not self._idle:
            self._idle.append(self._new_worker())

    def close(self) -> None:
        """End the workers, those that are busy when their trial is over; a later grammar starts a new one."""
        self._is_closed = True
        _kill_all(self._idle)

    def begin(self, owner: str, work: Callable[[Attempt[bool]], T]) -> Trial[T]:
        """Call `work` with an attempt that raises AttemptDiedError for a grammar that cannot even be tried, as soon as
        the owner's turn has come. Raises QueueFullError."""
        self._is_closed = False
        trial: Trial[T] = Trial()
        trial.future = self._threads.submit(
            owner, lambda: self._run(trial, work), after=lambda: self._replace_worker(trial)
        )
        return trial

    def _run(self, trial: Trial[T], work: Callable[[Attempt[bool]], T]) -> T:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._new_worker()
        trial.has_lost_worker = True

        try:
            worker.wait_until_ready()
            trial.has_lost_worker = False
            budget = TrialBudget()
            return work(lambda grammar: trial.attempt(worker, grammar, budget) or True)
        finally:
            if trial.has_lost_worker:
                worker.kill()
            else:
                self._idle.append(worker)
            if self._is_closed:
                _kill_all(self._idle)

    def _replace_worker(self, trial: Trial[Any]) -> None:
        """Have a new worker ready before the owner's next trial may begin: whoever has workers killed waits for others,
        and nobody else does."""
        if not trial.has_lost_worker or self._is_closed:
            return
        try:
            worker = self._new_worker()
            worker.wait_until_ready()
        except GrammarWorkerError:
            logger.exception("a process that tries grammars could not be replaced")
            return
        self._idle.append(worker)
        if self._is_closed:
            _kill_all(self._idle)

    def _new_worker(self) -> _TrialProcess:
        if self._packed is None:
            self._packed = self._make_vocabulary().packed()
        return _TrialProcess(self._packed)
