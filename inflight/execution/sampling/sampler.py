"""The sampler in torch, row by row: the reference for every parameter, and the fallback without a compiler.

A row's token is a function of its logits, its parameters and its own tokens, to the last bit. The number of torch's
threads depends on the other rows, so no sum may depend on it: sums are left to `softmax`, which takes a row in one
thread, or are fixed point, which is exact in any order.

Log-probabilities are taken of the raw logits, before any temperature, penalty or mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.errors import EngineError
from inflight.events import PositionLogprobs
from inflight.execution.sampling.gumbel import NoiseKey, log_exponential, noise_key
from inflight.execution.sampling.interface import (
    HAS_NO_TOKEN,
    IS_NOT_FINITE,
    LogprobTensors,
    RowNumbers,
    Samples,
    first_mask,
    has_penalties,
    host_masks,
)
from inflight.request import RequestSpec

# Candidates that a row with top_p sorts, until their mass suffices. All of the vocabulary comes last.
CANDIDATE_WIDTHS = (1024, 8192)
# A mass of 1 in fixed point: 2^20 masses add up to less than 2^63, and a token whose mass rounds to 0 lies
# 29 nats below the most likely one, where no noise (which spans 25 nats) can make it win.
MASS_ONE = 2.0**42


@dataclass(slots=True)
class SamplingRow:
    """The parameters of one row. Ids outside the vocabulary are left out."""

    numbers: RowNumbers
    num_logprobs: int | None
    penalises: bool
    mask: Tensor | None  # [V] bool: the tokens that it may sample
    stop_ids: list[int]  # forbidden while the row is shorter than min_length
    biases: dict[int, float]
    bad_words: list[tuple[int, ...]]


class SamplingRows:
    """Permanent sampling parameters of `max_rows` rows."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.host_masks = host_masks(max_rows, vocab_size)
        self._rows: dict[int, SamplingRow] = {}

    def set(self, row: int, request: RequestSpec) -> None:
        """Assign `request` to `row`."""
        params, vocab_size = request.params, self.vocab_size
        bits = first_mask(params, vocab_size)
        words = [tuple(word) for word in request.bad_word_ids]
        self._rows[row] = SamplingRow(
            RowNumbers.from_request(request, vocab_size),
            None if params.logprobs is None else min(params.logprobs, vocab_size),
            has_penalties(params),
            self._unpacked(bits) if len(bits) else None,
            self._known(request.stop_ids) if params.min_tokens > 0 else [],
            {i: bias for i, bias in (params.logit_bias or {}).items() if i < vocab_size},
            [word for word in words if word and len(self._known(word)) == len(word)],
        )

    def set_masks(self, rows: Sequence[int]) -> None:
        """Let these rows sample next what their masks in `host_masks` allow."""
        for row in rows:
            self[row].mask = self._unpacked(self.host_masks[row])

    def lift_masks(self, rows: Sequence[int]) -> None:
        """Let these constrained rows sample any token, until `set_masks`."""
        for row in rows:
            self[row].mask = None

    def __getitem__(self, row: int) -> SamplingRow:
        if row not in self._rows:
            raise EngineError(f"row {row} cannot sample: it holds no request (call set() first)")
        return self._rows[row]

    def _known(self, ids: Iterable[int]) -> list[int]:
        return [i for i in ids if 0 <= i < self.vocab_size]

    def _unpacked(self, bits: NDArray[np.int32]) -> Tensor:
        chosen = np.unpackbits(bits.view(np.uint8), count=self.vocab_size, bitorder="little")
        return torch.from_numpy(chosen).bool()


class Sampler:
    """Samples one token for each row of a step."""

    def __init__(self, state: SamplingRows) -> None:
        self.state = state

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Sequence[int], lengths: Tensor, tokens: Tensor) -> Samples:
        """Choose token number lengths[i] of row rows[i] from logits[i].

        logits [S, V] float32, contiguous, are overwritten. lengths [S] int32 or int64 count the tokens of
        each row before the new one. tokens [max_rows, max_len] int32 hold them.
        """
        parameters = [self.state[row] for row in rows]
        counts = {i: row.num_logprobs for i, row in enumerate(parameters) if row.num_logprobs is not None}
        raw = logits[list(counts)]
        noise = _noise(parameters, lengths)
        sampled = [
            _sample_row(x, parameters[i], tokens[rows[i]], length, noise and noise.select(i))
            for i, (x, length) in enumerate(zip(logits, lengths.tolist(), strict=True))
        ]
        token_ids = [token_id for token_id, _ in sampled]
        targets = torch.tensor([token_ids[i] for i in counts], dtype=torch.int64)
        positions = score(raw, targets, tuple(counts.values())) if counts else []
        return Samples(token_ids, [bad for _, bad in sampled], dict(zip(counts, positions, strict=True)))

    def score_prompt(self, logits: Tensor, target_ids: Tensor, num: int) -> list[PositionLogprobs]:
        """Score the prompt tokens target_ids [P] int64 and the top `num` under logits [P, V] that predict them."""
        return score(logits, target_ids, (min(num, logits.shape[1]),) * len(logits))


