"""Drawing a token: from the whole vocabulary, or from the few candidates that top_k and top_p leave.

A row must not know its neighbours, so no sum may depend on how many rows are summed beside it. Torch's
`sum`, `logsumexp` and, on a GPU, `cumsum` add a lone row in another order than a row among others. What is
added here is either left to `softmax`, which takes each row by itself, or fixed point: exact in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.execution.sampling.randomness import RaceKey, log_exponential
from inflight.execution.sampling.rows import CANDIDATE_WIDTHS

# About this many logits are worked on at a time: on a CPU so that the many passes stay in the cache, on a GPU so that
# the copies that sorting makes stay small beside the KV memory.
CPU_TILE = 1 << 19
GPU_TILE = 1 << 24
# A mass of 1 in fixed point: a vocabulary of 2^20 masses adds up to less than 2^63, and what rounds to no
# mass beside the most likely token lies 29 nats below it, where no noise (25 nats from end to end) can win.
MASS_ONE = 2.0**42


class DrawParams(NamedTuple):
    """The parameters of R rows that draw, [R, 1] each."""

    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    key: RaceKey

    def select(self, index: Tensor | slice) -> DrawParams:
        return DrawParams(
            self.temperature[index],
            self.log_min_p[index],
            self.top_k[index],
            self.top_p[index],
            RaceKey(self.key.first[index], self.key.second[index]),
        )


def row_tiles(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of logits [R, V] to work on together."""
    num_rows, vocab_size = logits.shape
    step = max(1, (CPU_TILE if logits.device.type == "cpu" else GPU_TILE) // vocab_size)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def draw_dense(logits: Tensor, params: DrawParams, min_p: bool) -> Tensor:
    """Token ids [R] drawn from all of logits [R, V], which are overwritten."""
    scores = logits.div_(params.temperature)
    if min_p:
        _apply_min_p(scores, params)
    token_ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    return scores.sub_(log_exponential(params.key, token_ids)).argmax(-1)


def draw_top_k(logits: Tensor, params: DrawParams, width: int) -> Tensor:
    """Token ids [R] drawn from the top_k of logits [R, V], cut by min_p and then by top_p of what is left."""
    values, token_ids = top_candidates(logits, width)
    scores = values.div_(params.temperature)
    keep = torch.arange(width, device=logits.device) < params.top_k
    keep &= scores >= scores[:, :1] + params.log_min_p
    mass = _fixed_point((scores - scores[:, :1]).double().exp_()).masked_fill_(~keep, 0)
    mass_until = mass.cumsum(-1)
    keep &= _in_nucleus(mass, mass_until, params.top_p * mass_until[:, -1:].double())
    return _race(scores, token_ids, keep, params.key, logits.shape[1])


def draw_nucleus(logits: Tensor, params: DrawParams, min_p: bool) -> Tensor:
    """Token ids [R] drawn from the smallest set of most likely tokens whose mass reaches top_p."""
    scores = logits / params.temperature
    if min_p:
        _apply_min_p(scores, params)
    probs = scores.softmax(-1)
    vocab_size = logits.shape[1]
    if logits.device.type != "cpu":  # a sort is cheaper than asking the device how many candidates suffice
        return _draw_nucleus(logits, scores, probs, params, vocab_size)[0]
    drawn = torch.empty(len(logits), dtype=torch.int64)
    left = torch.arange(len(logits))  # rows whose candidates so far did not reach top_p
    for width in (*(width for width in CANDIDATE_WIDTHS[1:] if width < vocab_size), vocab_size):
        drawn[left], enough = _draw_nucleus(
            logits[left], scores[left], probs[left], params.select(left), width
        )
        left = left[~enough]
        if not len(left):
            break
    return drawn


def top_candidates(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` greatest logits of each row and their ids, [R, width] each; of equals the lower id first.

    The sort key is the logit's bits, made monotonic as an int32, with the id below them: no two keys are
    equal, so what is kept depends neither on the width, nor on the algorithm, nor on the device.
    """
    vocab_size = logits.shape[1]
    order = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal
    order.bitwise_xor_((order >> 31).bitwise_and_(0x7FFFFFFF))
    below = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = order.long().bitwise_left_shift_(32).bitwise_or_(below)
    best = (keys.topk(width) if width < vocab_size else keys.sort(descending=True)).values
    token_ids = vocab_size - 1 - best.bitwise_and_(0xFFFFFFFF)
    return logits.gather(1, token_ids), token_ids


def _apply_min_p(scores: Tensor, params: DrawParams) -> Tensor:
    floor = scores.amax(-1, keepdim=True) + params.log_min_p
    return scores.masked_fill_(scores < floor, -torch.inf)


def _draw_nucleus(
    logits: Tensor, scores: Tensor, probs: Tensor, params: DrawParams, width: int
) -> tuple[Tensor, Tensor]:
    """The draws [R], and whether `width` candidates were enough to reach top_p [R]."""
    _, token_ids = top_candidates(logits, width)
    mass = _fixed_point(probs.gather(1, token_ids).double())
    mass_until = mass.cumsum(-1)
    goal = params.top_p.double() * MASS_ONE
    keep = _in_nucleus(mass, mass_until, goal)
    drawn = _race(scores.gather(1, token_ids), token_ids, keep, params.key, logits.shape[1])
    return drawn, (mass_until[:, -1:] >= goal)[:, 0]


def _fixed_point(mass: Tensor) -> Tensor:
    return mass.mul_(MASS_ONE).round_().long()


def _in_nucleus(mass: Tensor, mass_until: Tensor, goal: Tensor) -> Tensor:
    """A candidate stays while those before it have not reached the goal; the first always stays."""
    keep = mass_until - mass < goal
    keep[:, 0] = True
    return keep


def _race(scores: Tensor, token_ids: Tensor, keep: Tensor, key: RaceKey, vocab_size: int) -> Tensor:
    """The winner among the kept candidates; of equals the lower id, as a plain argmax has it."""
    scores = (scores - log_exponential(key, token_ids.int())).masked_fill_(~keep, -torch.inf)
    winners = scores == scores.amax(-1, keepdim=True)
    # With NaN logits nobody wins; the row is reported as bad, but its token must still be one.
    return token_ids.masked_fill(~winners, vocab_size - 1).amin(-1)
