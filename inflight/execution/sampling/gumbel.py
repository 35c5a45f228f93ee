"""The random numbers of Gumbel-max sampling, in torch.

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
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inflight.execution.sampling.interface import signed_word

A = signed_word(0xEF46EB25)
B = signed_word(0xDA7ACF6D)
START_1 = signed_word(0x3C6EF35F)
START_2 = signed_word(0xA54FF53A)
STRIDE = signed_word(0x9E3779B1)


class NoiseKey(NamedTuple):
    """The two words that (seed, position) are hashed to: [R] int32 each."""

    first: Tensor
    second: Tensor

    def select(self, row: int) -> NoiseKey:
        return NoiseKey(self.first[row : row + 1], self.second[row : row + 1])


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
