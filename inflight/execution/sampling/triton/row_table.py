"""The table of row parameters that the kernels read, and the rules in it that change logits.

Nothing is written back: log-probabilities are computed from the model's own logits. Each rule is looked up by token id
wherever logits are read, and a row without rules only pays for one test of its flags.

Some rules forbid tokens depending on the latest outputs: the last tokens of bad words in progress, and stop ids before
min_tokens. They are one int32 list in device memory, stored by column:

    last [n]      the token that a rule forbids
    length [n]    the number of latest outputs that must match the prefix; -1: forbidden until min_length
    offset [n]    the start of the prefix in the array below
    prefixes      all prefixes, concatenated

The active rules change with every token, so the step that samples one brings the row's bits up to date with it.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Columns, in words. Floats first.
TEMPERATURE = tl.constexpr(0)
LOG_MIN_P = tl.constexpr(1)
TOP_P = tl.constexpr(2)
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
SEED_LOW = tl.constexpr(6)
SEED_HIGH = tl.constexpr(7)
TOP_K = tl.constexpr(8)
ARGMAX = tl.constexpr(9)  # take the most likely token; ties go to the lower id
FLAGS = tl.constexpr(10)
NUM_PROMPT = tl.constexpr(11)
MIN_LENGTH = tl.constexpr(12)  # length that the row must reach before a stop id is allowed
NUM_LOGPROBS = tl.constexpr(13)
NUM_BIAS = tl.constexpr(14)
NUM_RULES = tl.constexpr(15)
# Columns of 64 bits, counted in those: addresses of lists in device memory.
BIAS_POINTER = tl.constexpr(8)  # ids, ascending, then their values
RULES_POINTER = tl.constexpr(9)  # the rules described above
WORDS = tl.constexpr(20)

ROW = struct.Struct("=6f10i2q")
assert ROW.size == 4 * WORDS.value

# Features that a row uses beside plain sampling.
PENALTIES = tl.constexpr(1)
MASK = tl.constexpr(2)
FORBID = tl.constexpr(4)
BIAS = tl.constexpr(8)
LOGPROBS = tl.constexpr(16)
ADJUSTS = tl.constexpr(15)  # any flag that changes logits
SPECIAL = tl.constexpr(31)  # any flag
STATEFUL = tl.constexpr(5)  # any flag with state that changes with every token

# 16 bits per token of a row: how often it occurs in the outputs; the highest bit is set if it occurs in the prompt.
COUNT = tl.constexpr(0x7FFF)


@triton.jit
def float_of(table, row, COLUMN: tl.constexpr):
    return tl.load(table + row * WORDS + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def int_of(table, row, COLUMN: tl.constexpr):
    return tl.load(table + row * WORDS + COLUMN)


@triton.jit
def pointer_of(table, row, COLUMN: tl.constexpr):
    """Return a pointer to int32 values."""
    address = tl.load(table.to(tl.pointer_type(tl.int64)) + row * (WORDS // 2) + COLUMN)
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def padded(vocab_size):
    """Return the vocabulary size rounded up to whole 32-bit words of mask bits."""
    return (vocab_size + 31) // 32 * 32


@triton.jit
def adjusted(x, token_ids, flags, row, table, mask_row, mask, forbidden, seen, vocab_size):
    """Return x, the logits of `token_ids` in any shape, with the row's rules applied.

    The caller must clamp ids past the vocabulary.
    """
    num_words = padded(vocab_size) // 32
    if flags & MASK:
        x = tl.where(_bit(mask, mask_row, token_ids, num_words), x, -float("inf"))
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


RULES = tl.constexpr(256)  # rules per iteration


@triton.jit
def update_forbidden(row, length, table, tokens, forbidden, vocab_size):
    """Update the bits of a row whose `length` tokens are at `tokens`. All threads of one program take part."""
    count = int_of(table, row, NUM_RULES)
    rules = pointer_of(table, row, RULES_POINTER)
    bits = forbidden + row.to(tl.int64) * (padded(vocab_size) // 32)
    num_prompt, min_length = int_of(table, row, NUM_PROMPT), int_of(table, row, MIN_LENGTH)
    tl.debug_barrier()
    for start in range(0, count, RULES):
        i = start + tl.arange(0, RULES)
        token_id = tl.load(rules + i, mask=i < count, other=0)
        tl.atomic_and(bits + (token_id >> 5), ~(1 << (token_id & 31)), mask=i < count)
    tl.debug_barrier()
    for start in range(0, count, RULES):
        i = start + tl.arange(0, RULES)
        exists = i < count
        token_id = tl.load(rules + i, mask=exists, other=0)
        size = tl.load(rules + count + i, mask=exists, other=0)
        prefix = rules + 3 * count + tl.load(rules + 2 * count + i, mask=exists, other=0)
        begin = length - size
        matches = exists & tl.where(size < 0, size * 0 + length < min_length, begin >= num_prompt)
        for j in range(0, tl.max(size, 0)):
            compared = matches & (j < size)
            expected = tl.load(prefix + j, mask=compared, other=0)
            actual = tl.load(tokens + begin + j, mask=compared, other=0)
            matches = matches & (expected == actual)
        tl.atomic_or(bits + (token_id >> 5), 1 << (token_id & 31), mask=matches)


@triton.jit(do_not_specialize_on_alignment=["rows", "lengths"])
def start_rows_kernel(
    rows,  # [n] int32: rows that got a request with penalties or rules
    lengths,  # [n] int32: the number of its tokens
    table,
    tokens,  # [max_rows, max_len] int32, rows tokens_stride apart
    forbidden,  # [max_rows, words] int32
    seen,  # [max_rows, padded(vocab_size)] int16, as pairs
    vocab_size,
    tokens_stride,
    SIZE: tl.constexpr,
):
    """Initialize the per-row state that later steps update incrementally."""
    row = tl.load(rows + tl.program_id(0))
    length = tl.load(lengths + tl.program_id(0))
    flags = int_of(table, row, FLAGS)
    row_tokens = tokens + row.to(tl.int64) * tokens_stride
    n = tl.arange(0, SIZE)
    if flags & FORBID:
        num_words = padded(vocab_size) // 32
        for start in range(0, num_words, SIZE):
            tl.store(forbidden + row.to(tl.int64) * num_words + start + n, 0, mask=start + n < num_words)
        update_forbidden(row, length, table, row_tokens, forbidden, vocab_size)
    if flags & PENALTIES:
        num_pairs = padded(vocab_size) // 2
        pairs = seen.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * num_pairs
        for start in range(0, num_pairs, SIZE):
            tl.store(pairs + start + n, 0, mask=start + n < num_pairs)
        tl.debug_barrier()
        num_prompt = int_of(table, row, NUM_PROMPT)
        for start in range(0, length, SIZE):
            position = start + n
            token_id = tl.load(row_tokens + position, mask=position < length, other=0)
            shift = (token_id & 1) * 16
            tl.atomic_or(pairs + (token_id >> 1), 0x8000 << shift, mask=position < num_prompt)
            # Counts have 15 bits: of longer outputs, only the latest tokens are counted.
            counted = (position >= num_prompt) & (position < length) & (position >= length - 0x7FFF)
            tl.atomic_add(pairs + (token_id >> 1), 1 << shift, mask=counted)
