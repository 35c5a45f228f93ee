"""Tries grammars in child processes, which can be ended.

llguidance counts what it does and stops at its limits, almost everywhere: an intersection of a few dozen patterns keeps
it busy without end, in code that cannot be interrupted, and what it has no limit for ends the process that it is in. So
whatever a user asks for is compiled by a process of its own first. That one waits for work with the vocabulary in its
hands, and so takes no longer than compiling does; where it dies, another takes its place.

All that one request has tried is one trial, with one process and one budget of time. Trials have threads of their own,
which their owners share fairly: whoever sends grammars that take long waits for them alone.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any, Generic, TypeVar

from inflight.constraints import trial_worker
from inflight.constraints.attempts import Attempt, AttemptDiedError, BudgetSpentError
from inflight.constraints.compiler import LIMITS
from inflight.constraints.fair_threads import FairThreads
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import GrammarWorkerError
from inflight.processes.sandbox import SandboxPool, SandboxWorker
from inflight.processes.sandbox_worker import pack

logger = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPT_SECONDS = 1.0  # of the processor, for one grammar
TRIAL_SECONDS = 2.0  # of the processor, for all grammars of one request
WALL_SECONDS = 10.0  # for all of them, on a very busy machine
MEMORY = 512 << 20  # bytes of address space
STACK = 1 << 20  # bytes: threads that compile and fill masks have twice as many at least
NUM_WORKERS = 2  # at once
MAX_PER_OWNER = 1  # of these
MAX_WAITING = 256  # trials of one owner


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


class _TrialProcess(SandboxWorker):
    def __init__(self, vocabulary: bytes) -> None:
        with tempfile.TemporaryFile() as file:
            file.write(vocabulary)
            file.seek(0)
            descriptor = file.fileno()
            try:
                super().__init__(
                    trial_worker.__file__,
                    *(MEMORY, STACK, descriptor),
                    descriptors=(descriptor,),
                    stderr=subprocess.DEVNULL,  # a user can make the library print its last words
                )
            except OSError as error:
                raise GrammarWorkerError(
                    f"the process that tries grammars cannot be started: {error}"
                ) from error

    def wait_until_ready(self) -> None:
        """Raises GrammarWorkerError."""
        try:
            super().wait_until_ready()
        except TimeoutError:
            raise GrammarWorkerError("the process that tries grammars does not start") from None
        except (OSError, EOFError):
            self.kill()
            raise GrammarWorkerError(f"the process that tries grammars ended with {self.wait()}") from None

    def attempt(self, grammar: str, cpu_seconds: float, wall_seconds: float) -> tuple[str, float]:
        """Return why a grammar cannot be used, empty if it can, and the CPU time that it took to find out. Raises
        AttemptDiedError, or GrammarWorkerError where the grammar is not to blame."""
        request = pack({"grammar": grammar, "limits": LIMITS, "seconds": cpu_seconds})
        try:
            return self.call(request, wall_seconds)
        except TimeoutError:
            raise _too_busy() from None
        except (OSError, EOFError):
            raise self._death(cpu_seconds) from None

    def _death(self, cpu_seconds: float) -> Exception:
        code = self.wait()
        if code >= 0 or code == -signal.SIGKILL:
            return GrammarWorkerError(f"the process that tries grammars ended with {code}")
        if code == -signal.SIGPROF:
            if cpu_seconds < ATTEMPT_SECONDS:  # the rest of a budget
                return _budget_spent()
            return AttemptDiedError(f"compiling it takes more than {ATTEMPT_SECONDS:g} second")
        if code == -signal.SIGSEGV:
            return AttemptDiedError("it is nested too deeply, or too long a sequence")
        return AttemptDiedError("compiling it takes too much memory")


class Trial(Generic[T]):
    """A trial that waits for a process, has one, or is over. `future` has its outcome."""

    future: Future[T]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _TrialProcess | None = None  # while it works for this trial
        self.is_cancelled = False
        self.needs_replacement = False  # its process was lost

    def attempt(self, process: _TrialProcess, grammar: str, budget: TrialBudget) -> str:
        """Return why a grammar cannot be used, empty if it can."""
        cpu_seconds, wall_seconds = budget.next_attempt()
        with self._lock:
            if self.is_cancelled:
                raise GrammarWorkerError("the trial was cancelled")
            self._process = process
        error, seconds_used = process.attempt(grammar, cpu_seconds, wall_seconds)
        with self._lock:
            self._process = None
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
        packed_vocabulary = cache(lambda: make_vocabulary().packed())
        self._pool: SandboxPool[_TrialProcess] = SandboxPool(lambda: _TrialProcess(packed_vocabulary()))
        self._is_closed = False
        self._threads = FairThreads("inflight-trials", NUM_WORKERS, MAX_PER_OWNER, MAX_WAITING)

    def start(self) -> None:
        """A worker for the first grammar, which need not wait for it then. Returns at once."""
        if not self._pool.idle:
            self._pool.idle.append(self._pool.start())

    def close(self) -> None:
        """End the workers, those that are busy when their trial is over; a later grammar starts a new one."""
        self._is_closed = True
        self._pool.close()

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
        worker = self._pool.take()
        try:
            worker.wait_until_ready()
            budget = TrialBudget()
            return work(lambda grammar: trial.attempt(worker, grammar, budget) or True)
        finally:
            trial.needs_replacement = not worker.is_usable
            self._pool.put_back(worker)
            if self._is_closed:
                self._pool.close()

    def _replace_worker(self, trial: Trial[Any]) -> None:
        """Have a new worker ready before the owner's next trial may begin: whoever has workers killed waits for others,
        and nobody else does."""
        if not trial.needs_replacement or self._is_closed:
            return
        try:
            worker = self._pool.start()
            try:
                worker.wait_until_ready()
            finally:
                self._pool.put_back(worker)
        except GrammarWorkerError:
            logger.exception("a process that tries grammars could not be replaced")
        if self._is_closed:
            self._pool.close()
