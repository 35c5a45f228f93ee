"""The rows whose texts are constrained: where each is in its grammar, and the tokens that it may have next.

A mask depends on the row's last token. So a step's masks are computed beside its forward pass, once the step before has
told its tokens; only sampling waits for them.
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
from inflight.execution.sampling.token_bits import first_mask
from inflight.scheduling import Admission
from inflight.structured_outputs import StructuredOutputs

logger = logging.getLogger(__name__)


class MaskedRows(Protocol):
    """A sampler's rows."""

    vocab_size: int

    def mask_buffer(self, num_rows: int) -> NDArray[np.int32]:
        """[num_rows, words], to be filled and given to `set_masks`."""

    def set_masks(self, rows: Sequence[int], bits: NDArray[np.int32]) -> None: ...


class DrawnTokens(Protocol):
    """The tokens of one step, by the place of a sample in it. Waits for the device where they are still on it."""

    def __call__(self) -> Sequence[int]: ...


class _Drawn(NamedTuple):
    """A token that a launched step draws."""

    tokens: DrawnTokens
    place: int


@dataclass(slots=True)
class _Constrained:
    """One row. Its grammar is compiled from its admission on, its outputs are replayed for its first mask."""

    asked: StructuredOutputs
    compiled: Future[Grammar]
    allowed: NDArray[np.int32] | None  # by the other parameters; None: all
    outputs: list[int]
    num_matched: int = 0  # outputs that the matcher has seen
    drawn: _Drawn | None = None  # which comes behind them
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    failure: RequestFailure | None = None


class StepMasks(NamedTuple):
    """The masks of a step, on their way."""

    rows: list[int]
    bits: Callable[[], NDArray[np.int32]]  # [len(rows), words]
    any_first: bool  # one of them has had none before, and may have to wait for its grammar


@dataclass(slots=True)
class ConstrainedRows:
    """Without a compiler nobody may ask for a constraint, which whoever validates requests sees to."""

    state: MaskedRows
    compiler: GrammarCompiler | None
    in_thread: bool = (
        True  # that computes masks; else whoever wants them does, since the forward pass leaves it free
    )
    _rows: dict[int, _Constrained] = field(default_factory=dict)
    _filler: MaskFiller = field(default_factory=MaskFiller)
    _thread: ThreadPoolExecutor | None = None
    _latest: Future[NDArray[np.int32]] | None = None

    def admit(self, admissions: Sequence[Admission]) -> None:
        if admissions and self._latest is not None:  # of a step that failed before it wanted its masks
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

    def _compile(self, asked: StructuredOutputs) -> Future[Grammar]:
        """Beside the steps that compute the prompt, unless it was compiled before."""
        if self.compiler is None:
            raise EngineError("a request has a constraint, and this engine cannot compile any")
        return self.compiler.begin(asked)

    @property
    def any(self) -> bool:
        """Whether any row may be constrained."""
        return bool(self._rows)

    def start(self, rows: Sequence[int]) -> StepMasks | None:
        """Begin with the masks for those of these rows that are constrained; None if none is."""
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
        """Wait for the masks, or compute them, and give them to the sampler."""
        bits = masks.bits()
        self._latest = None
        self.state.set_masks(masks.rows, bits)

    def drew(self, masks: StepMasks, rows: Sequence[int], tokens: DrawnTokens) -> None:
        """A step draws a token for each of `rows`, the constrained ones among them; they will be told by `tokens`."""
        places = {row: place for place, row in enumerate(rows)}
        for row in masks.rows:
            self._rows[row].drawn = _Drawn(tokens, places[row])

    def failures(self, masks: StepMasks, rows: Sequence[int]) -> dict[int, RequestFailure]:
        """Why rows that have no token got no mask, by their place in `rows`."""
        failed = {row: failure for row in masks.rows if (failure := self._rows[row].failure) is not None}
        return {place: failed[row] for place, row in enumerate(rows) if row in failed} if failed else {}

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    # ---- beside the forward pass ----

    def _compute(self, constrained: list[_Constrained]) -> NDArray[np.int32]:
        told: dict[DrawnTokens, Sequence[int]] = {}
        for row in constrained:
            if row.drawn is not None:
                tokens, place = row.drawn
                if tokens not in told:
                    told[tokens] = tokens()
                row.outputs.append(told[tokens][place])
                row.drawn = None
        matchers = [self._caught_up(row) for row in constrained]
        masks = self.state.mask_buffer(len(constrained))
        if None in matchers:
            masks[:] = 0
            places = [place for place, matcher in enumerate(matchers) if matcher is not None]
            found = masks[places]
            self._filler.fill([m for m in matchers if m is not None], found)
            masks[places] = found
        else:
            self._filler.fill([m for m in matchers if m is not None], masks)
        for row, matcher, mask in zip(constrained, matchers, masks, strict=True):
            if matcher is not None and matcher.error is not None:
                self._recover(row, mask)
            if row.allowed is not None:
                mask &= row.allowed
        return masks

    def _caught_up(self, row: _Constrained) -> Matcher | None:
        """The row's matcher, which has seen all its tokens; None if there is none."""
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
        """Replace a matcher that has failed because the lexer that it shares is full, and fill its mask. Any other
        failure is the request's own."""
        assert row.grammar is not None
        assert row.matcher is not None
        assert self.compiler is not None
        is_alone = False
        while row.matcher.is_lexer_full and not is_alone:
            is_alone = row.grammar.is_large
            try:
                row.grammar = self.compiler.compile_larger(row.asked, row.grammar)
            except Exception as error:
                row.failure = _compile_failure(error)
                return
            row.matcher = row.grammar.matcher()
            row.matcher.advance(row.outputs)
            self._filler.fill([row.matcher], mask[None])
        if row.matcher.error is not None:
            row.failure = _failure(row.matcher.error)


def _compile_failure(error: Exception) -> RequestFailure:
    """The request fails alone, whatever was raised: a step that raised would fail for its neighbours too."""
    if isinstance(error, RequestError):
        return _failure(str(error))
    logger.error("a grammar could not be compiled", exc_info=error)
    return _failure(type(error).__name__)


def _failure(reason: str) -> RequestFailure:
    return RequestFailure("constraint_failed", f"the constraint cannot be followed any further: {reason}")
