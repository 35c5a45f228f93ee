"""Rows with structured outputs: the state of each in its grammar, and the tokens that it may sample next.

A mask depends on the row's last token. As soon as a step is launched, threads wait for its tokens and compute the masks
of the same rows for the next step, while the host prepares that step and the device runs its forward pass. On a GPU
these are compiled threads that need no GIL (`constraints/native_matcher.py`), and the device copies the tokens to where
they look for them. Otherwise it is one thread in Python, which also computes the first mask of each row when its first
step starts: it may have to wait for the grammar.

Jobs are worked through in order, and write the mask of a row into that row of a buffer. A row's next mask is written
only after the tokens of the step that uses the last one, so no step ever reads a mask that is being written.

A GPU samples behind all drafts at once. Drafts are known before, so copies of the matchers consume them and fill the
masks behind them, while the device runs the forward pass. The matchers themselves only see tokens that were sampled.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from inflight.constraints.compiler import Grammar, GrammarCompiler
from inflight.constraints.matcher import MaskBatch, MaskFiller, Matcher, num_cores
from inflight.constraints.native_matcher import (
    MAX_THREADS,
    MaskThreads,
    NativeBatch,
    NativeState,
    native_functions,
)
from inflight.errors import EngineError, RequestError
from inflight.events import RequestFailure
from inflight.execution.sampling.interface import first_mask
from inflight.scheduling.batch import Admission
from inflight.structured_outputs import StructuredOutputs

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 0.1  # seconds after which a wait for masks makes sure that the device still works


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
    job: Future[None] | None = None  # computes the mask of the next token, in Python
    batch: int = 0  # the number of the native batch that computes it
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    failure: RequestFailure | None = None


@dataclass(eq=False, slots=True)
class StepMasks:
    """The masks of a step, which threads compute."""

    rows: list[int]  # of all samples
    samples: list[int]  # the constrained ones
    constrained: list[_Constrained]  # their rows
    jobs: set[Future[None]]
    batch: int  # the number of the last native batch that computes some of them; 0: none
    any_first: bool  # whether a row gets its first mask, which may have to wait for its grammar
    native: NativeBatch | None = None  # computes the next masks of these rows
    # By row, the drafts that its next samples follow; empty: no row samples behind drafts in this step.
    drafts: list[list[int]] = field(default_factory=list)
    failed_drafts: dict[int, RequestFailure] = field(default_factory=dict)  # by sample behind a draft

    def failures(self) -> dict[int, RequestFailure]:
        """Return why rows got no mask, by sample."""
        rows = zip(self.samples, self.constrained, strict=True)
        return self.failed_drafts | {sample: row.failure for sample, row in rows if row.failure is not None}

    @property
    def drafted_samples(self) -> list[int]:
        """The samples behind drafts, in order."""
        rows = zip(self.samples, self.drafts, strict=True) if self.drafts else ()
        return [sample for first, drafts in rows for sample in range(first + 1, first + 1 + len(drafts))]


class _Submitted(NamedTuple):
    """A native batch that may not be completed yet."""

    number: int
    masks: StepMasks
    native: NativeBatch
    tokens: NDArray[np.int32]


class MaskTimes(NamedTuple):
    """When the masks of one step were computed and used, in seconds of `time.monotonic`."""

    tokens_at: float  # the last step's tokens were seen; 0.0 for the first masks of rows
    filled_at: float
    wanted_at: float  # the host had nothing else to do than to wait for them
    ready_at: float  # the host had them
    passed_at: float  # the host had passed them to the sampler


@dataclass(slots=True)
class ConstrainedRows:
    """The constrained rows of a sampler. Without a compiler, request validation rejects constraints."""

    state: MaskedRows
    compiler: GrammarCompiler | None
    prepare_thread: Callable[[], None] = lambda: None  # called first in the thread that computes masks
    times: list[MaskTimes] | None = None  # appended to, if there is a list
    _rows: dict[int, _Constrained] = field(default_factory=dict)
    _filler: MaskFiller = field(default_factory=MaskFiller)
    _thread: ThreadPoolExecutor | None = None
    _native: MaskThreads | None = None
    _submitted: deque[_Submitted] = field(default_factory=deque)  # oldest first
    _tokens: SampledTokens | None = None  # of the last native batch
    _previous: StepMasks | None = None  # of the last native batch, if its rows are still the same
    _python_times: tuple[float, float] = (0.0, 0.0)
    # Rows that a step with drafts has sampled for the last time, and what.
    _others: list[tuple[_Constrained, int]] = field(default_factory=list)

    def admit(self, admissions: Sequence[Admission]) -> None:
        if admissions:
            self._previous = None
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

    def start(self, rows: Sequence[int], drafts: Sequence[int] = ()) -> StepMasks | None:
        """Start computing the masks of the constrained rows among these; None if there are none.

        `drafts`: the draft that each sample follows, negative at a row's first one; empty: there are none. The masks
        behind drafts are those that `look_ahead` computes.
        """
        if self._submitted:
            self._settle()
        if not self._rows:
            return None
        previous = self._previous
        if previous is not None and previous.rows == rows:
            return replace(previous, jobs=set(), batch=previous.constrained[0].batch, any_first=False)
        samples = [sample for sample, row in enumerate(rows) if row in self._rows]
        behind: list[list[int]] = []
        if drafts:
            samples = [sample for sample in samples if drafts[sample] < 0]
            behind = [list(takewhile(_is_draft, drafts[sample + 1 :])) for sample in samples]
        if not samples:
            return None
        constrained = [self._rows[rows[sample]] for sample in samples]
        first = [row for row in constrained if row.job is None and not row.batch]
        if first:
            self._submit(first)
        jobs = {row.job for row in constrained if row.job is not None}
        batch = max(row.batch for row in constrained)
        masks = StepMasks(list(rows), samples, constrained, jobs, batch, bool(first))
        if any(behind):
            masks.drafts = behind
        return masks

    def expect(
        self, masks: StepMasks, tokens: SampledTokens, arriving: NDArray[np.int32] | None = None
    ) -> None:
        """Start computing the next masks of a step's rows. `tokens` waits, in a thread, for what it samples.

        `arriving`: memory into which the device copies the tokens, by sample, which are `UNKNOWN` until then.
        """
        native = None
        if arriving is not None and not masks.drafts:  # compiled threads take one token of each row
            native = masks.native or self._native_batch(masks)
        if native is None:
            self._previous = None
            self._submit(masks.constrained, tokens, masks.samples, masks.drafts)
            return
        assert arriving is not None
        assert self._native is not None
        number = self._native.submit(native, arriving)
        self._tokens = tokens
        self._submitted.append(_Submitted(number, masks, native, arriving))
        for row in masks.constrained:
            row.batch, row.job = number, None
        masks.native, self._previous = native, masks

    def advance(self, masks: StepMasks, token_ids: Sequence[int], again: Collection[int]) -> None:
        """Note what these rows sampled, in a step with drafts, which samples some of them `again`.

        Their masks are computed here and now: a thread would be waited for. Those of the others begin with
        `expect_others`.
        """
        rows = []
        for row, sample in zip(masks.constrained, masks.samples, strict=True):
            if sample not in again:
                self._others.append((row, token_ids[sample]))
                continue
            rows.append(row)
            row.outputs.append(token_ids[sample])
            if row.matcher is not None:
                row.matcher.state.consume_token(token_ids[sample])
                row.matcher.fill(self.state.host_masks[row.row])
        failed = [row.row for row in rows if row.matcher is not None and row.matcher.error is not None]
        self._apply(rows, failed, self.state.host_masks)

    def expect_others(self) -> None:
        """Start computing the next masks of rows that a step with drafts has sampled for the last time."""
        others, self._others = self._others, []
        if others:
            token_ids = [token_id for _, token_id in others]
            self._submit([row for row, _ in others], lambda: token_ids, range(len(others)))

    def finish(self, masks: StepMasks) -> None:
        """Wait for the masks and pass them to the sampler."""
        wanted_at = time.monotonic() if self.times is not None else 0.0
        for job in masks.jobs:
            job.result()
        if masks.batch and self._wait(masks.batch):
            masks.native = None
        ready_at = time.monotonic() if self.times is not None else 0.0
        self.state.set_masks([row.row for row in masks.constrained])
        if self.times is not None:
            worker_times = (
                self._python_times if self._native is None or not masks.batch else self._native.times()
            )
            self.times.append(MaskTimes(*worker_times, wanted_at, ready_at, time.monotonic()))

    def look_ahead(self, masks: StepMasks, ahead: NDArray[np.int32]) -> None:
        """Fill ahead [num_drafts, words] with the masks of the samples behind drafts, in order.

        The step's other masks are finished. A row whose copied matcher fails behind a draft is left as it is: the
        failure is that of the sample there, which only counts if the drafts before it are right.
        """
        places = {sample: place for place, sample in enumerate(masks.drafted_samples)}
        rows = [
            (replace(row, matcher=row.matcher and row.matcher.copy(), outputs=row.outputs[:]), sample, drafts)
            for row, sample, drafts in zip(masks.constrained, masks.samples, masks.drafts, strict=True)
            if drafts
        ]
        for index in range(max(map(len, masks.drafts))):
            rows = [(row, sample + 1, drafts) for row, sample, drafts in rows if index < len(drafts)]
            for row, sample, drafts in rows:
                row.row = places[sample]
                row.outputs.append(drafts[index])
                if row.failure is not None:
                    row.matcher = None
                if row.matcher is not None:
                    row.matcher.consume(drafts[index : index + 1])
            matched = [(row.matcher, row.row) for row, _, _ in rows if row.matcher is not None]
            batch = MaskBatch(self._filler, [matcher for matcher, _ in matched], [row for _, row in matched])
            self._apply([row for row, _, _ in rows], batch.fill(ahead), ahead)
            masks.failed_drafts |= {sample: row.failure for row, sample, _ in rows if row.failure is not None}

    # ---- native batches ----

    def _native_batch(self, masks: StepMasks) -> NativeBatch | None:
        """Return the batch of a step's rows, if all of them have native matchers."""
        states: list[NativeState] = []
        for row in masks.constrained:
            if row.matcher is None or not isinstance(row.matcher.state, NativeState):
                return None
            states.append(row.matcher.state)
        if self._native is None:
            functions = native_functions()
            assert functions is not None  # there are native matchers
            num_threads = max(1, min(MAX_THREADS, num_cores() // 2))
            self._native = MaskThreads(functions, self.state.host_masks, num_threads)
        places, allowed = [row.row for row in masks.constrained], [row.allowed for row in masks.constrained]
        return NativeBatch(states, range(len(states)), places, masks.samples, allowed)

    def _wait(self, number: int) -> bool:
        """Wait for a native batch and those before it. Return whether any of their matchers were replaced.

        Raises what the device raises if it is lost.
        """
        self._poll(number)
        return self._settle()

    def _poll(self, number: int) -> None:
        assert self._native is not None
        while not self._native.wait(number, CHECK_INTERVAL):
            if self._tokens is not None:
                self._tokens()

    def _settle(self) -> bool:
        """Let go of completed batches, and recover rows whose matchers failed. Return whether there were any."""
        assert self._native is not None
        any_failed = False
        while self._submitted and self._native.wait(self._submitted[0].number, 0.0):
            done = self._submitted.popleft()
            self._append(done.masks.constrained, done.tokens.tolist(), done.masks.samples)
            if done.native.failed.any():
                any_failed = True
                for index in done.native.failures():
                    row = done.masks.constrained[index]
                    if self._rows.get(row.row) is row:
                        self._recover(row, self.state.host_masks)
        if any_failed:
            self._previous = None
        return any_failed

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        if self._native is not None:
            self._native.close()

    def _submit(
        self,
        rows: list[_Constrained],
        tokens: SampledTokens | None = None,
        samples: Sequence[int] = (),
        drafts: Sequence[list[int]] = (),
    ) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "inflight-masks", self.prepare_thread)
        after = 0 if self._native is None else self._native.num_submitted
        job = self._thread.submit(self._run, rows, tokens, samples, drafts, after)
        for row in rows:
            row.job = job

    # ---- in the thread ----

    def _run(
        self,
        rows: list[_Constrained],
        tokens: SampledTokens | None,
        samples: Sequence[int],
        drafts: Sequence[list[int]],
        after: int,
    ) -> None:
        """Compute the next masks of some rows, which first sample these tokens, if any.

        `drafts`: see `StepMasks`. `after`: the last native batch that may still write a mask of the request that had a
        row before.
        """
        masks = self.state.host_masks
        if after:
            self._poll(after)
        self._catch_up(rows)
        matched = [(row, row.matcher) for row in rows if row.matcher is not None]
        places = [row.row for row, _ in matched]
        batch = MaskBatch(self._filler, [matcher for _, matcher in matched], places)
        tokens_at = 0.0
        if tokens is not None:
            token_ids = tokens()
            tokens_at = time.monotonic()
            if drafts:
                self._append_runs(rows, token_ids, samples, drafts)
            else:
                self._append(rows, token_ids, samples)
                batch.advance([row.outputs[-1] for row, _ in matched])
        failed = batch.fill(masks)
        self._python_times = tokens_at, time.monotonic()
        self._apply(rows, failed, masks)

    def _apply(self, rows: Sequence[_Constrained], failed: Sequence[int], masks: NDArray[np.int32]) -> None:
        """Let the masks of rows be what their requests and failed matchers allow."""
        for row in rows:
            if row.matcher is None:
                masks[row.row] = 0
            elif failed and row.row in failed:
                self._recover(row, masks)
            elif row.allowed is not None:
                masks[row.row] &= row.allowed

    def _append(self, rows: list[_Constrained], token_ids: Sequence[int], samples: Sequence[int]) -> None:
        for row, sample in zip(rows, samples, strict=True):
            row.outputs.append(token_ids[sample])

    def _append_runs(
        self,
        rows: list[_Constrained],
        token_ids: Sequence[int],
        samples: Sequence[int],
        drafts: Sequence[list[int]],
    ) -> None:
        """Let rows consume what they sampled in a step with drafts, as long as these were right."""
        for row, sample, drafted in zip(rows, samples, drafts, strict=True):
            run = [token_ids[sample]]
            while len(run) <= len(drafted) and run[-1] == drafted[len(run) - 1]:
                run.append(token_ids[sample + len(run)])
            row.outputs += run
            if row.matcher is not None:
                row.matcher.consume(run)

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

    def _recover(self, row: _Constrained, masks: NDArray[np.int32]) -> None:
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
            MaskBatch(self._filler, [row.matcher], [row.row]).fill(masks)
        if row.matcher.error is not None:
            row.failure = _failure(row.matcher.error)
        if row.allowed is not None:
            masks[row.row] &= row.allowed


def _is_draft(token_id: int) -> bool:
    return token_id >= 0


def _compile_failure(error: Exception) -> RequestFailure:
    """Turn an exception into a failure of the one request: raising would fail the step for its neighbours too."""
    if isinstance(error, RequestError):
        return _failure(str(error))
    logger.error("a grammar could not be compiled", exc_info=error)
    return _failure(type(error).__name__)


def _failure(reason: str) -> RequestFailure:
    return RequestFailure("constraint_failed", f"the constraint cannot be followed any further: {reason}")
