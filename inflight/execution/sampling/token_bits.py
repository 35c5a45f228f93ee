"""Sets of tokens as bits: one per token of the vocabulary, the lowest of a 32-bit word first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inflight.sampling_params import SamplingParams

WORD = 32


def token_bits(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """[vocab_size / 32, rounded up]. Ids outside the vocabulary are left out."""
    chosen = np.zeros(-(-vocab_size // WORD) * WORD, dtype=bool)
    ids = np.array(token_ids, dtype=np.int64)
    chosen[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)


def first_mask(params: SamplingParams, vocab_size: int) -> NDArray[np.int32]:
    """The tokens that a row may have, before its constraint has its say; empty where it may have all."""
    if params.allowed_token_ids is not None:
        return token_bits(params.allowed_token_ids, vocab_size)
    is_masked = params.structured_outputs is not None
    return np.full(-(-vocab_size // WORD) if is_masked else 0, -1, dtype=np.int32)
