"""Gumbel-max in kernels: the random numbers of `sampling/gumbel.py`, and the first launches of sampling.

Each chunk of the vocabulary finds its own winner. Plain rows have one program per chunk. Rows that modify logits or
want log-probabilities ("special" rows) have a separate kernel, with few programs per row that loop over the chunks:
a step without such rows hardly notices it. Modified logits are written beside the model's own, and later kernels read
them there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from inflight.execution.sampling import gumbel as host_gumbel
from inflight.execution.sampling.triton.row_table import (
    ADJUSTS,
    ARGMAX,
    FLAGS,
    LOG_MIN_P,
    LOGPROBS,
    SEED_HIGH,
    SEED_LOW,
    SPECIAL,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    adjusted,
    float_of,
    int_of,
)
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait

_WORD = 0xFFFFFFFF
_A = tl.constexpr(host_gumbel.A & _WORD)
_B = tl.constexpr(host_gumbel.B & _WORD)
_START_1 = tl.constexpr(host_gumbel.START_1 & _WORD)
_START_2 = tl.constexpr(host_gumbel.START_2 & _WORD)
_STRIDE = tl.constexpr(host_gumbel.STRIDE & _WORD)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LOG_2 = tl.constexpr(0.6931471805599453)
# Below this the logarithm of 1 - u has lost too many bits of u, and five terms of its series have not.
_SERIES_LIMIT = tl.constexpr(1 / 16)


@triton.jit
def noise_key(seed_low, seed_high, position):
    """Hash int32 (seed, position) to the two uint32 words that key the noise."""
    low = seed_low.to(tl.uint32, bitcast=True)
    high = seed_high.to(tl.uint32, bitcast=True)
    place = position.to(tl.uint32, bitcast=True)
    first = _mix(_mix(_mix(low + _START_1) + high) + place)
    second = _mix(_mix(_mix(low + _START_2) + high) + place)
    return first, second


@triton.jit
def gumbel_scores(logits, inverse_temperature, first, second, token_ids):
    """Return logit / temperature - log(exponential), float32, in the shape of the int32 ids: the greatest wins."""
    u = _uniform(_bits(first, second, token_ids))
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    exponential = tl.where(u < _SERIES_LIMIT, series, -_LOG_2 * _log2(1.0 - u))
    return logits * inverse_temperature - _LOG_2 * _log2(exponential)


@triton.jit
def _log2(x):
    """One instruction, accurate to about 2^-22; an exact logarithm would dominate the kernel's time."""
    return tl.log2(x) if _INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def _bits(first, second, token_ids):
    x = token_ids.to(tl.uint32, bitcast=True) * _STRIDE + first
    x = ((x ^ (x >> 16)) * _A) ^ second
    x = (x ^ (x >> 15)) * _B
    return x ^ (x >> 16)


@triton.jit
def _uniform(bits):
    """Return float32 strictly inside (0, 1)."""
    u = (bits >> 1).to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-31 + 2.0**-32
    return tl.minimum(u, 1 - 2.0**-24)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * _A
    x = (x ^ (x >> 15)) * _B
    return x ^ (x >> 16)


NO_TOKEN = tl.constexpr(0x7FFFFFFF)
FEW = tl.constexpr(128)  # a top_k up to this is decided among its tokens alone
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def best_of(scores, token_ids):
    """Return the greatest score and its id; ties go to the lower id."""
    best = tl.max(scores)
    return best, tl.min(tl.where(scores == best, token_ids, NO_TOKEN))


@triton.jit
def gumbel_kernel(
    logits,  # [S, V], rows logits_stride apart
    rows,  # [S] int32, negative: padding
    lengths,  # [S] int32
    table,  # [max_rows, WORDS], see `row_table.py`
    chunk_scores,  # [S, num_chunks] float32: the best score
    chunk_ids,  # [S, num_chunks] int32: its token
    chunk_tops,  # [S, num_chunks] float32: the greatest logit, inf if one is NaN
    chunk_masses,  # [S, num_chunks] float32: the sum of exp((logit - top) / temperature), for top_p alone
    group_tops,  # [S, num_chunks * GROUPS] float32: the greatest logit of each group, for restricted rows
    vocab_size,
    num_chunks,  # capacity of each row
    logits_stride,
    GROUPS: tl.constexpr,  # groups of a chunk
    GROUP: tl.constexpr,  # tokens of a group
    PDL: tl.constexpr,
):
    chunk, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    if row < 0:
        return
    if int_of(table, row, FLAGS) & SPECIAL:
        return
    token_ids = ids_of_chunk(chunk, GROUPS, GROUP)
    x = load_chunk(logits + entry.to(tl.int64) * logits_stride, token_ids, vocab_size)
    between = (chunk_scores, chunk_ids, chunk_tops, chunk_masses, group_tops)
    place = entry * num_chunks + chunk
    length = tl.load(lengths + entry)
    gumbel_max(x, token_ids, tl.max(x), row, length, table, place, between, GROUPS)


