"""Tries constraints in child processes before any engine compiles them.

llguidance counts its work and stops at its limits almost everywhere. But an intersection of a few dozen patterns keeps
it busy forever, in code that cannot be interrupted, and where it has no limit it may crash its process. So everything a
user sends is first compiled by a sandboxed process (`trial_worker.py`). These processes already hold the vocabulary, so
a trial takes no longer than compiling does; a process that dies is replaced.

    GrammarValidator.validate ──► Trial, shared by the owner's equal requests ──► FairThreads ──► _TrialProcess

Everything that one request has to try is one trial, with one process and one time budget. Trials run in threads that
owners share fairly, so an owner who sends slow grammars delays nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from functools import cache, partial
from importlib.util import find_spec

from inflight.constraints import trial_worker
from inflight.constraints.attempts import (
    Attempt,
    AttemptDiedError,
    BudgetSpentError,
    GrammarSource,
    first_success,
)
from inflight.constraints.compiler import LIMITS, GrammarCompiler, OutcomeCache, result_of
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import GrammarWorkerError, ParameterError
from inflight.processes.fair_threads import FairThreads
from inflight.processes.sandbox import SandboxPool, SandboxWorker
from inflight.processes.sandbox_worker import pack
from inflight.structured_outputs import PARAM, StructuredOutputs

logger = logging.getLogger(__name__)

MAX_CACHED = 1024  # outcomes
ATTEMPT_SECONDS = 1.0  # of CPU time, for one grammar
TRIAL_SECONDS = 2.0  # of CPU time, for all grammars of one request
WALL_SECONDS = 10.0  # for all grammars of one request, on a very busy machine
MEMORY = 512 << 20  # bytes of address space
STACK = 1 << 20  # bytes; threads that compile and fill masks have at least twice as much
NUM_WORKERS = 2
MAX_PER_OWNER = 1  # workers
MAX_WAITING = 256  # trials of one owner


class GrammarValidator:
    """Validates constraints for one vocabulary. Any thread may use it.

    With `compiler`, the compiler of an engine in this process, valid constraints are compiled too; engines elsewhere
    compile on their own. A request's `owner` is its tenant.
    """

    def __init__(
        self, make_vocabulary: Callable[[], Vocabulary], compiler: GrammarCompiler | None = None
    ) -> None:
        self.compiler = compiler
        self._trials = GrammarTrials(make_vocabulary)
        self._cache: OutcomeCache[bool] = OutcomeCache(MAX_CACHED)
        self._lock = threading.Lock()
        # Those that requests wait for, by owner, kind and text.
        self._running: dict[tuple[str, str, str], Trial] = {}

    def validate(self, constraint: StructuredOutputs, owner: str = "") -> None:
        """Raise ParameterError if the constraint is invalid, not supported or too complex.

        Raises QueueFullError if too many trials of the owner are waiting.
        """
        with self._outcome(constraint, owner) as outcome:
            outcome.exception()  # waits for it
        result_of(outcome)
        if self.compiler is not None:
            self.compiler.begin(constraint, owner).result()

    async def validate_async(self, constraint: StructuredOutputs, owner: str = "") -> None:
        """Validate without blocking the event loop.

        Cancelling the task ends a trial that no other request waits for.
        """
        with self._outcome(constraint, owner) as outcome:
            if not outcome.done():
                await _done(outcome)
        result_of(outcome)
        if self.compiler is not None and not self.compiler.is_compiled(constraint):
            await asyncio.wrap_future(self.compiler.begin(constraint, owner))

    @contextlib.contextmanager
    def _outcome(self, constraint: StructuredOutputs, owner: str) -> Iterator[Future[bool]]:
        """Return the outcome, of the owner's trial if none is cached: join or start it, and leave it at the end.

        Other owners' trials of the same constraint may have to wait longer.
        """
        if (cached := self._cache.outcome(constraint)) is not None:
            yield cached
            return
        key = owner, constraint.kind, constraint.text
        with self._lock:
            trial = self._running.get(key)
            if trial is None:
                trial = self._running[key] = self._trials.begin(owner, partial(self._try, constraint))
            trial.num_waiting += 1
        try:
            yield trial.future
        finally:
            with self._lock:
                trial.num_waiting -= 1
                is_abandoned = not trial.num_waiting
                if is_abandoned:
                    del self._running[key]
            if is_abandoned:
                trial.cancel()

    def warm_up(self) -> None:
        """Prepare what the first constraint would wait for, if constraints are available at all."""
        with contextlib.suppress(ParameterError):
            self._check_installed()
            self._trials.start()
        if self.compiler is not None:
            self.compiler.warm_up()

    def close(self) -> None:
        """End the processes that try grammars."""
        self._trials.close()

    def _try(self, constraint: StructuredOutputs, attempt: Attempt[bool]) -> bool:
        """Determine the outcome and cache it, unless the constraint is not to blame."""
        outcome = self._cache.outcome(constraint)
        if outcome is None:
            outcome = Future()
            try:
                self._check_installed()
                outcome.set_result(first_success(constraint, attempt))
            except ParameterError as error:
                outcome.set_exception(error)
            self._cache.put(constraint, outcome)
        return result_of(outcome)

    @staticmethod
    def _check_installed() -> None:
        if find_spec("llguidance") is None:
            raise ParameterError(
                f"{PARAM} needs llguidance, which is not installed: install inflight-llm[constraints]",
                param=PARAM,
                code="constraints_unavailable",
            )


async def _done(future: Future[bool]) -> None:
    """Wait until a shared future is done. Cancelling this coroutine does not cancel the future."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def notify(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(notify)
    await done.wait()