def _noise(rows: Sequence[SamplingRow], lengths: Tensor) -> NoiseKey | None:
    """Return the words of all rows' random numbers, [S] each; None if no row needs any."""
    if all(row.numbers.argmax for row in rows):
        return None
    seeds = torch.tensor([(row.numbers.seed_low, row.numbers.seed_high) for row in rows], dtype=torch.int32)
    return noise_key(seeds[:, 0], seeds[:, 1], lengths.int())


def _sample_row(
    logits: Tensor, row: SamplingRow, tokens: Tensor, length: int, noise: NoiseKey | None
) -> tuple[int, int]:
    """Return token number `length` of a row and 0, or some token and why sampling failed. Overwrites logits [V]."""
    if not math.isfinite(logits.max()):
        return 0, IS_NOT_FINITE
    _adjust(logits, row, tokens[:length].long(), length)
    if not math.isfinite(logits.max()):
        return 0, HAS_NO_TOKEN
    numbers = row.numbers
    if numbers.argmax:
        return int(logits.argmax()), 0
    token_ids, candidates = torch.arange(len(logits), dtype=torch.int32), logits
    if numbers.top_k:
        token_ids = best_ids(logits, numbers.top_k)
        candidates = logits[token_ids]
    scores = candidates / numbers.temperature
    if numbers.log_min_p > -math.inf:
        scores.masked_fill_(scores < scores.max() + numbers.log_min_p, -torch.inf)
    if numbers.top_p < 1:
        nucleus = _nucleus(candidates, scores.double().softmax(0), numbers.top_p)
        token_ids, scores = token_ids[nucleus], scores[nucleus]
    assert noise is not None
    scores -= log_exponential(noise, token_ids.int())[0]
    return int(token_ids[scores == scores.max()].min()), 0  # ties go to the lower id


def _adjust(logits: Tensor, row: SamplingRow, history: Tensor, length: int) -> None:
    """Apply the row's mask, bad words, minimum length, biases and penalties, in this order."""
    numbers = row.numbers
    outputs = history[numbers.num_prompt_tokens :]
    if row.mask is not None:
        logits.masked_fill_(~row.mask, -torch.inf)
    for *prefix, last_id in row.bad_words:
        if len(prefix) <= len(outputs) and outputs[len(outputs) - len(prefix) :].tolist() == prefix:
            logits[last_id] = -torch.inf
    if length < numbers.min_length:
        logits[row.stop_ids] = -torch.inf
    for token_id, bias in row.biases.items():
        logits[token_id] += bias
    if row.penalises:
        seen = history.bincount(minlength=len(logits)).nonzero()[:, 0]
        counts = outputs.bincount(minlength=len(logits))[seen]
        values = logits[seen]
        values = torch.where(
            values > 0, values / numbers.repetition_penalty, values * numbers.repetition_penalty
        )
        values -= numbers.frequency_penalty * counts
        values -= numbers.presence_penalty * (counts > 0)
        logits[seen] = values


def best_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` greatest of logits [V], in order; ties by ascending id."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    token_ids = torch.arange(len(logits))
    if count < len(logits):  # sort only values that reach the last one, and NaN
        token_ids = token_ids[~(logits < logits.topk(count).values[-1])]
    order = logits[token_ids].sort(descending=True, stable=True).indices
    return token_ids[order[:count]]


def _nucleus(logits: Tensor, probs: Tensor, top_p: float) -> Tensor:
    """Return the indices of the fewest most likely tokens whose mass reaches top_p; the first always stays."""
    size, goal = len(logits), top_p * MASS_ONE
    for width in (*(width for width in CANDIDATE_WIDTHS if width < size), size):
        indices = best_ids(logits, width)
        mass = probs[indices].mul_(MASS_ONE).round_().long()
        mass_until = mass.cumsum(0)
        if mass_until[-1] >= goal:
            break
    keep = mass_until - mass < goal
    keep[0] = True
    return indices[keep]


def score(logits: Tensor, target_ids: Tensor, counts: tuple[int, ...]) -> list[PositionLogprobs]:
    """Score targets [P] int64 and the most likely tokens of raw logits [P, V]; `counts` may not exceed V."""
    num = max(counts, default=0)
    token_ids = torch.empty(len(logits), 1 + num, dtype=torch.int64)
    logprobs, ranks = torch.empty(token_ids.shape), torch.empty_like(token_ids)
    for i, (x, target) in enumerate(zip(logits, target_ids, strict=True)):
        best = best_ids(x, num)
        token_ids[i] = torch.cat([target[None], best])
        ranks[i, 0] = 1 + (x > x[target]).sum()
        # Any token greater than one of the best is itself one of the best.
        ranks[i, 1:] = 1 + (x[best][None, :] > x[best][:, None]).sum(1)
        logprobs[i] = x.log_softmax(0)[token_ids[i]]
    return LogprobTensors(token_ids, logprobs, ranks, counts).pack()
