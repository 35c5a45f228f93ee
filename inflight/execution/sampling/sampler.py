"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from inflight.events import PositionLogprobs
from inflight.execution.sampling.adjust import adjust
from inflight.execution.sampling.candidates import DrawParams, draw_dense, draw_nucleus, draw_top_k, row_tiles
from inflight.execution.sampling.logprobs import LogprobTensors, fetch, score
from inflight.execution.sampling.plan import SamplingPlan, make_plan
from inflight.execution.sampling.randomness import race_key
from inflight.execution.sampling.rows import SamplingRows

# How an entry can be bad: NaN or inf in the model's logits, or no token left to choose by the row's parameters.
IS_NOT_FINITE, HAS_NO_TOKEN = 1, 2


@dataclass(frozen=True, slots=True)
class HostSample:
    """What S entries sampled, as plain Python."""

    token_ids: list[int]
    bad: list[int]
    logprobs: dict[int, PositionLogprobs]  # by entry, for those that asked


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """What S entries sampled, still on the device."""

    token_ids: Tensor  # [S] int64
    # [S] uint8: 0, or how it is bad. A bad entry still has some token of the vocabulary, always the same one, so
    # that the step can go on and the request fails alone.
    bad: Tensor
    logprobs: LogprobTensors | None
    logprob_entries: tuple[int, ...]  # the entry of each position in `logprobs`

    def fetch(self) -> SampledTensors:
        """Start copying to host memory without waiting; record an event after it, then call `to_host`."""
        logprobs = None if self.logprobs is None else self.logprobs.fetch()
        return SampledTensors(fetch(self.token_ids), fetch(self.bad), logprobs, self.logprob_entries)

    def to_host(self) -> HostSample:
        """Waits for the device where the tensors are still on it."""
        positions = [] if self.logprobs is None else self.logprobs.to_host()
        logprobs = dict(zip(self.logprob_entries, positions, strict=True))
        return HostSample(self.token_ids.tolist(), self.bad.tolist(), logprobs)


class Sampler:
    """Samples one token for each of the rows that a step names.

    A row's token is a function of its logits, its parameters and its own tokens, to the last bit: nothing
    here reduces across rows, and nothing about the neighbours changes the order in which a row is summed.
    """

    def __init__(self, state: SamplingRows) -> None:
        self.state = state
        self._plan: SamplingPlan | None = None
        self._planned: tuple[int, tuple[int, ...]] = (-1, ())  # version and rows that _plan is for

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Sequence[int], lengths: Tensor, tokens: Tensor) -> SampledTensors:
        """Choose token number lengths[i] of row rows[i] from logits[i].

        logits [S, V] float32, contiguous, are overwritten. lengths [S] int32 or int64 count the tokens of
        each row before the new one. tokens [max_rows, max_len] int32 hold them.
        """
        plan = self._plan_for(rows)
        bad = _not_finite(logits)  # which is IS_NOT_FINITE where it is so
        raw = None if plan.logprobs is None else logits[plan.logprobs]
        if plan.adjusts:
            adjust(logits, plan, self.state, lengths, tokens)
            bad = torch.where(bad == 0, _not_finite(logits) * HAS_NO_TOKEN, bad)
        token_ids = self._choose(logits, plan, lengths)
        logprobs = None
        if raw is not None and plan.logprobs is not None:
            logprobs = score(raw, token_ids[plan.logprobs], plan.logprob_counts)
        return SampledTensors(token_ids, bad, logprobs, plan.logprob_entries)

    def score_prompt(self, logits: Tensor, target_ids: Tensor, num: int) -> LogprobTensors:
        """The tokens target_ids [P] int64 of a prompt and the top `num` under logits [P, V] that predict them."""
        return score(logits, target_ids, (min(num, logits.shape[1]),) * len(logits))

    def _plan_for(self, rows: Sequence[int]) -> SamplingPlan:
        wanted = (self.state.version, tuple(rows))
        if self._plan is None or self._planned != wanted:
            self._plan, self._planned = make_plan(self.state, rows), wanted
        return self._plan

    def _choose(self, logits: Tensor, plan: SamplingPlan, lengths: Tensor) -> Tensor:
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if plan.greedy is not None:
            token_ids[plan.greedy] = _select(logits, plan.greedy).argmax(-1)
        for width, entries in plan.top_k.items():
            self._draw(partial(draw_top_k, width=width), entries, logits, plan, lengths, token_ids)
        if plan.nucleus is not None:
            draw = partial(draw_nucleus, min_p=plan.min_p)
            self._draw(draw, plan.nucleus, logits, plan, lengths, token_ids)
        if plan.dense is not None:
            draw = partial(draw_dense, min_p=plan.min_p)
            self._draw(draw, plan.dense, logits, plan, lengths, token_ids)
        return token_ids

    def _draw(
        self,
        draw: Callable[[Tensor, DrawParams], Tensor],
        entries: Tensor,
        logits: Tensor,
        plan: SamplingPlan,
        lengths: Tensor,
        token_ids: Tensor,
    ) -> None:
        params = self._draw_params(plan, entries, lengths)
        chosen = _select(logits, entries)
        drawn = [draw(chosen[tile], params.select(tile)) for tile in row_tiles(chosen)]
        token_ids[entries] = torch.cat(drawn)

    def _draw_params(self, plan: SamplingPlan, entries: Tensor, lengths: Tensor) -> DrawParams:
        state, rows = self.state, plan.rows[entries]
        return DrawParams(
            temperature=state.temperature[rows, None],
            log_min_p=state.log_min_p[rows, None],
            top_k=state.top_k[rows, None],
            top_p=state.top_p[rows, None],
            key=race_key(state.seed_low[rows], state.seed_high[rows], lengths[entries].int()),
        )


def _not_finite(logits: Tensor) -> Tensor:
    """[S] uint8: 1 where the largest is not."""
    return (~logits.amax(-1).isfinite()).view(torch.uint8)


def _select(logits: Tensor, entries: Tensor) -> Tensor:
    """The rows of `entries`, which are in order: without a copy when they are all."""
    return logits if len(entries) == len(logits) else logits[entries]
