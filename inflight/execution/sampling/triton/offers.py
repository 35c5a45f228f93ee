"""Sampling by several ranks, each of which has the logits of some tokens.

Of most rows few tokens decide, and no rank needs the logits of the others. It changes its own logits as the row wants
(penalties, masks, biases, forbidden tokens: every rank has all that is known of a row), and offers

    the winner of its part of the race     the best of these is the winner of the whole race, or the most likely token
    its best k tokens, for a top_k of k    those of all ranks hold the best k of all, which decide min_p and top_p
    its n most likely tokens, and the mass of its part, for log-probabilities

A token's rank among all is a second exchange: once it is drawn, each rank counts its own tokens that are more likely
(`offered.py` has that, and how offers are read).
Of rows that have a top_p or a min_p, and no small top_k, every rank gets all logits.

An offer is a row of float32, in which ids are exact:

    score, id      the winner
    top            its greatest logit, inf where one is not finite
    raw, raw top, raw mass      for log-probabilities: the winner's own, and those of the part, before any change
    [n] raw logits, [n] ids      the most likely ones; an id of -1: there is none
    [k] logits, [k] ids, and for log-probabilities [k] raw logits      the best ones

A plain row has the first three alone, and the lists are as long as the row asks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.layout import (
    ADJUSTS,
    ARGMAX,
    FLAGS,
    LOGPROBS,
    NUM_LOGPROBS,
    TOP_K,
    int_of,
)
from inflight.execution.sampling.triton.race import FEW, LOG2_E, NO_TOKEN, best_of, settled_by_offers
from inflight.execution.sampling.triton.ranking import LEAST_KEY, key_of, sorted_top, value_of
from inflight.triton_utils.pdl import launch_dependents_then_wait

TOKEN_ID, TOP, RAW, RAW_TOP, RAW_MASS = (tl.constexpr(column) for column in range(1, 6))
PLAIN = tl.constexpr(3)
LISTS = tl.constexpr(6)  # the first column of the lists
OFFER = 6 + 5 * FEW.value  # columns that there is room for
_OFFER = tl.constexpr(OFFER)
_LEAST_FLOAT = tl.constexpr(-3.4028234663852886e38)
_ALL_COLUMNS = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["first_id"])
def offer_kernel(
    logits,  # [S, n] of this rank's tokens, rows logits_stride apart
    rows,  # [S] int32, negative: padding
    table,
    changed,  # [S, n] float32, this and the next seven: what the race over these tokens has left
    chunk_scores,
    chunk_ids,
    chunk_tops,
    group_tops,
    raw_tops,
    raw_masses,
    raw_group_tops,
    group_list,  # [S, num_groups] int32: space
    candidates,  # [S, 4 * CANDIDATES] int32: space
    offers,  # [S, OFFER] float32
    columns,  # [S] int32: how many of these are to be read
    wanted,  # [S] int32: how many logits of the row are wanted from each rank, none or all
    vocab_size,
    first_id,
    num_chunks,  # that each row has room for, and so many groups
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
    tl.store(wanted + entry, 0)
    if row < 0:
        return
    if not settled_by_offers(table, row):
        tl.store(wanted + entry, _ALL_COLUMNS)
        return
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < tl.cdiv(vocab_size, CHUNK * GROUP)
    place = entry * num_chunks + chunks
    scores = tl.load(chunk_scores + place, mask=exists, other=-float("inf"))
    ids = tl.load(chunk_ids + place, mask=exists, other=NO_TOKEN)
    score, token_id = best_of(scores, ids)
    top = tl.max(tl.load(chunk_tops + place, mask=exists, other=-float("inf")), 0)
    offered = offers + entry * _OFFER
    tl.store(offered, score)
    tl.store(offered + TOKEN_ID, token_id.to(tl.float32))
    tl.store(offered + TOP, top)
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
            tl.store(offered + RAW, tl.load(raw + token_id - first_id))
            tl.store(offered + RAW_TOP, raw_top)
            tl.store(offered + RAW_MASS, raw_mass)
            num_columns += k
        for turn in range(0, 2):  # the most likely tokens, then the best ones
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
                to = offered + LISTS + turn * 2 * n
                found, num_found = _list_best(
                    x, vocab_size, first_id, space, keys, count, greatest, to,
                    GROUPS, GROUP, TILE, CANDIDATES,
                )  # fmt: skip
                if (turn == 1) & ((flags & LOGPROBS) != 0):
                    c = tl.arange(0, CANDIDATES)
                    values = tl.load(raw + found, mask=c < num_found, other=0.0)
                    tl.store(to + 2 * k + c, values, mask=c < num_found)
    tl.store(columns + entry, num_columns)


@triton.jit
def list_sizes(table, row):
    """How many of the most likely tokens a rank offers for a row, and how many of the best ones."""
    wanted = (int_of(table, row, FLAGS) & LOGPROBS) != 0
    n = tl.where(wanted, tl.minimum(int_of(table, row, NUM_LOGPROBS), FEW), 0)
    return n, tl.where(int_of(table, row, ARGMAX) != 0, 0, tl.maximum(int_of(table, row, TOP_K), 0))


@triton.jit
def keys_of_groups(group_tops, vocab_size, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """[GROUPS] of their greatest logits."""
    groups = tl.arange(0, GROUPS)
    exists = groups < tl.cdiv(vocab_size, GROUP)
    greatest = tl.load(group_tops + groups, mask=exists, other=-float("inf"))
    return tl.where(exists, key_of(greatest), LEAST_KEY)


@triton.jit
def _list_best(
    x, vocab_size, first_id, space, keys, count, top, to,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write the first `count` tokens of the ranking; return their places in x [CANDIDATES], and how many there are."""
    group_list, candidates = space
    c = tl.arange(0, CANDIDATES)
    found = tl.zeros((CANDIDATES,), tl.int32)
    num_found = count * 0
    if top < float("inf"):
        found_keys, found, num_found = sorted_top(
            x, vocab_size, group_list, candidates, keys, count, top, GROUPS, GROUP, TILE, CANDIDATES
        )
        tl.store(to + c, value_of(found_keys), mask=c < num_found)
    ids = tl.where(c < num_found, first_id + found, -1)
    tl.store(to + count + c, ids.to(tl.float32), mask=c < count)
    return found, num_found


@triton.jit
def mass_of_parts(tops, masses):
    """The greatest logit of all parts, and the mass of them together."""
    top = tl.max(tops, 0)
    finite = tl.maximum(top, _LEAST_FLOAT)  # in a part nothing may be possible
    return top, tl.sum(masses * tl.exp2((tops - finite) * LOG2_E), 0)
