"""The sampler in torch: from logits to tokens, and log-probabilities under the raw logits.

Log-probabilities are taken before any temperature, penalty or mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from inflight.execution.sampling.gumbel import (
    RowParams,
    noise_key,
    row_tiles,
    sample_dense,
    sample_nucleus,
    sample_top_k,
    top_candidates,
)
from inflight.execution.sampling.interface import HAS_NO_TOKEN, LogprobTensors, SampledTensors
from inflight.execution.sampling.rows import Allowed, BadWords, SamplingPlan, SamplingRows, make_plan


def score(logits: Tensor, target_ids: Tensor, counts: tuple[int, ...]) -> LogprobTensors:
    """Score targets [P] int64 and the most likely tokens of raw logits [P, V]; `counts` may not exceed V."""
    shape = (len(logits), 1 + max(counts, default=0))
    token_ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ranks = torch.empty_like(token_ids)
    token_ids[:, 0] = target_ids
    for tile in row_tiles(logits):
        _score_tile(logits[tile], token_ids[tile], logprobs[tile], ranks[tile])
    return LogprobTensors(token_ids, logprobs, ranks, counts)


def _score_tile(logits: Tensor, token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> None:
    """Fill in everything but the targets, which are the first column of `token_ids`."""
    ranks[:, 0] = 1 + (logits > logits.gather(1, token_ids[:, :1])).sum(-1)
    num = token_ids.shape[1] - 1
    if num:
        values, token_ids[:, 1:] = top_candidates(logits, num)
        # Any token greater than one of the best is itself one of the best.
        ranks[:, 1:] = 1 + (values[:, None, :] > values[:, :, None]).sum(-1)  # [P, N, N] -> [P, N]
    logprobs.copy_(logits.log_softmax(-1).gather(1, token_ids))


class Sampler:
    """Samples one token for each row of a step.

    A row's token is a function of its logits, its parameters and its own tokens, to the last bit: nothing
    reduces across rows, and the neighbours do not change the order in which a row is summed.
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
        bad = _not_finite(logits)  # 1 is IS_NOT_FINITE
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
        """Score the prompt tokens target_ids [P] int64 and the top `num` under logits [P, V] that predict them."""
        return score(logits, target_ids, (min(num, logits.shape[1]),) * len(logits))

    def _plan_for(self, rows: Sequence[int]) -> SamplingPlan:
        key = (self.state.version, tuple(rows))
        if self._plan is None or self._planned != key:
            self._plan, self._planned = make_plan(self.state, rows), key
        return self._plan

    def _choose(self, logits: Tensor, plan: SamplingPlan, lengths: Tensor) -> Tensor:
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if plan.greedy is not None:
            token_ids[plan.greedy] = _select(logits, plan.greedy).argmax(-1)
        for width, entries in plan.top_k.items():
            self._sample_rows(partial(sample_top_k, width=width), entries, logits, plan, lengths, token_ids)
        if plan.nucleus is not None:
            sample = partial(sample_nucleus, min_p=plan.min_p)
            self._sample_rows(sample, plan.nucleus, logits, plan, lengths, token_ids)
        if plan.dense is not None:
            sample = partial(sample_dense, min_p=plan.min_p)
            self._sample_rows(sample, plan.dense, logits, plan, lengths, token_ids)
        return token_ids

    def _sample_rows(
        self,
        sample: Callable[[Tensor, RowParams], Tensor],
        entries: Tensor,
        logits: Tensor,
        plan: SamplingPlan,
        lengths: Tensor,
        token_ids: Tensor,
    ) -> None:
        params = self._row_params(plan, entries, lengths)
        chosen = _select(logits, entries)
        token_ids_of_tiles = [sample(chosen[tile], params.select(tile)) for tile in row_tiles(chosen)]
        token_ids[entries] = torch.cat(token_ids_of_tiles)

    def _row_params(self, plan: SamplingPlan, entries: Tensor, lengths: Tensor) -> RowParams:
        state, rows = self.state, plan.rows[entries]
        return RowParams(
            temperature=state.temperature[rows, None],
            log_min_p=state.log_min_p[rows, None],
            top_k=state.top_k[rows, None],
            top_p=state.top_p[rows, None],
            key=noise_key(state.seed_low[rows], state.seed_high[rows], lengths[entries].int()),
        )


