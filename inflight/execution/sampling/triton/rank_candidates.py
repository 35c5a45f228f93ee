"""Candidates for sampling across ranks, each of which has the logits of part of the vocabulary.

A few tokens decide most rows, so ranks need not exchange logits. Each rank applies the row's penalties, masks, biases
and forbidden tokens to its own logits (every rank knows all parameters of a row), and contributes these candidates:

    the Gumbel-max winner of its part      the best of them is the winner overall, or the most likely token
    its best k tokens, for a top_k of k    together they contain the best k overall, which decide min_p and top_p
    its n most likely tokens and the mass of its part, for log-probabilities

The rank of the sampled token takes a second exchange: each rank counts its own tokens that are more likely.
For rows with top_p or min_p but without a small top_k, every rank gathers all logits.

The candidates of one rank for one row are float32, in which ids are exact:

    score, id      the winner
    top            the greatest logit, inf where one is not finite
    raw, raw top, raw mass      for log-probabilities: of the winner and of the part, from unmodified logits
    [n] raw logits, [n] ids      the most likely tokens; an id of -1 marks an empty slot
    [k] logits, [k] ids, and for log-probabilities [k] raw logits      the best tokens

A plain row has only the first three columns; the lists are as long as the row needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.gumbel import FEW, LOG2_E, NO_TOKEN, best_of, settled_by_candidates
from inflight.execution.sampling.triton.ranking import (
    LEAST_KEY,
    comes_before,
    count_from,
    key_of,
    list_groups,
    sorted_top,
    value_of,
)
from inflight.execution.sampling.triton.row_table import (
    ADJUSTS,
    ARGMAX,
    FLAGS,
    LOGPROBS,
    NUM_LOGPROBS,
    TOP_K,
    int_of,
)
from inflight.triton_utils.pdl import launch_dependents_then_wait

TOKEN_ID, TOP, RAW, RAW_TOP, RAW_MASS = (tl.constexpr(column) for column in range(1, 6))
PLAIN = tl.constexpr(3)
LISTS = tl.constexpr(6)  # the first column of the lists
CANDIDATE_COLUMNS = 6 + 5 * FEW.value  # the most columns that a row can need
_CANDIDATE_COLUMNS = tl.constexpr(CANDIDATE_COLUMNS)
_LEAST_FLOAT = tl.constexpr(-3.4028234663852886e38)
_ALL_COLUMNS = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["first_id"])
def rank_candidates_kernel(
    logits,  # [S, n] of this rank's tokens, rows logits_stride apart
    rows,  # [S] int32, negative: padding
    table,
    changed,  # [S, n] float32, this and the next seven: written by the Gumbel-max kernels
    chunk_scores,
    chunk_ids,
    chunk_tops,
    group_tops,
    raw_tops,
    raw_masses,
    raw_group_tops,
    group_list,  # [S, num_groups] int32: scratch
    candidates,  # [S, 4 * CANDIDATES] int32: scratch
    rank_candidates,  # [S, CANDIDATE_COLUMNS] float32
    columns,  # [S] int32: how many of these are valid
    num_logits,  # [S] int32: how many logits of the row every rank has to gather, none or all
    vocab_size,
    first_id,
    num_chunks,  # capacity of each row, as is num_groups
    num_groups,
    logits_stride,
    CHUNKS: tl.constexpr,  # chunks of these tokens, rounded up to a power of two
    CHUNK: tl.constexpr,  # groups of a chunk
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    tl.store(columns + entry, 0)
    tl.store(num_logits + entry, 0)
    if row < 0:
        return
    if not settled_by_candidates(table, row):
        tl.store(num_logits + entry, _ALL_COLUMNS)
        return
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < tl.cdiv(vocab_size, CHUNK * GROUP)
    place = entry * num_chunks + chunks
    scores = tl.load(chunk_scores + place, mask=exists, other=-float("inf"))
    ids = tl.load(chunk_ids + place, mask=exists, other=NO_TOKEN)
    score, token_id = best_of(scores, ids)
    top = tl.max(tl.load(chunk_tops + place, mask=exists, other=-float("inf")), 0)
    own = rank_candidates + entry * _CANDIDATE_COLUMNS
    tl.store(own, score)
    tl.store(own + TOKEN_ID, token_id.to(tl.float32))
    tl.store(own + TOP, top)
    n, k = list_sizes(table, row)
    flags = int_of(table, row, FLAGS)
    num_columns = k * 0 + PLAIN
    if (k > 0) | ((flags & LOGPROBS) != 0):
        num_columns = LISTS + 2 * k + 2 * n
        raw = logits + entry.to(tl.int64) * logits_stride
        raw_top = top
        if flags & LOGPROBS:
            tops = tl.load(raw_tops + place, mask=exists, other=-float("inf"))
            masses = tl.load(raw_masses + place, mask=exists, other=0.0)
            raw_top, raw_mass = mass_of_parts(tops, masses)
            tl.store(own + RAW, tl.load(raw + token_id - first_id))
            tl.store(own + RAW_TOP, raw_top)
            tl.store(own + RAW_MASS, raw_mass)
            num_columns += k
        for turn in range(0, 2):  # the most likely tokens (raw logits), then the best ones (modified logits)
            x, tops_of_groups = raw, raw_group_tops
            if turn == 1:
                tops_of_groups = group_tops
                if flags & ADJUSTS:
                    x = changed + entry.to(tl.int64) * vocab_size
            count = tl.where(turn == 0, n, k)
            if count > 0:
                greatest = tl.where(turn == 0, raw_top, top)
                keys = keys_of_groups(tops_of_groups + entry * num_groups, vocab_size, GROUPS, GROUP)
                space = (group_list + entry * num_groups, candidates + entry * 4 * CANDIDATES)
                to = own + LISTS + turn * 2 * n
                indices, num_found = _list_best(
                    x, vocab_size, first_id, space, keys, count, greatest, to,
                    GROUPS, GROUP, TILE, CANDIDATES,
                )  # fmt: skip
                if (turn == 1) & ((flags & LOGPROBS) != 0):
                    c = tl.arange(0, CANDIDATES)
                    values = tl.load(raw + indices, mask=c < num_found, other=0.0)
                    tl.store(to + 2 * k + c, values, mask=c < num_found)
    tl.store(columns + entry, num_columns)


@triton.jit
def list_sizes(table, row):
    """Return how many most likely tokens and how many best tokens a rank lists for a row."""
    has_logprobs = (int_of(table, row, FLAGS) & LOGPROBS) != 0
    n = tl.where(has_logprobs, tl.minimum(int_of(table, row, NUM_LOGPROBS), FEW), 0)
    return n, tl.where(int_of(table, row, ARGMAX) != 0, 0, tl.maximum(int_of(table, row, TOP_K), 0))


@triton.jit
def keys_of_groups(group_tops, vocab_size, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Return the keys of the groups' greatest logits, [GROUPS]."""
    groups = tl.arange(0, GROUPS)
    exists = groups < tl.cdiv(vocab_size, GROUP)
    greatest = tl.load(group_tops + groups, mask=exists, other=-float("inf"))
    return tl.where(exists, key_of(greatest), LEAST_KEY)


