"""Gumbel-max sampling in torch: keyed random numbers, and the choice among all tokens or a few candidates.

Random numbers are a function of (seed, position, token id): no stream, no state, no neighbours. All words are unsigned
32-bit, `+` and `*` wrap, `>>>` shifts zeros in:

    mix(x)                   x ^= x >>> 16;  x *= A;  x ^= x >>> 15;  x *= B;  x ^= x >>> 16
    word(start)              mix(mix(mix(seed_low + start) + seed_high) + position)
    first, second            word(START_1), word(START_2)                       once a row
    bits(token_id)           x = token_id * STRIDE + first
                             x ^= x >>> 16;  x *= A;  x ^= second
                             x ^= x >>> 15;  x *= B;  x ^= x >>> 16             once a candidate
    uniform(token_id)        min(float32(bits >>> 1) * 2^-31 + 2^-32, 1 - 2^-24)

A and B were chosen by measuring avalanche: flipping any input bit flips every output bit of `mix` half of
the time, within what 65,536 samples can tell. Torch has hardly any unsigned arithmetic, so the words
live in int32, whose products wrap to the same bits; a kernel may use uint32. `uniform` keeps 31 bits
where it is small, which is where the winner over a large vocabulary is found, and lies strictly inside
(0, 1). The product with 2^-31 is exact, so a fused multiply-add rounds to the same number.

Tokens are sampled by Gumbel-max: -log(1 - uniform) is exponentially distributed, the token with the smallest
exponential / probability wins with exactly its probability, and that is argmax(logit - log(exponential)),
where -log(exponential) is Gumbel noise. The noise of a token depends on its id and not on the other
candidates, so forbidding a token that would have lost changes nothing.

Results must not depend on neighbouring rows, so no sum may depend on how many rows are summed beside it. Torch's
`sum`, `logsumexp` and, on a GPU, `cumsum` add a lone row in a different order than a row among others. Sums here
are either left to `softmax`, which treats each row by itself, or are fixed point: exact in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.execution.sampling.interface import signed_word
from inflight.execution.sampling.rows import CANDIDATE_WIDTHS

A = signed_word(0xEF46EB25)
B = signed_word(0xDA7ACF6D)
START_1 = signed_word(0x3C6EF35F)
START_2 = signed_word(0xA54FF53A)
STRIDE = signed_word(0x9E3779B1)


class NoiseKey(NamedTuple):
    """The two words that (seed, position) are hashed to: [R] int32 each."""

    first: Tensor
    second: Tensor


def noise_key(seed_low: Tensor, seed_high: Tensor, positions: Tensor) -> NoiseKey:
    """Return the keys of rows with these seeds that sample the token at these positions: [R] int32 each."""
    first, second = (
        _mix(_mix(_mix(seed_low + start).add_(seed_high)).add_(positions)) for start in (START_1, START_2)
    )
    return NoiseKey(first, second)


def noise_bits(key: NoiseKey, token_ids: Tensor) -> Tensor:
    """Return [R, n] int32 for int32 ids, which are [n] for all rows or [R, n]."""
    x = token_ids * STRIDE + key.first[:, None]
    spare = torch.empty_like(x)
    _fold(x, 16, spare).mul_(A).bitwise_xor_(key.second[:, None])
    _fold(x, 15, spare).mul_(B)
    return _fold(x, 16, spare)


def uniform(bits: Tensor) -> Tensor:
    """Return float32 strictly inside (0, 1). Overwrites `bits`."""
    bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    return bits.float().mul_(2.0**-31).add_(2.0**-32).clamp_(max=1 - 2.0**-24)


def log_exponential(key: NoiseKey, token_ids: Tensor) -> Tensor:
    """Return the negated Gumbel noise of each candidate, [R, n] float32: the log of an exponential variate."""
    return uniform(noise_bits(key, token_ids)).neg_().log1p_().neg_().log_()


def _fold(x: Tensor, shift: int, spare: Tensor) -> Tensor:
    """Compute x ^= x >>> shift. An int32 shift copies the sign bit; the mask removes the copies."""
    torch.bitwise_right_shift(x, shift, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))


def _mix(x: Tensor) -> Tensor:
    spare = torch.empty_like(x)
    _fold(x, 16, spare).mul_(A)
    _fold(x, 15, spare).mul_(B)
    return _fold(x, 16, spare)


# Logits per tile: on a CPU small enough for the many passes to stay in the cache, on a GPU small enough that the copies
# made by sorting stay small beside the KV memory.
CPU_TILE = 1 << 19
GPU_TILE = 1 << 24
# A mass of 1 in fixed point: 2^20 masses add up to less than 2^63, and a token whose mass rounds to 0 lies
# 29 nats below the most likely one, where no noise (which spans 25 nats) can make it win.
MASS_ONE = 2.0**42


class RowParams(NamedTuple):
    """The parameters of R rows that sample, [R, 1] each."""

    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    key: NoiseKey

    def select(self, index: Tensor | slice) -> RowParams:
        return RowParams(
            self.temperature[index],
            self.log_min_p[index],
            self.top_k[index],
            self.top_p[index],
            NoiseKey(self.key.first[index], self.key.second[index]),
        )


def row_tiles(logits: Tensor) -> Iterator[slice]:
    """Return slices of the rows of logits [R, V] to work on together."""
    num_rows, vocab_size = logits.shape
    step = max(1, (CPU_TILE if logits.device.type == "cpu" else GPU_TILE) // vocab_size)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def sample_dense(logits: Tensor, params: RowParams, min_p: bool) -> Tensor:
    """Sample token ids [R] from all of logits [R, V], which are overwritten."""
    scores = logits.div_(params.temperature)
    if min_p:
        _apply_min_p(scores, params)
    token_ids = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    return scores.sub_(log_exponential(params.key, token_ids)).argmax(-1)


def sample_top_k(logits: Tensor, params: RowParams, width: int) -> Tensor:
    """Sample token ids [R] from the top_k of logits [R, V], cut by min_p and then by top_p of the rest."""
    values, token_ids = top_candidates(logits, width)
    scores = values.div_(params.temperature)
    keep = torch.arange(width, device=logits.device) < params.top_k
    keep &= scores >= scores[:, :1] + params.log_min_p
    mass = _fixed_point((scores - scores[:, :1]).double().exp_()).masked_fill_(~keep, 0)
    mass_until = mass.cumsum(-1)
    keep &= _in_nucleus(mass, mass_until, params.top_p * mass_until[:, -1:].double())
    return _gumbel_max(scores, token_ids, keep, params.key, logits.shape[1])


def sample_nucleus(logits: Tensor, params: RowParams, min_p: bool) -> Tensor:
    """Sample token ids [R] from the smallest set of most likely tokens whose mass reaches top_p."""
    scores = logits / params.temperature
    if min_p:
        _apply_min_p(scores, params)
    probs = scores.softmax(-1)
    vocab_size = logits.shape[1]
    if logits.device.type != "cpu":  # a sort is cheaper than asking the device how many candidates suffice
        return _sample_nucleus(logits, scores, probs, params, vocab_size)[0]
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    left = torch.arange(len(logits))  # rows whose candidates have not reached top_p yet
    for width in (*(width for width in CANDIDATE_WIDTHS[1:] if width < vocab_size), vocab_size):
        token_ids[left], enough = _sample_nucleus(
            logits[left], scores[left], probs[left], params.select(left), width
        )
        left = left[~enough]
        if not len(left):
            break
    return token_ids


def top_candidates(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` greatest logits of each row and their ids, [R, width] each; ties by ascending id.

    The sort key is the logit's bits, made monotonic as an int32, with the id below them: no two keys are
    equal, so the result does not depend on the width, the algorithm or the device.
    """
    vocab_size = logits.shape[1]
    order = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal
    order.bitwise_xor_((order >> 31).bitwise_and_(0x7FFFFFFF))
    below = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    keys = order.long().bitwise_left_shift_(32).bitwise_or_(below)
    best = (keys.topk(width) if width < vocab_size else keys.sort(descending=True)).values
    token_ids = vocab_size - 1 - best.bitwise_and_(0xFFFFFFFF)
    return logits.gather(1, token_ids), token_ids


