"""What a request asks of the sampler, as the numbers that every sampler reads."""

from __future__ import annotations

import math
from typing import NamedTuple

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
    """Floats, then 32-bit integers."""

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
    min_length: int  # tokens of the row before which no stop id may come
    argmax: bool  # the most likely token, of equals the lower id: no draw

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