@triton.jit
def special_gumbel_kernel(
    logits,
    rows,
    lengths,
    table,
    mask_rows,  # [S] int32, negative: that of the row
    mask,  # [at least max_rows, words] int32
    forbidden,  # [max_rows, words] int32
    seen,  # [max_rows, padded(V)] int16
    changed,  # [S, V] float32: modified logits
    chunk_scores,
    chunk_ids,
    chunk_tops,
    chunk_masses,
    group_tops,
    raw_tops,  # this and the next two: of unmodified logits, for log-probabilities
    raw_masses,
    raw_group_tops,
    vocab_size,
    num_chunks,
    logits_stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    first_chunk, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    if row < 0:
        return
    flags = int_of(table, row, FLAGS)
    if (flags & SPECIAL) == 0:
        return
    between = (chunk_scores, chunk_ids, chunk_tops, chunk_masses, group_tops)
    length = tl.load(lengths + entry)
    for chunk in range(first_chunk, tl.cdiv(vocab_size, GROUPS * GROUP), tl.num_programs(0)):
        token_ids = ids_of_chunk(chunk, GROUPS, GROUP)
        x = load_chunk(logits + entry.to(tl.int64) * logits_stride, token_ids, vocab_size)
        top = tl.max(x)
        place = entry * num_chunks + chunk
        if flags & LOGPROBS:
            store_chunk(x, top, place, raw_tops, raw_masses, raw_group_tops, GROUPS)
        if flags & ADJUSTS:
            ids = tl.minimum(token_ids, vocab_size - 1)
            mask_row = tl.load(mask_rows + entry)
            mask_row = tl.where(mask_row < 0, row, mask_row)
            x = adjusted(x, ids, flags, row, table, mask_row, mask, forbidden, seen, vocab_size)
            x = tl.where(token_ids < vocab_size, x, -float("inf"))
            top = tl.where(top == float("inf"), top, tl.max(x))
            tl.store(changed + entry.to(tl.int64) * vocab_size + token_ids, x, mask=token_ids < vocab_size)
        gumbel_max(x, token_ids, top, row, length, table, place, between, GROUPS)


@triton.jit
def ids_of_chunk(chunk, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return the token ids of a chunk, [GROUPS, GROUP]."""
    groups = chunk * GROUPS + tl.arange(0, GROUPS)
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def load_chunk(logits, token_ids, vocab_size):
    """Load logits, with NaN as inf, which marks the row as bad."""
    x = tl.load(logits + token_ids, mask=token_ids < vocab_size, other=-float("inf"))
    return tl.where(x == x, x, float("inf"))


@triton.jit
def store_chunk(x, top, place, tops, masses, group_tops, GROUPS: tl.constexpr):
    """Write what `logprobs_kernel` reads of a chunk."""
    tl.store(tops + place, top)
    tl.store(masses + place, _mass(x, top, 1.0))
    tl.store(group_tops + place * GROUPS + tl.arange(0, GROUPS), tl.max(x, 1))


@triton.jit
def gumbel_max(x, token_ids, top, row, length, table, place, between, GROUPS: tl.constexpr):
    """Write the winner of a chunk's logits x, and what the choice among chunks needs."""
    chunk_scores, chunk_ids, chunk_tops, chunk_masses, group_tops = between
    inverse_temperature = 1.0 / float_of(table, row, TEMPERATURE)
    is_argmax = int_of(table, row, ARGMAX) != 0
    scores = x
    if not is_argmax:
        first, second = noise_key(int_of(table, row, SEED_LOW), int_of(table, row, SEED_HIGH), length)
        scores = gumbel_scores(x, inverse_temperature, first, second, token_ids)
    score, token_id = best_of(scores, token_ids)
    tl.store(chunk_scores + place, score)
    tl.store(chunk_ids + place, token_id)
    tl.store(chunk_tops + place, top)
    k, p, log_p = int_of(table, row, TOP_K), float_of(table, row, TOP_P), float_of(table, row, LOG_MIN_P)
    if not is_argmax and (k > 0 or p < 1 or log_p > -float("inf")):
        tl.store(group_tops + place * GROUPS + tl.arange(0, GROUPS), tl.max(x, 1))
        if k == 0 and p < 1 and log_p == -float("inf"):
            tl.store(chunk_masses + place, _mass(x, top, inverse_temperature))


@triton.jit
def _mass(x, top, inverse_temperature):
    """Return the sum of exp((x - top) / temperature); 0 if all tokens are forbidden or the row is bad."""
    mass = 0.0
    if tl.abs(top) < float("inf"):
        mass = tl.sum(tl.exp2((x - top) * (inverse_temperature * LOG2_E)))
    return mass
