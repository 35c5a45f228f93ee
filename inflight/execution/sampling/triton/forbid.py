"""Tokens that a row may not sample next: the last tokens of bad words in progress, and stop ids before min_tokens.

A row's rules are one int32 list in device memory, stored by column:

    last [n]      the token that a rule forbids
    length [n]    the number of latest outputs that must match the prefix; -1: forbidden until min_length
    offset [n]    the start of the prefix in the array below
    prefixes      all prefixes, concatenated

The active rules change with every token, so the step that batch one brings the row's bits up to date with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.layout import (
    FLAGS,
    FORBID,
    MIN_LENGTH,
    NUM_PROMPT,
    NUM_RULES,
    PENALTIES,
    RULES_POINTER,
    int_of,
    padded,
    pointer_of,
)

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
        last = tl.load(rules + i, mask=i < count, other=0)
        tl.atomic_and(bits + (last >> 5), ~(1 << (last & 31)), mask=i < count)
    tl.debug_barrier()
    for start in range(0, count, RULES):
        i = start + tl.arange(0, RULES)
        exists = i < count
        last = tl.load(rules + i, mask=exists, other=0)
        size = tl.load(rules + count + i, mask=exists, other=0)
        prefix = rules + 3 * count + tl.load(rules + 2 * count + i, mask=exists, other=0)
        begin = length - size
        holds = exists & tl.where(size < 0, size * 0 + length < min_length, begin >= num_prompt)
        for j in range(0, tl.max(size, 0)):
            compared = holds & (j < size)
            expected = tl.load(prefix + j, mask=compared, other=0)
            actual = tl.load(tokens + begin + j, mask=compared, other=0)
            holds = holds & (expected == actual)
        tl.atomic_or(bits + (last >> 5), 1 << (last & 31), mask=holds)


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
    at = tokens + row.to(tl.int64) * tokens_stride
    n = tl.arange(0, SIZE)
    if flags & FORBID:
        num_words = padded(vocab_size) // 32
        for start in range(0, num_words, SIZE):
            tl.store(forbidden + row.to(tl.int64) * num_words + start + n, 0, mask=start + n < num_words)
        update_forbidden(row, length, table, at, forbidden, vocab_size)
    if flags & PENALTIES:
        num_pairs = padded(vocab_size) // 2
        pairs = seen.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * num_pairs
        for start in range(0, num_pairs, SIZE):
            tl.store(pairs + start + n, 0, mask=start + n < num_pairs)
        tl.debug_barrier()
        num_prompt = int_of(table, row, NUM_PROMPT)
        for start in range(0, length, SIZE):
            position = start + n
            token_id = tl.load(at + position, mask=position < length, other=0)
            shift = (token_id & 1) * 16
            tl.atomic_or(pairs + (token_id >> 1), 0x8000 << shift, mask=position < num_prompt)
            # Counts have 15 bits: of longer outputs, only the latest tokens are counted.
            counted = (position >= num_prompt) & (position < length) & (position >= length - 0x7FFF)
            tl.atomic_add(pairs + (token_id >> 1), 1 << shift, mask=counted)
