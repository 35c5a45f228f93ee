"""Rows with structured outputs: the state of each in its grammar, and the tokens that it may sample next.

A mask depends on the row's last token. As soon as a step is launched, a thread waits for its tokens and computes the
masks of the same rows for the next step, while the host prepares that step and the device runs its forward pass. Only
sampling waits for the masks. Rows that sampled nothing in the step before get theirs when the next step starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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


@dataclass(eq=False, slots=True)
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


class _NextMasks(NamedTuple):
    """The masks of rows for the step after the one that sampled their latest tokens."""

    rows: list[_Constrained]
    bits: Future[NDArray[np.int32]]  # [len(rows), words]


class StepMasks(NamedTuple):
    """The masks of a step, being computed."""

    rows: list[int]
    bits: Future[NDArray[np.int32]]  # [len(rows), words]
    any_first: bool  # whether a row gets its first mask, which may have to wait for its grammar


@dataclass(slots=True)
class ConstrainedRows:
    """The constrained rows of a sampler. Without a compiler, request validation rejects constraints."""

    state: MaskedRows
    compiler: GrammarCompiler | None
    prepare_thread: Callable[[], None] = lambda: None  # called first in the thread that computes masks
    _rows: dict[int, _Constrained] = field(default_factory=dict)
    _filler: MaskFiller = field(default_factory=MaskFiller)
    _thread: ThreadPoolExecutor | None = None
    _next: _NextMasks | None = None  # of the rows that sampled last

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
        following, self._next = self._next, None
        if following is not None and following.rows == constrained:
            return StepMasks(chosen, following.bits, any_first)
        return StepMasks(chosen, self._submit(self._compute, constrained, following), any_first)

    def finish(self, masks: StepMasks) -> None:
        """Wait for the masks and pass them to the sampler."""
        self.state.set_masks(masks.rows, masks.bits.result())

    def expect(self, masks: StepMasks, rows: Sequence[int], tokens: SampledTokens) -> None:
        """Start computing the next masks of a step's rows, for each of which it samples a token.

        `tokens` waits for them in the thread. Failures of this step must be read before.
        """
        indices = {row: index for index, row in enumerate(rows)}
        constrained = [self._rows[row] for row in masks.rows]
        for row, each in zip(masks.rows, constrained, strict=True):
            each.pending = _PendingToken(tokens, indices[row])
        self._next = _NextMasks(constrained, self._submit(self._compute, constrained))

    def _submit(
        self, compute: Callable[..., NDArray[np.int32]], *arguments: object
    ) -> Future[NDArray[np.int32]]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "inflight-masks", self.prepare_thread)
        return self._thread.submit(compute, *arguments)

    def failures(self, masks: StepMasks, rows: Sequence[int]) -> dict[int, RequestFailure]:
        """Return why rows got no mask, by their index in `rows`."""
        failed = {row: failure for row in masks.rows if (failure := self._rows[row].failure) is not None}
        return {index: failed[row] for index, row in enumerate(rows) if row in failed} if failed else {}

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    # ---- in the thread ----

    def _compute(
        self, constrained: list[_Constrained], computed: _NextMasks | None = None
    ) -> NDArray[np.int32]:
        """Return the masks of some rows; `computed` has those of some of them, and perhaps of others."""
        if computed is not None:
            return self._complete(constrained, computed)
        token_ids: dict[SampledTokens, Sequence[int]] = {}
        for row in constrained:
            if row.pending is not None:
                tokens, sample = row.pending
                if tokens not in token_ids:
                    token_ids[tokens] = tokens()
                row.outputs.append(token_ids[tokens][sample])
                row.pending = None
        matchers = self._catch_up(constrained)
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

    def _complete(self, constrained: list[_Constrained], computed: _NextMasks) -> NDArray[np.int32]:
        """Return the masks of rows that are not exactly those of the step before."""
        bits = computed.bits.result()  # computed by this thread before
        indices = {id(row): index for index, row in enumerate(computed.rows)}
        missing = [row for row in constrained if id(row) not in indices]
        indices |= {id(row): len(bits) + index for index, row in enumerate(missing)}
        masks = self.state.mask_buffer(len(constrained))
        sources = np.array([indices[id(row)] for row in constrained])
        is_new = sources >= len(bits)
        masks[~is_new] = bits[sources[~is_new]]
        if missing:
            masks[is_new] = self._compute(missing)
        return masks

    def _catch_up(self, constrained: list[_Constrained]) -> list[Matcher | None]:
        """Return the rows' matchers after they have consumed all tokens; None if a grammar failed to compile."""
        matchers: list[Matcher | None] = []
        decoding: list[tuple[Matcher, int]] = []
        for row in constrained:
            if row.matcher is None and row.failure is None:
                try:
                    row.grammar = row.compiled.result()
                    row.matcher = row.grammar.matcher()
                except Exception as error:
                    row.failure = _compile_failure(error)
            matchers.append(row.matcher)
            if row.matcher is None:
                continue
            if len(row.outputs) == row.num_matched + 1:
                decoding.append((row.matcher, row.outputs[-1]))
            else:
                row.matcher.advance(row.outputs[row.num_matched :])
            row.num_matched = len(row.outputs)
        if decoding:
            self._filler.advance([matcher for matcher, _ in decoding], [token for _, token in decoding])
        return matchers

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