# ---- trials ----


class GrammarTrials:
    """Runs trials, `NUM_WORKERS` at a time and `MAX_PER_OWNER` of one owner. Thread-safe."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        packed_vocabulary = cache(lambda: make_vocabulary().packed())
        self._pool: SandboxPool[_TrialProcess] = SandboxPool(lambda: _TrialProcess(packed_vocabulary()))
        self._is_closed = False
        self._threads = FairThreads(
            "inflight-trials",
            NUM_WORKERS,
            MAX_PER_OWNER,
            MAX_WAITING,
            "too many new grammars of this tenant are waiting to be compiled: the limit is {}, try again later",
        )

    def start(self) -> None:
        """Start a worker for the first grammar in the background."""
        if not self._pool.idle:
            self._pool.idle.append(self._pool.start())

    def close(self) -> None:
        """End the workers, busy ones when their trial is over. A later grammar starts a new one."""
        self._is_closed = True
        self._pool.close()

    def begin(self, owner: str, work: Callable[[Attempt[bool]], bool]) -> Trial:
        """Call `work` with a function that attempts a grammar, once it is the owner's turn.

        The attempt raises AttemptDiedError for a grammar that exceeds the sandbox's limits. Raises QueueFullError.
        """
        self._is_closed = False
        trial = Trial()
        trial.future = self._threads.submit(
            owner, lambda: self._run(trial, work), after=lambda: self._replace_worker(trial)
        )
        return trial

    def _run(self, trial: Trial, work: Callable[[Attempt[bool]], bool]) -> bool:
        worker = self._pool.take()
        try:
            worker.wait_until_ready()
            budget = TrialBudget()
            return work(lambda source: trial.attempt(worker, source, budget) or True)
        finally:
            trial.needs_replacement = not worker.is_usable
            self._pool.put_back(worker)
            if self._is_closed:
                self._pool.close()

    def _replace_worker(self, trial: Trial) -> None:
        """Start a new worker before the owner's next trial, so that only owners who kill workers wait for new ones."""
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


class Trial:
    """A trial that is waiting for a process, running or over. `future` is its outcome."""

    future: Future[bool]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _TrialProcess | None = None  # while it works for this trial
        self.is_cancelled = False
        self.needs_replacement = False  # its process was lost
        self.num_waiting = 0  # requests of one owner with the same constraint

    def attempt(self, process: _TrialProcess, source: GrammarSource, budget: TrialBudget) -> str:
        """Return why a grammar cannot be used, or an empty string if it can. Raises ParameterError."""
        cpu_seconds, wall_seconds = budget.next_attempt()
        with self._lock:
            if self.is_cancelled:
                raise GrammarWorkerError("the trial was cancelled")
            self._process = process
        error, seconds_used = process.attempt(source, cpu_seconds, wall_seconds)
        with self._lock:
            self._process = None
        budget.spend(seconds_used)
        if isinstance(error, str):
            return error
        message, param, code = error
        raise ParameterError(message, param=param, code=code)

    def cancel(self) -> None:
        """Abandon the trial and interrupt what is being compiled."""
        if self.future.cancel():
            return
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.interrupt()


class TrialBudget:
    """The time that all attempts of one trial may take together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cpu_seconds = TRIAL_SECONDS
        self._deadline = clock() + WALL_SECONDS

    def next_attempt(self) -> tuple[float, float]:
        """Return the CPU time and the wall-clock time that the next attempt may take, in seconds.

        Raises BudgetSpentError, or GrammarWorkerError if the machine is too busy.
        """
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
                    stderr=subprocess.DEVNULL,  # users could fill the log with the library's panics
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

    def attempt(
        self, source: GrammarSource, cpu_seconds: float, wall_seconds: float
    ) -> tuple[str | trial_worker.Rejection, float]:
        """Return why a grammar cannot be used, empty if it can, and the CPU time that the attempt took.

        Raises AttemptDiedError, or GrammarWorkerError if the grammar is not to blame.
        """
        request = pack({"source": asdict(source), "limits": LIMITS, "seconds": cpu_seconds})
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
            return AttemptDiedError("it is nested too deeply, or has too long a sequence")
        return AttemptDiedError("compiling it takes too much memory")
