"""Rows with structured outputs: the state of each in its grammar, and the tokens that it may sample next.

A mask depends on the row's last token. As soon as a step is launched, a thread waits for its tokens and computes the
masks of the same rows for the next step, while the host prepares that step and the device runs its forward pass. The
first mask of a row is computed when its first step starts.

The thread works through its jobs in order, and writes the mask of a row into that row of a buffer. It writes the next
one only after the tokens of the step that uses it, so no step ever reads a mask that is being written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from inflight.constraints import Grammar, GrammarCompiler, MaskBatch, MaskFiller, Matcher
from inflight.errors import EngineError, RequestError
from inflight.events import RequestFailure
from inflight.execution.sampling.interface import first_mask
from inflight.scheduling import Admission
from inflight.structured_outputs import StructuredOutputs

logger = logging.getLogger(__name__)


class MaskedRows(Protocol):
    """The rows of a sampler, as far as masks are concerned."""

    vocab_size: int
    host_masks: NDArray[np.int32]  # [max_rows, words]: the thread writes here

    def set_masks(self, rows: Sequence[int]) -> None:
        """Let these rows sample next what their masks in `host_masks` allow."""


class SampledTokens(Protocol):
    """Returns the tokens of one step, by sample. Waits for the device if they are still there."""

    def __call__(self) -> Sequence[int]: ...


@dataclass(eq=False, slots=True)
class _Constrained:
    """One row. Its grammar is compiled from admission on; its outputs are replayed for its first mask."""

    row: int
    constraint: StructuredOutputs
    compiled: Future[Grammar]
    allowed: NDArray[np.int32] | None  # by allowed_token_ids; None: all
    outputs: list[int]
    job: Future[None] | None = None  # computes the mask of the next token
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    failure: RequestFailure | None = None


class StepMasks(NamedTuple):
    """The masks of a step, which the thread computes."""

    samples: list[int]  # the constrained samples of the step
    constrained: list[_Constrained]  # their rows
    jobs: set[Future[None]]
    any_first: bool  # whether a row gets its first mask, which may have to wait for its grammar

    def failures(self) -> dict[int, RequestFailure]:
        """Return why rows got no mask, by sample."""
        rows = zip(self.samples, self.constrained, strict=True)
        return {sample: row.failure for sample, row in rows if row.failure is not None}


@dataclass(slots=True)
class ConstrainedRows:
    """The constrained rows of a sampler. Without a compiler, request validation rejects constraints."""

    state: MaskedRows
    compiler: GrammarCompiler | None
    prepare_thread: Callable[[], None] = lambda: None  # called first in the thread that computes masks
    _rows: dict[int, _Constrained] = field(default_factory=dict)
    _filler: MaskFiller = field(default_factory=MaskFiller)
    _thread: ThreadPoolExecutor | None = None

    def admit(self, admissions: Sequence[Admission]) -> None:
        for row, request in admissions:
            self._rows.pop(row, None)
            params = request.params
            if params.structured_outputs is not None and request.max_tokens:
                outputs = request.token_ids[request.num_prompt_tokens :].tolist()
                allowed = (
                    None if params.allowed_token_ids is None else first_mask(params, self.state.vocab_size)
                )
                compiled = self._compile(params.structured_outputs)
                self._rows[row] = _Constrained(row, params.structured_outputs, compiled, allowed, outputs)

    def _compile(self, constraint: StructuredOutputs) -> Future[Grammar]:
        """Start compiling a grammar while the prompt is computed, unless it is cached."""
        if self.compiler is None:
            raise EngineError("a request has a constraint, but this engine has no grammar compiler")
        return self.compiler.begin(constraint)

    @property
    def any(self) -> bool:
        """Whether any row may be constrained."""
        return bool(self._rows)

    def start(self, rows: Sequence[int]) -> StepMasks | None:
        """Start computing the masks of the constrained rows among these; None if there are none."""
        if not self._rows:
            return None
        samples = [sample for sample, row in enumerate(rows) if row in self._rows]
        if not samples:
            return None
        constrained = [self._rows[rows[sample]] for sample in samples]
        first = [row for row in constrained if row.job is None]
        if first:
            self._submit(first)
        jobs = {row.job for row in constrained if row.job is not None}
        return StepMasks(samples, constrained, jobs, bool(first))

    def expect(self, masks: StepMasks, tokens: SampledTokens) -> None:
        """Start computing the next masks of a step's rows. `tokens` waits, in the thread, for what it samples."""
        self._submit(masks.constrained, tokens, masks.samples)

    def finish(self, masks: StepMasks) -> None:
        """Wait for the masks and pass them to the sampler."""
        for job in masks.jobs:
            job.result()
        self.state.set_masks([row.row for row in masks.constrained])

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _submit(
        self, rows: list[_Constrained], tokens: SampledTokens | None = None, samples: Sequence[int] = ()
    ) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "inflight-masks", self.prepare_thread)
        job = self._thread.submit(self._run, rows, tokens, samples)
        for row in rows:
            row.job = job

    # ---- in the thread ----

    def _run(self, rows: list[_Constrained], tokens: SampledTokens | None, samples: Sequence[int]) -> None:
        """Compute the next masks of some rows, which first sample these tokens, if any."""
        masks = self.state.host_masks
        self._catch_up(rows)
        matched = [(row, row.matcher) for row in rows if row.matcher is not None]
        places = [row.row for row, _ in matched]
        batch = MaskBatch(self._filler, [matcher for _, matcher in matched], places)
        if tokens is not None:
            self._append(rows, tokens(), samples)
            batch.advance([row.outputs[-1] for row, _ in matched])
        failed = batch.fill(masks)
        for row in rows:
            if row.matcher is None:
                masks[row.row] = 0
            elif failed and row.row in failed:
                self._recover(row)
            if row.allowed is not None:
                masks[row.row] &= row.allowed

    def _append(self, rows: list[_Constrained], token_ids: Sequence[int], samples: Sequence[int]) -> None:
        for row, sample in zip(rows, samples, strict=True):
            row.outputs.append(token_ids[sample])

    def _catch_up(self, rows: Iterable[_Constrained]) -> None:
        """Let new matchers consume the outputs so far. Rows whose grammar fails to compile have none."""
        for row in rows:
            if row.matcher is None and row.failure is None:
                try:
                    row.grammar = row.compiled.result()
                    row.matcher = row.grammar.matcher()
                    row.matcher.advance(row.outputs)
                except Exception as error:
                    row.failure = _compile_failure(error)

    def _recover(self, row: _Constrained) -> None:
        """Replace a matcher that failed because its shared lexer is full, and fill its mask.

        Any other failure is the request's own.
        """
        assert row.grammar is not None
        assert row.matcher is not None
        assert self.compiler is not None
        is_alone = False
        while row.matcher.is_lexer_full and not is_alone:
            is_alone = row.grammar.is_large
            try:
                row.grammar = self.compiler.compile_larger(row.constraint, row.grammar)
            except Exception as error:
                row.failure = _compile_failure(error)
                return
            row.matcher = row.grammar.matcher()
            row.matcher.advance(row.outputs)
            MaskBatch(self._filler, [row.matcher], [row.row]).fill(self.state.host_masks)
        if row.matcher.error is not None:
            row.failure = _failure(row.matcher.error)


def _compile_failure(error: Exception) -> RequestFailure:
    """Turn an exception into a failure of the one request: raising would fail the step for its neighbours too."""
    if isinstance(error, RequestError):
        return _failure(str(error))
    logger.error("a grammar could not be compiled", exc_info=error)
    return _failure(type(error).__name__)


def _failure(reason: str) -> RequestFailure:
    return RequestFailure("constraint_failed", f"the constraint cannot be followed any further: {reason}")
