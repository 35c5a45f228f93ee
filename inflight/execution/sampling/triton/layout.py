"""Where a row's parameters are in the table that kernels read, 32-bit words, and what its flags mean."""

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
ARGMAX = tl.constexpr(9)  # the most likely token, of equals the lower id
FLAGS = tl.constexpr(10)
NUM_PROMPT = tl.constexpr(11)
MIN_LENGTH = tl.constexpr(12)  # tokens of the row before which no stop id may come
NUM_LOGPROBS = tl.constexpr(13)
NUM_BIAS = tl.constexpr(14)
NUM_RULES = tl.constexpr(15)
# Columns of 64 bits, counted in those: addresses of lists in device memory.
BIAS_POINTER = tl.constexpr(8)  # ids, ascending, then their values
RULES_POINTER = tl.constexpr(9)  # see `forbid.py`
WORDS = tl.constexpr(20)

ROW = struct.Struct("=6f10i2q")
assert ROW.size == 4 * WORDS.value

# What a row asks for beside a draw.
PENALTIES = tl.constexpr(1)
MASK = tl.constexpr(2)
FORBID = tl.constexpr(4)
BIAS = tl.constexpr(8)
LOGPROBS = tl.constexpr(16)
ADJUSTS = tl.constexpr(15)  # any that changes logits
SPECIAL = tl.constexpr(31)  # anything at all

# What is known of a token in a row, 16 bits: how often it is among the outputs. The highest bit: it is in the prompt.
COUNT = tl.constexpr(0x7FFF)


@triton.jit
def float_of(table, row, COLUMN: tl.constexpr):
    return tl.load(table + row * WORDS + COLUMN).to(tl.float32, bitcast=True)


@triton.jit
def int_of(table, row, COLUMN: tl.constexpr):
    return tl.load(table + row * WORDS + COLUMN)


@triton.jit
def pointer_of(table, row, COLUMN: tl.constexpr):
    """The address of int32 values."""
    address = tl.load(table.to(tl.pointer_type(tl.int64)) + row * (WORDS // 2) + COLUMN)
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def padded(vocab_size):
    """Tokens that a row of bits, and of what was seen, has room for: whole words of bits."""
    return (vocab_size + 31) // 32 * 32
