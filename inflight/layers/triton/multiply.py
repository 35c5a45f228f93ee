"""A tile of weights times all tokens of a step: without tensor cores, and with them.

Both return (products [BLOCK_N, BLOCK_M], sums of squares of the tokens [BLOCK_M]) over features [first, last); the
squares mean something only where there is a norm. `rows` are pointers to the tile's `weight_rows` [BLOCK_N], `x` is
[num_tokens, K], `norm` [K] float32 or None: the gain that features are multiplied by first. Weights stand first in a
product, so that the long side of a tensor core's tile is filled by them and not by tokens that are not there.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:  # its product of two bfloat16 tensors is that of their bits
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def weight_rows(index, tile, num_out, GATE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weight row at each index [0, BLOCK_N) of a tile; past the last one, the last one again.

    With a gate, the first half of a tile are gate rows and the second half the up rows of the same outputs.
    """
    if GATE == 0:
        return tl.minimum(tile * BLOCK_N + index, num_out - 1)
    WIDTH: tl.constexpr = BLOCK_N // 2
    return tl.minimum(tile * WIDTH + index % WIDTH, num_out - 1) + (index // WIDTH) * num_out


@triton.jit
def multiply_plain(
    x,
    rows,
    norm,
    first,
    last,
    num_tokens,
    K,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A token at a time."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        limit = BLOCK_K if EVEN_K else last - start
        inside = k < limit
        pointers = rows[:, None] + (start + k)[None, :]
        w = tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        for token in tl.static_range(BLOCK_M):
            live = k < tl.where(token < num_tokens, limit, 0)
            features = tl.load(x + token * K + start + k, mask=live, other=0.0).to(tl.float32)
            if norm is not None:
                squares += tl.where(m == token, tl.sum(features * features, 0), 0.0)
                features *= tl.load(norm + start + k, mask=inside, other=0.0)
            product = tl.sum(w * features[None, :], 1)  # [BLOCK_N]
            acc += tl.where((m == token)[None, :], product[:, None], 0.0)
    return acc, squares


@triton.jit
def multiply_tensor_cores(
    x,
    rows,
    norm,
    first,
    last,
    num_tokens,
    K,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All tokens at once, BLOCK_K features at a time."""
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        inside = k < (BLOCK_K if EVEN_K else last - start)
        pointers = rows[:, None] + (start + k)[None, :]
        w = tl.load(pointers, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        live = inside[:, None] & (m < num_tokens)[None, :]
        features = tl.load(x + m[None, :] * K + (start + k)[:, None], mask=live, other=0.0)
        if norm is not None:
            wide = features.to(tl.float32)
            squares += wide * wide
            gain = tl.load(norm + start + k, mask=inside, other=0.0)
            features = (wide * gain[:, None]).to(features.dtype)
        acc = dot(w, features, acc, PRECISION)
    return acc, tl.sum(squares, 0)
