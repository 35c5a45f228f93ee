"""Masks, biases and penalties, applied wherever logits are read.

Nothing is written back: log-probabilities are computed from the model's own logits. Each rule is looked up by token id,
and a row without rules only pays for one test of its flags.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.layout import (
    BIAS,
    BIAS_POINTER,
    COUNT,
    FORBID,
    FREQUENCY,
    MASK,
    NUM_BIAS,
    PENALTIES,
    PRESENCE,
    REPETITION,
    float_of,
    int_of,
    padded,
    pointer_of,
)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def adjusted(x, token_ids, flags, row, table, mask, forbidden, seen, vocab_size):
    """Return x, the logits of `token_ids` in any shape, with the row's rules applied.

    The caller must clamp ids past the vocabulary.
    """
    num_words = padded(vocab_size) // 32
    if flags & MASK:
        x = tl.where(_bit(mask, row, token_ids, num_words), x, -float("inf"))
    if flags & FORBID:
        x = tl.where(_bit(forbidden, row, token_ids, num_words), -float("inf"), x)
    if flags & BIAS:
        x += _bias(token_ids, row, table)
    if flags & PENALTIES:
        x = _penalised(x, token_ids, row, table, seen, vocab_size)
    return x


@triton.jit
def _bit(words, row, token_ids, num_words):
    word = tl.load(words + row.to(tl.int64) * num_words + (token_ids >> 5))
    return ((word >> (token_ids & 31)) & 1) != 0


@triton.jit
def _bias(token_ids, row, table):
    """Look up biases by binary search in the row's ids, which are sorted and followed by their values."""
    count = int_of(table, row, NUM_BIAS)
    ids = pointer_of(table, row, BIAS_POINTER)
    low = token_ids * 0
    high = low + count
    step = count
    while step > 0:  # as often as the longest search takes
        middle = (low + high) >> 1
        candidate = tl.load(ids + middle, mask=low < high, other=0)
        right = (candidate < token_ids) & (low < high)
        high = tl.where((low < high) & (candidate >= token_ids), middle, high)
        low = tl.where(right, middle + 1, low)
        step = step >> 1
    there = low < count
    is_it = there & (tl.load(ids + low, mask=there, other=-1) == token_ids)
    value = tl.load(ids + count + low, mask=is_it, other=0)
    return value.to(tl.float32, bitcast=True)


@triton.jit
def _penalised(x, token_ids, row, table, seen, vocab_size):
    """Apply the repetition penalty to all tokens of the row, then frequency and presence penalties to its outputs."""
    counts = tl.load(seen + row.to(tl.int64) * padded(vocab_size) + token_ids).to(tl.int32)
    count = (counts & COUNT).to(tl.float32)
    repetition = float_of(table, row, REPETITION)
    divided = x / repetition if _INTERPRETED else tl.div_rn(x, tl.broadcast_to(repetition, x.shape))
    x = tl.where(counts != 0, tl.where(x > 0, divided, x * repetition), x)
    x -= float_of(table, row, FREQUENCY) * count
    return x - tl.where(count > 0, float_of(table, row, PRESENCE), 0.0)