def _not_finite(logits: Tensor) -> Tensor:
    """Return [S] uint8: 1 where the greatest logit is not finite."""
    return (~logits.amax(-1).isfinite()).view(torch.uint8)


def _select(logits: Tensor, entries: Tensor) -> Tensor:
    """Return the rows of `entries`, which are sorted; without a copy if these are all rows."""
    return logits if len(entries) == len(logits) else logits[entries]


def adjust(logits: Tensor, plan: SamplingPlan, state: SamplingRows, lengths: Tensor, tokens: Tensor) -> None:
    """Apply all rules of `plan`. lengths [S], tokens [max_rows, max_len]"""
    flat = logits.view(-1)
    if plan.allowed is not None:
        _keep_allowed(logits, plan.allowed)
    for entry, mask in plan.masks.items():
        logits[entry].masked_fill_(~mask, -torch.inf)
    if plan.bad_words is not None:
        _forbid_bad_words(flat, plan.bad_words, plan.rows, state.num_prompt_tokens, lengths, tokens)
    if plan.stops is not None:
        entries, places = plan.stops
        too_short = lengths[entries] < state.min_length[plan.rows[entries]]
        flat.index_add_(0, places, _forbid_where(too_short))
    if plan.bias is not None:
        flat.index_add_(0, *plan.bias)
    if plan.penalties is not None:
        _penalise(logits, plan.penalties, plan.rows, state, lengths, tokens)


def _forbid_where(condition: Tensor) -> Tensor:
    return torch.zeros(condition.shape, device=condition.device).masked_fill_(condition, -torch.inf)


def _keep_allowed(logits: Tensor, allowed: Allowed) -> None:
    flat = logits.view(-1)
    values = flat[allowed.places]
    logits.index_fill_(0, allowed.entries, -torch.inf)
    flat[allowed.places] = values


def _forbid_bad_words(
    flat: Tensor, words: BadWords, rows: Tensor, num_prompt_tokens: Tensor, lengths: Tensor, tokens: Tensor
) -> None:
    """Forbid the last token of each bad word whose prefix was just generated. Prompt tokens are not matched."""
    row = rows[words.entries]  # [n]
    longest = words.prefixes.shape[1]
    back = torch.arange(-longest, 0, device=flat.device)
    positions = lengths[words.entries, None] + back  # [n, longest]
    is_output = positions >= num_prompt_tokens[row, None]
    recent = tokens[row[:, None], positions.clamp(min=0)]
    matches = (words.prefixes < 0) | ((recent == words.prefixes) & is_output)
    flat.index_add_(0, words.places, _forbid_where(matches.all(-1)))


def _penalise(
    logits: Tensor, entries: Tensor, rows: Tensor, state: SamplingRows, lengths: Tensor, tokens: Tensor
) -> None:
    """Apply the repetition penalty over the whole row, then frequency and presence penalties over its outputs.

    This works on the tokens seen instead of the whole vocabulary. A token seen twice computes the same value
    twice; positions past the row's end repeat its first token, which always exists.
    """
    row, length = rows[entries], lengths[entries, None]
    # A CPU can read the lengths without stalling, and skip the unused ends of the rows.
    width = int(length.max()) if logits.device.type == "cpu" else tokens.shape[1]
    positions = torch.arange(width, device=logits.device)
    seen = tokens[row, :width].long()  # [P, L]
    seen = torch.where(positions < length, seen, seen[:, :1])
    is_output = (positions >= state.num_prompt_tokens[row, None]) & (positions < length)

    chosen = logits[entries]  # [P, V]
    counts = torch.zeros_like(chosen).scatter_add_(1, seen, is_output.float()).gather(1, seen)
    values = chosen.gather(1, seen)
    repetition = state.repetition_penalty[row, None]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= state.frequency_penalty[row, None] * counts
    values -= state.presence_penalty[row, None] * (counts > 0)
    logits[entries] = chosen.scatter_(1, seen, values)
