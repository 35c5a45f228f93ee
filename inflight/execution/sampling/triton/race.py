"""First launch: each chunk of the vocabulary runs its own race."""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.noise import race_key, race_scores
from inflight.triton_utils.pdl import launch_dependents_then_wait

NO_TOKEN = tl.constexpr(0x7FFFFFFF)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def best_of(scores, token_ids):
    """The greatest of the scores and its id; of equals the lower id."""
    best = tl.max(scores)
    return best, tl.min(tl.where(scores == best, token_ids, NO_TOKEN))


@triton.jit
def race_kernel(
    logits,  # [S, V], rows logits_stride apart
    rows,  # [S] int32, negative: padding
    lengths,  # [S] int32
    temperature,  # this and the next six: [max_rows], table_stride apart
    log_min_p,
    top_p,
    seed_low,
    seed_high,
    top_k,
    argmax,
    chunk_scores,  # [S, num_chunks] float32: the best score
    chunk_ids,  # [S, num_chunks] int32: whose it is
    chunk_tops,  # [S, num_chunks] float32: the greatest logit, inf where one is NaN
    chunk_masses,  # [S, num_chunks] float32: the sum of exp((logit - top) / temperature), for top_p alone
    group_tops,  # [S, num_chunks * GROUPS] float32: the greatest logit of each group, for restricted rows
    vocab_size,
    logits_stride,
    table_stride,
    GROUPS: tl.constexpr,  # groups of a chunk
    GROUP: tl.constexpr,  # tokens of a group
    PDL: tl.constexpr,
):
    chunk, entry = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    if row < 0:
        return
    column = row * table_stride
    groups = chunk * GROUPS + tl.arange(0, GROUPS)
    token_ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [GROUPS, GROUP]
    at = logits + entry.to(tl.int64) * logits_stride
    x = tl.load(at + token_ids, mask=token_ids < vocab_size, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x)

    inverse_temperature = 1.0 / tl.load(temperature + column)
    is_argmax = tl.load(argmax + column) != 0
    scores = x
    if not is_argmax:
        first, second = race_key(
            tl.load(seed_low + column), tl.load(seed_high + column), tl.load(lengths + entry)
        )
        scores = race_scores(x, inverse_temperature, first, second, token_ids)
    score, token_id = best_of(scores, token_ids)

    place = entry * tl.num_programs(0) + chunk
    tl.store(chunk_scores + place, score)
    tl.store(chunk_ids + place, token_id)
    tl.store(chunk_tops + place, top)

    k, p, floor = tl.load(top_k + column), tl.load(top_p + column), tl.load(log_min_p + column)
    if not is_argmax and (k > 0 or p < 1 or floor > -float("inf")):
        tl.store(group_tops + entry * tl.num_programs(0) * GROUPS + groups, tl.max(x, 1))
        if k == 0 and p < 1 and floor == -float("inf"):
            mass = 0.0
            if tl.abs(top) < float("inf"):  # else nothing in the chunk is possible, or the row is bad
                masses = tl.exp2((x - top) * (inverse_temperature * LOG2_E))
                mass = tl.sum(masses)
            tl.store(chunk_masses + place, mass)
