"""The table of row parameters that the kernels read, in 32-bit words, and the meaning of its flags."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

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
RULES_POINTER = tl.constexpr(9)  # see `forbid.py`
WORDS = tl.constexpr(20)

ROW = struct.Struct("=6f10i2q")
assert ROW.size == 4 * WORDS.value

# What a row needs beside plain sampling.
PENALTIES = tl.constexpr(1)
MASK = tl.constexpr(2)
FORBID = tl.constexpr(4)
BIAS = tl.constexpr(8)
LOGPROBS = tl.constexpr(16)
ADJUSTS = tl.constexpr(15)  # any flag that changes logits
SPECIAL = tl.constexpr(31)  # any flag

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
