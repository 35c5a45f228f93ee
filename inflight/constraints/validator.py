"""Whether a constraint can be had, found out where it can do no harm."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec

from inflight.constraints.attempts import Attempt, first_success
from inflight.constraints.compiler import GrammarCompiler, KeptOutcomes, result_of
from inflight.constraints.trial import GrammarTrials, Trial
from inflight.constraints.vocabulary import Vocabulary
from inflight.errors import ParameterError
from inflight.structured_outputs import PARAM, StructuredOutputs

MAX_KEPT = 1024  # outcomes


@dataclass(eq=False, slots=True)
class _SharedTrial:
    """A trial that all requests of one owner with the same constraint wait for."""

    key: tuple[str, str, str]  # owner, kind and text
    trial: Trial[bool]
    num_waiting: int = 0


class GrammarValidator:
    """For one vocabulary. With a compiler, which is that of an engine in this process, what is fine is compiled, too;
    an engine elsewhere compiles what it is asked for. Any thread may use it.

    What is new is tried by a few processes, which owners share fairly (`trial.py`); `owner` is the request's tenant."""

    def __init__(
        self, make_vocabulary: Callable[[], Vocabulary], compiler: GrammarCompiler | None = None
    ) -> None:
        self.compiler = compiler
        self._vocabulary = cache(make_vocabulary)
        self._trials = GrammarTrials(self._vocabulary)
        self._kept: KeptOutcomes[bool] = KeptOutcomes(MAX_KEPT)
        self._lock = threading.Lock()
        self._shared: dict[tuple[str, str, str], _SharedTrial] = {}  # those that someone waits for

    def validate(self, asked: StructuredOutputs, owner: str = "") -> None:
        """Raises ParameterError if it is no grammar, asks for what is not supported, or is too complex. Raises
        QueueFullError if the owner has too many others tried."""
        outcome = self._kept.known(asked)
        if outcome is None:
            shared = self._join(asked, owner)
            try:
                outcome = shared.trial.future
                outcome.exception()  # waits for it
            finally:
                self._leave(shared)
        result_of(outcome)
        if self.compiler is not None:
            self.compiler.begin(asked, owner).result()

    async def validate_async(self, asked: StructuredOutputs, owner: str = "") -> None:
        """Do the same without blocking the event loop. Cancelling the task ends a trial that no other request waits
        for."""
        outcome = self._kept.known(asked)
        if outcome is None:
            shared = self._join(asked, owner)
            try:
                outcome = shared.trial.future
                await _done(outcome)
            finally:
                self._leave(shared)
        result_of(outcome)
        if self.compiler is not None and not self.compiler.is_compiled(asked):
            await asyncio.wrap_future(self.compiler.begin(asked, owner))

    def _join(self, asked: StructuredOutputs, owner: str) -> _SharedTrial:
        """Wait with others of the same owner: someone else's trials may have to wait longer."""
        key = owner, asked.kind, asked.text
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                trial = self._trials.begin(owner, partial(self._try, asked))
                shared = self._shared[key] = _SharedTrial(key, trial)
            shared.num_waiting += 1
        return shared

    def _leave(self, shared: _SharedTrial) -> None:
        with self._lock:
            shared.num_waiting -= 1
            if shared.num_waiting:
                return
            del self._shared[shared.key]
        shared.trial.cancel()

    def is_validated(self, asked: StructuredOutputs) -> bool:
        """Whether `validate` would answer at once."""
        return self._kept.known(asked) is not None and (
            self.compiler is None or self.compiler.is_compiled(asked)
        )

    def warm_up(self) -> None:
        """Make what the first constraint would wait for, if constraints can be had at all."""
        with contextlib.suppress(ParameterError):
            self._check_installed()
            self._trials.start()
        if self.compiler is not None:
            self.compiler.warm_up()

    def close(self) -> None:
        """End the processes that try grammars."""
        self._trials.close()

    def _try(self, asked: StructuredOutputs, attempt: Attempt[bool]) -> bool:
        """Find the outcome and keep it. What is not the constraint's fault is not kept."""
        outcome = self._kept.known(asked)
        if outcome is None:
            outcome = Future()
            try:
                self._check_installed()
                outcome.set_result(first_success(asked, self._special_texts, attempt))
            except ParameterError as error:
                outcome.set_exception(error)
            self._kept.put(asked, outcome)
        return result_of(outcome)

    @staticmethod
    def _check_installed() -> None:
        if find_spec("llguidance") is None:
            raise ParameterError(
                f"{PARAM} is given: that needs llguidance, so install inflight-llm[constraints]",
                param=PARAM,
                code="constraints_unavailable",
            )

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        return self._vocabulary().special_texts()


async def _done(future: Future[bool]) -> None:
    """Wait for the end of a future that others wait for, too: cancelling this leaves it alone."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    await ended.wait()