def _apply_min_p(scores: Tensor, params: RowParams) -> Tensor:
    floor = scores.amax(-1, keepdim=True) + params.log_min_p
    return scores.masked_fill_(scores < floor, -torch.inf)


def _sample_nucleus(
    logits: Tensor, scores: Tensor, probs: Tensor, params: RowParams, width: int
) -> tuple[Tensor, Tensor]:
    """Return the sampled ids [R], and whether `width` candidates were enough to reach top_p [R]."""
    _, token_ids = top_candidates(logits, width)
    mass = _fixed_point(probs.gather(1, token_ids).double())
    mass_until = mass.cumsum(-1)
    goal = params.top_p.double() * MASS_ONE
    keep = _in_nucleus(mass, mass_until, goal)
    sampled = _gumbel_max(scores.gather(1, token_ids), token_ids, keep, params.key, logits.shape[1])
    return sampled, (mass_until[:, -1:] >= goal)[:, 0]


def _fixed_point(mass: Tensor) -> Tensor:
    return mass.mul_(MASS_ONE).round_().long()


def _in_nucleus(mass: Tensor, mass_until: Tensor, goal: Tensor) -> Tensor:
    """Keep candidates until those before them reach the goal; the first always stays."""
    keep = mass_until - mass < goal
    keep[:, 0] = True
    return keep


def _gumbel_max(scores: Tensor, token_ids: Tensor, keep: Tensor, key: NoiseKey, vocab_size: int) -> Tensor:
    """Return the winner among the kept candidates; ties go to the lower id, as with argmax."""
    scores = (scores - log_exponential(key, token_ids.int())).masked_fill_(~keep, -torch.inf)
    winners = scores == scores.amax(-1, keepdim=True)
    # With NaN logits nothing wins: the row is reported as bad, but its token must still be a valid id.
    return token_ids.masked_fill(~winners, vocab_size - 1).amin(-1)
