"""Three ways to multiply a tile of weights with all tokens of a step.

Each returns (products [BLOCK_N, BLOCK_M], sums of squares of the tokens [BLOCK_M]) over features [first, last).
`rows` are pointers to the weight rows [BLOCK_N], `x` is [num_tokens, K], `norm` [K] float32 or None: the gain that
features are multiplied by first. Weights stand first in a product, so that the long side of a tensor core's tile
is filled by them and not by tokens that are not there.
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
    """Without tensor cores, a token at a time."""
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
def multiply_whole(
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
    """One product a step of k: the tile is large enough to give every warp a part of it."""
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


@triton.jit
def multiply_sliced(
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
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One product for each of SLICES runs of a step of k, added up at the end.

    A small tile cannot be shared out between warps; runs of k can, and chains of products that wait for each
    other become shorter.
    """
    DEPTH: tl.constexpr = BLOCK_K // SLICES
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, SLICES)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]  # [SLICES, DEPTH]
    acc = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([SLICES, DEPTH, BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        inside = k < (BLOCK_K if EVEN_K else last - start)
        pointers = rows[None, :, None] + (start + k)[:, None, :]
        w = tl.load(pointers, mask=inside[:, None, :], other=0.0, eviction_policy="evict_first")
        live = inside[:, :, None] & (m < num_tokens)[None, None, :]
        features = tl.load(x + m[None, None, :] * K + (start + k)[:, :, None], mask=live, other=0.0)
        if norm is not None:
            wide = features.to(tl.float32)
            squares += wide * wide
            gain = tl.load(norm + start + k, mask=inside, other=0.0)
            features = (wide * gain[:, :, None]).to(features.dtype)
        acc = dot(w, features, acc, PRECISION)
    return tl.sum(acc, 0), tl.sum(tl.sum(squares, 0), 0)
