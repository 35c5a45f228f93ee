"""What all ranks' offers say together, see `offers.py`, and the count by which a drawn token's rank is found."""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.layout import FLAGS, LOGPROBS, int_of
from inflight.execution.sampling.triton.offers import (
    LISTS,
    OFFER,
    RAW,
    RAW_MASS,
    RAW_TOP,
    TOKEN_ID,
    TOP,
    keys_of_groups,
    list_sizes,
    mass_of_parts,
)
from inflight.execution.sampling.triton.race import NO_TOKEN, best_of, settled_by_offers
from inflight.execution.sampling.triton.ranking import (
    LEAST_KEY,
    comes_before,
    count_from,
    key_of,
    list_groups,
)
from inflight.triton_utils.pdl import launch_dependents_then_wait

COUNTED = 2  # columns of the second exchange: how many tokens are more likely, and the logit of the drawn one
_OFFER, _COUNTED = tl.constexpr(OFFER), tl.constexpr(COUNTED)


@triton.jit
def best_offer(offers, entry, RANKS: tl.constexpr):
    """The token of the best of all ranks' offers, [S, RANKS * OFFER], and the greatest logit."""
    scores = _of_ranks(offers, entry, 0, -float("inf"), RANKS)
    ids = _of_ranks(offers, entry, TOKEN_ID, -1.0, RANKS).to(tl.int32)
    tops = _of_ranks(offers, entry, TOP, -float("inf"), RANKS)
    _, token_id = best_of(scores, tl.where(ids >= 0, ids, NO_TOKEN))
    return token_id, tl.max(tops, 0)


@triton.jit
def offered_mass(offers, entry, RANKS: tl.constexpr):
    """The greatest of all logits before any change, and the mass of the whole vocabulary."""
    tops = _of_ranks(offers, entry, RAW_TOP, -float("inf"), RANKS)
    return mass_of_parts(tops, _of_ranks(offers, entry, RAW_MASS, 0.0, RANKS))


@triton.jit
def _of_ranks(offers, entry, COLUMN: tl.constexpr, OTHER: tl.constexpr, RANKS: tl.constexpr):
    """A column of all ranks' offers, rounded up to a power of two."""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    return tl.load(offers + (entry * RANKS + rank) * _OFFER + COLUMN, mask=rank < RANKS, other=OTHER)


@triton.jit
def best_offered(offers, entry, first_column, k, candidates, RANKS: tl.constexpr, CANDIDATES: tl.constexpr):
    """The first k tokens of all ranks' lists of k that begin at `first_column`: keys, ids and how many, as `sorted_top`
    returns and leaves them."""
    c = tl.arange(0, CANDIDATES)
    ranked = candidates + 2 * CANDIDATES
    count = k * 0
    for first in range(0, RANKS * k, CANDIDATES):
        keys, ids = _listed(offers, entry, first_column, k, first + c, RANKS)
        rank = tl.zeros((CANDIDATES,), tl.int32)
        for start in range(0, RANKS * k, 32):
            other_keys, other_ids = _listed(offers, entry, first_column, k, start + tl.arange(0, 32), RANKS)
            before = comes_before(other_keys[None, :], other_ids[None, :], keys[:, None], ids[:, None])
            rank += tl.sum(before.to(tl.int32), 1)
        exists = ids != NO_TOKEN
        tl.store(ranked + rank, keys, mask=exists & (rank < k))
        tl.store(ranked + CANDIDATES + rank, ids, mask=exists & (rank < k))
        count += tl.sum(exists.to(tl.int32), 0)
    tl.debug_barrier()
    count = tl.minimum(count, k)
    found = tl.load(ranked + c, mask=c < count, other=LEAST_KEY)
    return found, tl.load(ranked + CANDIDATES + c, mask=c < count, other=NO_TOKEN), count


@triton.jit
def _listed(offers, entry, first_column, k, i, RANKS: tl.constexpr):
    """Keys and ids of the tokens number i, int32 of any shape, of all ranks' lists one after the other."""
    there = offers + (entry * RANKS + i // k) * _OFFER + first_column + i % k
    ids = tl.load(there + k, mask=i < RANKS * k, other=-1.0).to(tl.int32)
    values = tl.load(there, mask=ids >= 0, other=0.0)
    return tl.where(ids >= 0, key_of(values), LEAST_KEY), tl.where(ids >= 0, ids, NO_TOKEN)


@triton.jit
def count_kernel(
    logits,  # [S, n] of this rank's tokens, rows logits_stride apart
    rows,
    table,
    targets,  # [S] int32: the tokens that were drawn
    offers,  # [S, RANKS * OFFER]
    raw_group_tops,
    group_list,
    counted,  # [S, COUNTED] float32: this rank's tokens that are more likely than the target, and the target's logit
    columns,  # [S] int32: how many of these are to be read
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
    """For rows that want log-probabilities and that offers settle."""
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    tl.store(columns + entry, 0)
    if row < 0:
        return
    if ((int_of(table, row, FLAGS) & LOGPROBS) == 0) | (not settled_by_offers(table, row)):
        return
    n, k = list_sizes(table, row)
    logit = _offered_logit(offers, entry, tl.load(targets + entry), n, k, RANKS, CANDIDATES)
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
def _offered_logit(offers, entry, token_id, n, k, RANKS: tl.constexpr, CANDIDATES: tl.constexpr):
    """The logit, before any change, of a winner or of one of the best k tokens."""
    ids = _of_ranks(offers, entry, TOKEN_ID, -1.0, RANKS)
    winners = _of_ranks(offers, entry, RAW, -float("inf"), RANKS)
    logit = tl.max(tl.where(ids == token_id.to(tl.float32), winners, -float("inf")), 0)
    for first in range(0, RANKS * k, CANDIDATES):
        i = first + tl.arange(0, CANDIDATES)
        _, listed = _listed(offers, entry, LISTS + 2 * n, k, i, RANKS)
        there = offers + (entry * RANKS + i // k) * _OFFER + LISTS + 2 * n + 2 * k + i % k
        values = tl.load(there, mask=listed == token_id, other=-float("inf"))
        logit = tl.maximum(logit, tl.max(values, 0))
    return logit


@triton.jit
def counted_rank(counted, entry, RANKS: tl.constexpr):
    """The target's logit, and how many tokens of all ranks are more likely. counted [S, RANKS * COUNTED]"""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    there = counted + (entry * RANKS + rank) * _COUNTED
    count = tl.sum(tl.load(there, mask=rank < RANKS, other=0.0), 0)
    return tl.load(counted + entry * RANKS * _COUNTED + 1), count.to(tl.int32)