@triton.jit
def _list_best(
    x, vocab_size, first_id, space, keys, count, top, to,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write the first `count` tokens of the ranking; return their indices in x [CANDIDATES] and their number."""
    group_list, candidates = space
    c = tl.arange(0, CANDIDATES)
    indices = tl.zeros((CANDIDATES,), tl.int32)
    num_found = count * 0
    if top < float("inf"):
        best_keys, indices, num_found = sorted_top(
            x, vocab_size, group_list, candidates, keys, count, top, GROUPS, GROUP, TILE, CANDIDATES
        )
        tl.store(to + c, value_of(best_keys), mask=c < num_found)
    ids = tl.where(c < num_found, first_id + indices, -1)
    tl.store(to + count + c, ids.to(tl.float32), mask=c < count)
    return indices, num_found


@triton.jit
def mass_of_parts(tops, masses):
    """Return the greatest logit of all parts and their total mass."""
    top = tl.max(tops, 0)
    finite = tl.maximum(top, _LEAST_FLOAT)  # all tokens of a part may be forbidden
    return top, tl.sum(masses * tl.exp2((tops - finite) * LOG2_E), 0)


# Columns of the second exchange: the number of more likely tokens, and the logit of the sampled one.
COUNTED = 2
_COUNTED = tl.constexpr(COUNTED)


@triton.jit
def best_winner(rank_candidates, entry, RANKS: tl.constexpr):
    """Return the best winner of all ranks and the greatest logit. rank_candidates [S, RANKS * CANDIDATE_COLUMNS]"""
    scores = _of_ranks(rank_candidates, entry, 0, -float("inf"), RANKS)
    ids = _of_ranks(rank_candidates, entry, TOKEN_ID, -1.0, RANKS).to(tl.int32)
    tops = _of_ranks(rank_candidates, entry, TOP, -float("inf"), RANKS)
    _, token_id = best_of(scores, tl.where(ids >= 0, ids, NO_TOKEN))
    return token_id, tl.max(tops, 0)


@triton.jit
def total_mass(rank_candidates, entry, RANKS: tl.constexpr):
    """Return the greatest unmodified logit and the mass of the whole vocabulary."""
    tops = _of_ranks(rank_candidates, entry, RAW_TOP, -float("inf"), RANKS)
    return mass_of_parts(tops, _of_ranks(rank_candidates, entry, RAW_MASS, 0.0, RANKS))


@triton.jit
def _of_ranks(rank_candidates, entry, COLUMN: tl.constexpr, OTHER: tl.constexpr, RANKS: tl.constexpr):
    """Load one column of all ranks, padded to a power of two."""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    return tl.load(
        rank_candidates + (entry * RANKS + rank) * _CANDIDATE_COLUMNS + COLUMN, mask=rank < RANKS, other=OTHER
    )


@triton.jit
def best_listed(
    rank_candidates, entry, first_column, k, candidates, RANKS: tl.constexpr, CANDIDATES: tl.constexpr
):
    """Merge the ranks' lists of k tokens at `first_column` into the best k: keys, ids and their number.

    They are returned and left in scratch memory, as by `sorted_top`.
    """
    c = tl.arange(0, CANDIDATES)
    ranked = candidates + 2 * CANDIDATES
    count = k * 0
    for first in range(0, RANKS * k, CANDIDATES):
        keys, ids = _listed(rank_candidates, entry, first_column, k, first + c, RANKS)
        rank = tl.zeros((CANDIDATES,), tl.int32)
        for start in range(0, RANKS * k, 32):
            other_keys, other_ids = _listed(
                rank_candidates, entry, first_column, k, start + tl.arange(0, 32), RANKS
            )
            before = comes_before(other_keys[None, :], other_ids[None, :], keys[:, None], ids[:, None])
            rank += tl.sum(before.to(tl.int32), 1)
        exists = ids != NO_TOKEN
        tl.store(ranked + rank, keys, mask=exists & (rank < k))
        tl.store(ranked + CANDIDATES + rank, ids, mask=exists & (rank < k))
        count += tl.sum(exists.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.minimum(count, k)
    keys = tl.load(ranked + c, mask=c < count, other=LEAST_KEY)
    return keys, tl.load(ranked + CANDIDATES + c, mask=c < count, other=NO_TOKEN), count


@triton.jit
def _listed(rank_candidates, entry, first_column, k, i, RANKS: tl.constexpr):
    """Return keys and ids of the tokens at indices i, int32 of any shape, in the concatenation of all ranks' lists."""
    there = rank_candidates + (entry * RANKS + i // k) * _CANDIDATE_COLUMNS + first_column + i % k
    ids = tl.load(there + k, mask=i < RANKS * k, other=-1.0).to(tl.int32)
    values = tl.load(there, mask=ids >= 0, other=0.0)
    return tl.where(ids >= 0, key_of(values), LEAST_KEY), tl.where(ids >= 0, ids, NO_TOKEN)


@triton.jit
def count_kernel(
    logits,  # [S, n] of this rank's tokens, rows logits_stride apart
    rows,
    table,
    targets,  # [S] int32: the sampled tokens
    rank_candidates,  # [S, RANKS * CANDIDATE_COLUMNS]
    raw_group_tops,
    group_list,
    counted,  # [S, COUNTED] float32: the number of this rank's tokens above the target, and the target's logit
    columns,  # [S] int32: how many of these are valid
    vocab_size,
    num_groups,
    logits_stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count more likely tokens for rows that want log-probabilities and are settled by candidates."""
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    tl.store(columns + entry, 0)
    if row < 0:
        return
    if ((int_of(table, row, FLAGS) & LOGPROBS) == 0) | (not settled_by_candidates(table, row)):
        return
    n, k = list_sizes(table, row)
    logit = _raw_logit(rank_candidates, entry, tl.load(targets + entry), n, k, RANKS, CANDIDATES)
    keys = keys_of_groups(raw_group_tops + entry * num_groups, vocab_size, GROUPS, GROUP)
    listed = group_list + entry * num_groups
    least = key_of(logit) + 1
    num_listed = list_groups(listed, keys, least, GROUPS)
    x = logits + entry.to(tl.int64) * logits_stride
    count = count_from(x, vocab_size, listed, num_listed, least, GROUP, TILE)
    tl.store(counted + entry * _COUNTED, count.to(tl.float32))
    tl.store(counted + entry * _COUNTED + 1, logit)
    tl.store(columns + entry, _COUNTED)


@triton.jit
def _raw_logit(rank_candidates, entry, token_id, n, k, RANKS: tl.constexpr, CANDIDATES: tl.constexpr):
    """Return the unmodified logit of a winner or of one of the best k tokens."""
    ids = _of_ranks(rank_candidates, entry, TOKEN_ID, -1.0, RANKS)
    winners = _of_ranks(rank_candidates, entry, RAW, -float("inf"), RANKS)
    logit = tl.max(tl.where(ids == token_id.to(tl.float32), winners, -float("inf")), 0)
    for first in range(0, RANKS * k, CANDIDATES):
        i = first + tl.arange(0, CANDIDATES)
        _, listed = _listed(rank_candidates, entry, LISTS + 2 * n, k, i, RANKS)
        there = (
            rank_candidates + (entry * RANKS + i // k) * _CANDIDATE_COLUMNS + LISTS + 2 * n + 2 * k + i % k
        )
        values = tl.load(there, mask=listed == token_id, other=-float("inf"))
        logit = tl.maximum(logit, tl.max(values, 0))
    return logit


@triton.jit
def counted_rank(counted, entry, RANKS: tl.constexpr):
    """Return the target's logit and the number of more likely tokens on all ranks. counted [S, RANKS * COUNTED]"""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    there = counted + (entry * RANKS + rank) * _COUNTED
    count = tl.sum(tl.load(there, mask=rank < RANKS, other=0.0), 0)
    return tl.load(counted + entry * RANKS * _COUNTED + 1), count.to(tl.int32)
