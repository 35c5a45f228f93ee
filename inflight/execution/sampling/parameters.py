"""A request's sampling parameters in the form that every sampler reads: numbers, and sets of tokens as bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inflight.execution.sampling.randomness import seed_words
from inflight.request import RequestSpec
from inflight.sampling_params import SamplingParams

# Below this a temperature is greedy: float32 logits divided by less would overflow.
MIN_TEMPERATURE = 1e-5
# Above this every token is equally likely. Where it overflowed, a forbidden token's -inf would become NaN.
MAX_TEMPERATURE = 1e30
# The smallest normal float32: a penalty that underflowed to 0 would divide 0 by 0.
MIN_REPETITION_PENALTY = 2.0**-126


class RowNumbers(NamedTuple):
    """A row's parameters: floats, then 32-bit integers."""

    temperature: float
    log_min_p: float  # -inf without min_p
    top_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed_low: int
    seed_high: int
    top_k: int  # 0: all
    num_prompt_tokens: int
    min_length: int  # length that the row must reach before a stop id is allowed
    argmax: bool  # take the most likely token, ties go to the lower id: nothing is random

    @classmethod
    def of(cls, request: RequestSpec, vocab_size: int) -> RowNumbers:
        params = request.params
        greedy = is_greedy(params)
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        return cls(
            1.0 if greedy else min(params.temperature, MAX_TEMPERATURE),
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            params.top_p,
            max(params.repetition_penalty, MIN_REPETITION_PENALTY),
            params.frequency_penalty,
            params.presence_penalty,
            *seed_words(request.seed),
            top_k,
            request.num_prompt_tokens,
            request.num_prompt_tokens + min(params.min_tokens, request.max_tokens),
            greedy or top_k == 1,
        )


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < MIN_TEMPERATURE


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


WORD = 32


def token_bits(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Return a set of tokens as bits: one per token, lowest bit first, [vocab_size / 32, rounded up] int32.

    Ids outside the vocabulary are ignored.
    """
    chosen = np.zeros(-(-vocab_size // WORD) * WORD, dtype=bool)
    ids = np.array(token_ids, dtype=np.int64)
    chosen[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)


def first_mask(params: SamplingParams, vocab_size: int) -> NDArray[np.int32]:
    """Return the tokens that a row may sample, apart from its constraint; empty if all are allowed."""
    if params.allowed_token_ids is not None:
        return token_bits(params.allowed_token_ids, vocab_size)
    is_masked = params.structured_outputs is not None
    return np.full(-(-vocab_size // WORD) if is_masked else 0, -1, dtype=np.int32)
