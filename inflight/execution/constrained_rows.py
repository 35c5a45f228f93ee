"""Rows with structured outputs: the state of each in its grammar, and the tokens that it may sample next.

A mask depends on the row's last token. A step's masks are therefore computed during its forward pass, once the previous
step's tokens are known; only sampling waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from inflight.constraints import Grammar, GrammarCompiler, MaskFiller, Matcher
from inflight.errors import EngineError, RequestError
from inflight.events import RequestFailure
from inflight.execution.sampling.interface import first_mask
from inflight.scheduling import Admission
from inflight.structured_outputs import StructuredOutputs

logger = logging.getLogger(__name__)


class MaskedRows(Protocol):
    """The rows of a sampler, as far as masks are concerned."""

    vocab_size: int

    def mask_buffer(self, num_rows: int) -> NDArray[np.int32]:
        """Return a buffer [num_rows, words] to fill and pass to `set_masks`."""

    def set_masks(self, rows: Sequence[int], bits: NDArray[np.int32]) -> None: ...


class SampledTokens(Protocol):
    """Returns the tokens of one step, by sample. Waits for the device if they are still there."""

    def __call__(self) -> Sequence[int]: ...


class _PendingToken(NamedTuple):
    """A token that a launched step samples."""

    tokens: SampledTokens
    sample: int  # its index in the step


@dataclass(slots=True)
class _Constrained:
    """One row. Its grammar is compiled from admission on; its outputs are replayed for its first mask."""

    constraint: StructuredOutputs
    compiled: Future[Grammar]
    allowed: NDArray[np.int32] | None  # by allowed_token_ids; None: all
    outputs: list[int]
    num_matched: int = 0  # outputs that the matcher has consumed
    pending: _PendingToken | None = None  # the next output, if it has not been read yet
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    failure: RequestFailure | None = None


class StepMasks(NamedTuple):
    """The masks of a step, being computed."""

    rows: list[int]
    bits: Callable[[], NDArray[np.int32]]  # [len(rows), words]
    any_first: bool  # whether a row gets its first mask, which may have to wait for its grammar


@dataclass(slots=True)
class ConstrainedRows:
    """The constrained rows of a sampler. Without a compiler, request validation rejects constraints."""

    state: MaskedRows
    compiler: GrammarCompiler | None
    in_thread: bool = (
        True  # compute masks in a thread; not on a GPU, where the forward pass leaves the caller free
    )
    _rows: dict[int, _Constrained] = field(default_factory=dict)
    _filler: MaskFiller = field(default_factory=MaskFiller)
    _thread: ThreadPoolExecutor | None = None
    _latest: Future[NDArray[np.int32]] | None = None

    def admit(self, admissions: Sequence[Admission]) -> None:
        if admissions and self._latest is not None:  # left by a step that failed before it used its masks
            wait([self._latest])
            self._latest = None
        for row, request in admissions:
            self._rows.pop(row, None)
            params = request.params
            if params.structured_outputs is not None and request.max_tokens:
                outputs = request.token_ids[request.num_prompt_tokens :].tolist()
                allowed = (
                    None if params.allowed_token_ids is None else first_mask(params, self.state.vocab_size)
                )
                compiled = self._compile(params.structured_outputs)
                self._rows[row] = _Constrained(params.structured_outputs, compiled, allowed, outputs)

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
        chosen = [row for row in rows if row in self._rows]
        if not chosen:
            return None
        constrained = [self._rows[row] for row in chosen]
        any_first = any(row.grammar is None for row in constrained)
        if not self.in_thread:
            return StepMasks(chosen, partial(self._compute, constrained), any_first)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "inflight-masks")
        self._latest = self._thread.submit(self._compute, constrained)
        return StepMasks(chosen, self._latest.result, any_first)

    def finish(self, masks: StepMasks) -> None:
        """Wait for the masks, or compute them, and pass them to the sampler."""
        bits = masks.bits()
        self._latest = None
        self.state.set_masks(masks.rows, bits)

    def expect(self, masks: StepMasks, rows: Sequence[int], tokens: SampledTokens) -> None:
        """Note that a step samples a token for each of `rows`, which `tokens` will return."""
        indices = {row: index for index, row in enumerate(rows)}
        for row in masks.rows:
            self._rows[row].pending = _PendingToken(tokens, indices[row])

    def failures(self, masks: StepMasks, rows: Sequence[int]) -> dict[int, RequestFailure]:
        """Return why rows got no mask, by their index in `rows`."""
        failed = {row: failure for row in masks.rows if (failure := self._rows[row].failure) is not None}
        return {index: failed[row] for index, row in enumerate(rows) if row in failed} if failed else {}

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    # ---- during the forward pass ----

    def _compute(self, constrained: list[_Constrained]) -> NDArray[np.int32]:
        token_ids: dict[SampledTokens, Sequence[int]] = {}
        for row in constrained:
            if row.pending is not None:
                tokens, sample = row.pending
                if tokens not in token_ids:
                    token_ids[tokens] = tokens()
                row.outputs.append(token_ids[tokens][sample])
                row.pending = None
        matchers = [self._caught_up(row) for row in constrained]
        masks = self.state.mask_buffer(len(constrained))
        if None in matchers:
            masks[:] = 0
            indices = [index for index, matcher in enumerate(matchers) if matcher is not None]
            filled = masks[indices]
            self._filler.fill([m for m in matchers if m is not None], filled)
            masks[indices] = filled
        else:
            self._filler.fill([m for m in matchers if m is not None], masks)
        for row, matcher, mask in zip(constrained, matchers, masks, strict=True):
            if matcher is not None and matcher.error is not None:
                self._recover(row, mask)
            if row.allowed is not None:
                mask &= row.allowed
        return masks

    def _caught_up(self, row: _Constrained) -> Matcher | None:
        """Return the row's matcher after it has consumed all tokens; None if the grammar failed to compile."""
        if row.matcher is None and row.failure is None:
            try:
                row.grammar = row.compiled.result()
            except Exception as error:
                row.failure = _compile_failure(error)
                return None
            row.matcher = row.grammar.matcher()
        if row.matcher is not None:
            row.matcher.advance(row.outputs[row.num_matched :])
            row.num_matched = len(row.outputs)
        return row.matcher

    def _recover(self, row: _Constrained, mask: NDArray[np.int32]) -> None:
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
            self._filler.fill([row.matcher], mask[None])
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
