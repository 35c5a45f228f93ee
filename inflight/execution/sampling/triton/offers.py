"""Sampling by several ranks, each of which has the logits of some tokens.

Some rows are drawn by a race alone: the most likely token, or one by its probability. For these a rank offers the
winner of its own tokens, and the best of all offers is the winner of the whole race: nobody needs the logits of the
others. Of rows that ask for more (top_k, top_p, min_p, penalties, masks, log-probabilities) every rank gets all logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.race import NO_TOKEN, best_of, settled_by_race
from inflight.triton_utils.pdl import launch_dependents_then_wait

OFFER = 3  # numbers: score, token id and greatest logit
_OFFER = tl.constexpr(OFFER)


@triton.jit
def offer_kernel(
    rows,  # [S] int32, negative: padding
    table,
    chunk_scores,  # [S, num_chunks], this and the next two: what the race over this rank's tokens wrote
    chunk_ids,
    chunk_tops,
    offers,  # [S, OFFER] float32, in which the id of a token is exact
    wanted,  # [S] int32: whether all logits of the row are
    num_chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    is_wanted = 0
    if row >= 0:
        if settled_by_race(table, row):
            chunks = tl.arange(0, CHUNKS)
            exists, place = chunks < num_chunks, entry * num_chunks + chunks
            scores = tl.load(chunk_scores + place, mask=exists, other=-float("inf"))
            ids = tl.load(chunk_ids + place, mask=exists, other=NO_TOKEN)
            score, token_id = best_of(scores, ids)
            tl.store(offers + entry * _OFFER, score)
            tl.store(offers + entry * _OFFER + 1, token_id.to(tl.float32))
            tops = tl.load(chunk_tops + place, mask=exists, other=-float("inf"))
            tl.store(offers + entry * _OFFER + 2, tl.max(tops, 0))
        else:
            is_wanted = 1
    tl.store(wanted + entry, is_wanted)


@triton.jit
def best_offer(offers, entry, RANKS: tl.constexpr):
    """The token of the best of all ranks' offers, [S, RANKS * OFFER], and the greatest logit."""
    rank = tl.arange(0, triton.next_power_of_2(RANKS))
    there = offers + (entry * RANKS + rank) * _OFFER
    exists = rank < RANKS
    scores = tl.load(there, mask=exists, other=-float("inf"))
    ids = tl.load(there + 1, mask=exists, other=0.0).to(tl.int32)
    tops = tl.load(there + 2, mask=exists, other=-float("inf"))
    _, token_id = best_of(scores, tl.where(exists, ids, NO_TOKEN))
    return token_id, tl.max(tops, 0)
