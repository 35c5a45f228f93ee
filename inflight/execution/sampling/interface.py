"""Parts that all samplers share: a row's parameters as numbers and bits, and the tokens and logprobs they return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inflight.events import PositionLogprobs
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
    def from_request(cls, request: RequestSpec, vocab_size: int) -> RowNumbers:
        params = request.params
        greedy = params.temperature < MIN_TEMPERATURE
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


def host_masks(max_rows: int, vocab_size: int) -> NDArray[np.int32]:
    """Return memory for the masks of constrained rows, [max_rows, words]. Unwritten pages take no space."""
    return np.empty((max_rows, -(-vocab_size // WORD)), dtype=np.int32)


def signed_word(word: int) -> int:
    """Return the int32 with the bits of an unsigned word."""
    return word - (1 << 32) if word >> 31 else word


def seed_words(seed: int) -> tuple[int, int]:
    """Return the low and the high word of a seed in [-2^63, 2^64), as int32."""
    return signed_word(seed & 0xFFFFFFFF), signed_word(seed >> 32 & 0xFFFFFFFF)


# ---- results ----


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """P positions with a target each, then the N most likely tokens in order, ties by ascending id."""

    token_ids: Tensor  # [P, 1 + N] int64
    logprobs: Tensor  # [P, 1 + N] float32
    ranks: Tensor  # [P, 1 + N] int64: 1 + the number of tokens with a strictly greater logit
    counts: tuple[int, ...]  # how many of the N each position reports

    def pack(self) -> list[PositionLogprobs]:
        """Pack each position as `events.pack_logprobs` does: the target first, then the most likely tokens."""
        columns = np.empty((len(self.counts), 3, self.token_ids.shape[1]), np.int32)
        columns[:, 0], columns[:, 2] = self.token_ids.numpy(), self.ranks.numpy()
        columns[:, 1] = self.logprobs.numpy().view(np.int32)
        return pack_columns(columns, self.counts)


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
class Samples:
    """The samples of S entries."""

    token_ids: list[int]
    # 0, or why sampling failed. Such an entry still has some token, always the same one, so that the step can continue
    # and only this request fails.
    bad: list[int]
    logprobs: dict[int, PositionLogprobs]  # by entry, for those with logprobs
