"""The sampler in torch: from logits to tokens, and log-probabilities under the raw logits.

Log-probabilities are taken before any temperature, penalty or mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.events import PositionLogprobs
from inflight.execution.sampling.adjust import adjust
from inflight.execution.sampling.candidates import (
    RowParams,
    row_tiles,
    sample_dense,
    sample_nucleus,
    sample_top_k,
    top_candidates,
)
from inflight.execution.sampling.plan import SamplingPlan, make_plan
from inflight.execution.sampling.randomness import noise_key
from inflight.execution.sampling.rows import SamplingRows


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """P positions with a target each, then the N most likely tokens in order, ties by ascending id."""

    token_ids: Tensor  # [P, 1 + N] int64
    logprobs: Tensor  # [P, 1 + N] float32
    ranks: Tensor  # [P, 1 + N] int64: 1 + the number of tokens with a strictly greater logit
    counts: tuple[int, ...]  # how many of the N each position reports

    def fetch(self) -> LogprobTensors:
        """Start copying to host memory without waiting."""
        return LogprobTensors(fetch(self.token_ids), fetch(self.logprobs), fetch(self.ranks), self.counts)

    def to_host(self) -> list[PositionLogprobs]:
        """Pack each position as `events.pack_logprobs` does: the target first, then the most likely tokens."""
        columns = np.empty((len(self.counts), 3, self.token_ids.shape[1]), np.int32)
        columns[:, 0], columns[:, 2] = self.token_ids.numpy(), self.ranks.numpy()
        columns[:, 1] = self.logprobs.numpy().view(np.int32)
        return pack_columns(columns, self.counts)


def fetch(tensor: Tensor) -> Tensor:
    """Start copying to host memory without waiting. On a CPU, return the tensor itself."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


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


def pack_columns(columns: NDArray[np.int32], counts: Sequence[int]) -> list[PositionLogprobs]:
    """Pack positions that want `counts` of the most likely tokens beside the target.

    columns [P, 3, 1 + N]: ids, log-probabilities as bits and ranks, the target's first.
    """
    width = columns.shape[2]
    if min(counts, default=0) < width - 1:
        return [
            position[:, : 1 + count].astype("<i4").tobytes()
            for position, count in zip(columns, counts, strict=True)
        ]
    data, size = columns.astype("<i4", copy=False).tobytes(), 12 * width
    return [data[start : start + size] for start in range(0, len(data), size)]


# Why sampling an entry can fail: NaN or inf in the model's logits, or the row's parameters leave no token.
IS_NOT_FINITE, HAS_NO_TOKEN = 1, 2


@dataclass(frozen=True, slots=True)
class HostSample:
    """The samples of S entries, as plain Python."""

    token_ids: list[int]
    bad: list[int]
    logprobs: dict[int, PositionLogprobs]  # by entry, for those with logprobs


@dataclass(frozen=True, slots=True)
class SampledTensors:
    """The samples of S entries, still on the device."""

    token_ids: Tensor  # [S] int64
    # [S] uint8: 0, or why sampling failed. Such an entry still has some token, always the same one, so that the
    # step can continue and only this request fails.
    bad: Tensor
    logprobs: LogprobTensors | None
    logprob_entries: tuple[int, ...]  # the entry of each position in `logprobs`

    def fetch(self) -> SampledTensors:
        """Start copying to host memory without waiting; record an event after it, then call `to_host`."""
        logprobs = None if self.logprobs is None else self.logprobs.fetch()
        return SampledTensors(fetch(self.token_ids), fetch(self.bad), logprobs, self.logprob_entries)

    def to_host(self) -> HostSample:
        """Return the samples as Python objects; waits for the device if the tensors are still there."""
        positions = [] if self.logprobs is None else self.logprobs.to_host()
        logprobs = dict(zip(self.logprob_entries, positions, strict=True))
        return HostSample(self.token_ids.tolist(), self.bad.tolist(), logprobs)


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
