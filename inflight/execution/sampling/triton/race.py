"""First launches: each chunk of the vocabulary runs its own race.

Rows that ask for a draw and nothing else have a program for each chunk. The others, special ones, have a kernel of
their own, with few programs per row that take one chunk after the other: a step without such rows hardly notices it.
Where a row changes its logits they are written beside the model's own, and all that follows reads them there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.adjust import adjusted
from inflight.execution.sampling.triton.layout import (
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
    float_of,
    int_of,
)
from inflight.execution.sampling.triton.noise import race_key, race_scores
from inflight.triton_utils.pdl import launch_dependents_then_wait

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
FEW = tl.constexpr(128)  # a top_k of at most so many tokens is decided among these alone
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def best_of(scores, token_ids):
    """The greatest of the scores and its id; of equals the lower id."""
    best = tl.max(scores)
    return best, tl.min(tl.where(scores == best, token_ids, NO_TOKEN))


@triton.jit
def settled_by_offers(table, row):
    """Whether a few tokens decide: the winner of the whole race, or the best of a small top_k. If ranks have some of
    the vocabulary each, what they know of their own parts is then enough, see `offers.py`."""
    k, p, log_p = int_of(table, row, TOP_K), float_of(table, row, TOP_P), float_of(table, row, LOG_MIN_P)
    free = (k <= 0) & (p >= 1) & (log_p == -float("inf"))
    return free | ((k > 0) & (k <= FEW)) | (int_of(table, row, ARGMAX) != 0)


# Which rows run: all; or of several ranks, those that offers settle, over their own tokens, and the others over all.
ALL, SETTLED, NOT_SETTLED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["first_id"])
def race_kernel(
    logits,  # [S, V], rows logits_stride apart
    rows,  # [S] int32, negative: padding
    lengths,  # [S] int32
    table,  # [max_rows, WORDS], see `layout.py`
    chunk_scores,  # [S, num_chunks] float32: the best score
    chunk_ids,  # [S, num_chunks] int32: whose it is
    chunk_tops,  # [S, num_chunks] float32: the greatest logit, inf where one is NaN
    chunk_masses,  # [S, num_chunks] float32: the sum of exp((logit - top) / temperature), for top_p alone
    group_tops,  # [S, num_chunks * GROUPS] float32: the greatest logit of each group, for restricted rows
    vocab_size,
    first_id,  # of these tokens, where they are part of a vocabulary
    num_chunks,  # that each row has room for
    logits_stride,
    GROUPS: tl.constexpr,  # groups of a chunk
    GROUP: tl.constexpr,  # tokens of a group
    WHO: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    if row < 0:
        return
    if int_of(table, row, FLAGS) & SPECIAL:
        return
    if WHO != ALL:
        if settled_by_offers(table, row) == (WHO == NOT_SETTLED):
            return
    token_ids = ids_of_chunk(chunk, GROUPS, GROUP)
    x = load_chunk(logits + entry.to(tl.int64) * logits_stride, token_ids, vocab_size)
    between = (chunk_scores, chunk_ids, chunk_tops, chunk_masses, group_tops)
    place = entry * num_chunks + chunk
    length = tl.load(lengths + entry)
    run_race(x, first_id + token_ids, tl.max(x), row, length, table, place, between, GROUPS)


@triton.jit(do_not_specialize=["first_id"])
def special_race_kernel(
    logits,
    rows,
    lengths,
    table,
    mask,  # [max_rows, words] int32
    forbidden,  # [max_rows, words] int32
    seen,  # [max_rows, padded(V)] int16
    changed,  # [S, V] float32: the logits of rows that change theirs
    chunk_scores,
    chunk_ids,
    chunk_tops,
    chunk_masses,
    group_tops,
    raw_tops,  # this and the next two: of logits before all else, for log-probabilities
    raw_masses,
    raw_group_tops,
    vocab_size,
    whole_size,  # of the vocabulary of which these tokens are a part
    first_id,
    num_chunks,
    logits_stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    WHO: tl.constexpr,
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
    if WHO != ALL:
        if settled_by_offers(table, row) == (WHO == NOT_SETTLED):
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
            ids = first_id + tl.minimum(token_ids, vocab_size - 1)
            x = adjusted(x, ids, flags, row, table, mask, forbidden, seen, whole_size)
            x = tl.where(token_ids < vocab_size, x, -float("inf"))
            top = tl.where(top == float("inf"), top, tl.max(x))
            tl.store(changed + entry.to(tl.int64) * vocab_size + token_ids, x, mask=token_ids < vocab_size)
        run_race(x, first_id + token_ids, top, row, length, table, place, between, GROUPS)


@triton.jit
def ids_of_chunk(chunk, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """[GROUPS, GROUP]"""
    groups = chunk * GROUPS + tl.arange(0, GROUPS)
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def load_chunk(logits, token_ids, vocab_size):
    """What is no number is inf: such a row is bad."""
    x = tl.load(logits + token_ids, mask=token_ids < vocab_size, other=-float("inf"))
    return tl.where(x == x, x, float("inf"))


@triton.jit
def store_chunk(x, top, place, tops, masses, group_tops, GROUPS: tl.constexpr):
    """What `logprobs_kernel` reads of a chunk."""
    tl.store(tops + place, top)
    tl.store(masses + place, _mass(x, top, 1.0))
    tl.store(group_tops + place * GROUPS + tl.arange(0, GROUPS), tl.max(x, 1))


@triton.jit
def run_race(x, token_ids, top, row, length, table, place, between, GROUPS: tl.constexpr):
    """The winner of a chunk's logits x, and what the choice among chunks needs to know of them."""
    chunk_scores, chunk_ids, chunk_tops, chunk_masses, group_tops = between
    inverse_temperature = 1.0 / float_of(table, row, TEMPERATURE)
    is_argmax = int_of(table, row, ARGMAX) != 0
    scores = x
    if not is_argmax:
        first, second = race_key(int_of(table, row, SEED_LOW), int_of(table, row, SEED_HIGH), length)
        scores = race_scores(x, inverse_temperature, first, second, token_ids)
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
    """The sum of exp((x - top) / temperature); 0 where nothing is possible, or the row is bad."""
    mass = 0.0
    if tl.abs(top) < float("inf"):
        mass = tl.sum(tl.exp2((x - top) * (inverse_temperature * LOG2_E)))
    return mass
