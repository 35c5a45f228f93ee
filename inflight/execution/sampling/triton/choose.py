"""Second launch: one program per row finds the best of the chunks' winners that the row's parameters allow.

top_k, top_p and min_p each allow a prefix of the ranking (`ranking.py`). With a small top_k its tokens are sorted, and
everything is decided among them. Otherwise

    a candidate is allowed if few enough tokens, with little enough mass, rank before it,
    and if it is not allowed, nothing behind it is: the next candidate is the best of those before it.

There is no sort. The first candidate is the overall Gumbel-max winner, which is usually allowed; the next one usually
is the winner of another chunk. Only a chunk whose winner does not rank before the last candidate, and yet has the best
score, is computed again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.interface import HAS_NO_TOKEN, IS_NOT_FINITE
from inflight.execution.sampling.triton.gumbel import (
    FEW,
    LOG2_E,
    NO_TOKEN,
    best_of,
    gumbel_scores,
    ids_of_chunk,
    noise_key,
)
from inflight.execution.sampling.triton.ranking import (
    LEAST_KEY,
    comes_before,
    key_of,
    kth_key,
    list_groups,
    mass_of,
    rank_and_mass,
    sorted_top,
    value_of,
)
from inflight.execution.sampling.triton.row_table import (
    ADJUSTS,
    ARGMAX,
    COUNT,
    FLAGS,
    FORBID,
    LOG_MIN_P,
    PENALTIES,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    float_of,
    int_of,
    padded,
    update_forbidden,
)
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait

_IS_NOT_FINITE = tl.constexpr(IS_NOT_FINITE)
_HAS_NO_TOKEN = tl.constexpr(HAS_NO_TOKEN)


@triton.jit
def choose_kernel(
    logits,  # [S, V], rows logits_stride apart
    rows,  # [S] int32, negative: padding
    lengths,  # [S] int32
    table,  # [max_rows, WORDS], see `row_table.py`
    forbidden,  # [max_rows, words] int32
    seen,  # [max_rows, padded(V)] int16
    changed,  # [S, V] float32: modified logits
    chunk_scores,  # [S, num_chunks], this and the next four: written by the first launch
    chunk_ids,
    chunk_tops,
    chunk_masses,
    group_tops,  # [S, num_groups]
    group_list,  # [S, num_groups] int32: scratch
    candidates,  # [S, 4 * CANDIDATES] int32: scratch
    tokens,  # [max_rows, max_len] int32, rows tokens_stride apart
    out_ids,  # [S] int32
    out_bad,  # [S]
    vocab_size,
    num_chunks,
    num_groups,
    logits_stride,
    tokens_stride,
    CHUNKS: tl.constexpr,  # num_chunks, rounded up to a power of two
    CHUNK: tl.constexpr,  # groups of a chunk
    GROUPS: tl.constexpr,  # num_groups, rounded up to a power of two
    GROUP: tl.constexpr,  # tokens of a group
    TILE: tl.constexpr,  # listed groups per iteration
    CANDIDATES: tl.constexpr,
    GUESSES: tl.constexpr,  # whether the tokens are only guesses, which become no part of their rows
    PDL: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    if row < 0:
        return
    length, flags = tl.load(lengths + entry), int_of(table, row, FLAGS)
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    place = entry * num_chunks + chunks
    scores = tl.load(chunk_scores + place, mask=exists, other=-float("inf"))
    ids = tl.load(chunk_ids + place, mask=exists, other=NO_TOKEN)
    tops = tl.load(chunk_tops + place, mask=exists, other=-float("inf"))
    top = tl.max(tops, 0)
    _, token_id = best_of(scores, ids)
    bad = tl.abs(top) == float("inf")

    k, p, log_p = int_of(table, row, TOP_K), float_of(table, row, TOP_P), float_of(table, row, LOG_MIN_P)
    is_argmax = int_of(table, row, ARGMAX) != 0
    if not (bad or is_argmax) and (k > 0 or p < 1 or log_p > -float("inf")):
        inverse_temperature = 1.0 / float_of(table, row, TEMPERATURE)
        floor = top * inverse_temperature + log_p
        first, second = noise_key(int_of(table, row, SEED_LOW), int_of(table, row, SEED_HIGH), length)
        x = logits + entry.to(tl.int64) * logits_stride
        if flags & ADJUSTS:
            x = changed + entry.to(tl.int64) * vocab_size
        space = (group_list + entry * num_groups, candidates + entry * 4 * CANDIDATES)
        groups = tl.arange(0, GROUPS)
        greatest = tl.load(
            group_tops + entry * num_groups + groups, mask=groups < num_groups, other=-float("inf")
        )
        usable = (groups < num_groups) & (greatest * inverse_temperature >= floor)
        keys = tl.where(usable, key_of(greatest), LEAST_KEY)
        if (k > 0) & (k <= FEW):
            token_id = _sample_few(
                x, vocab_size, space, keys, top, inverse_temperature, floor, k, p, first, second,
                GROUPS, GROUP, TILE, CANDIDATES,
            )  # fmt: skip
        else:
            whole_mass = 0.0
            if p < 1 and k == 0 and log_p == -float("inf"):
                masses = tl.load(chunk_masses + place, mask=exists, other=0.0)
                whole_mass = tl.sum(masses * tl.exp2((tops - top) * (inverse_temperature * LOG2_E)), 0)
            token_id = _sample_restricted(
                x, vocab_size, space, keys, scores, ids, top, inverse_temperature, floor,
                tl.where(k > 0, k, vocab_size), p, whole_mass, first, second,
                CHUNKS, CHUNK, GROUPS, GROUP, TILE,
            )  # fmt: skip
    tl.store(out_ids + entry, token_id)
    not_finite = (top == float("inf")) | ((flags & ADJUSTS) == 0)
    tl.store(out_bad + entry, tl.where(bad, tl.where(not_finite, _IS_NOT_FINITE, _HAS_NO_TOKEN), 0))
    if not GUESSES:
        _append(
            token_id,
            row,
            length,
            flags,
            table,
            tokens + row.to(tl.int64) * tokens_stride,
            forbidden,
            seen,
            vocab_size,
        )


@triton.jit
def _append(token_id, row, length, flags, table, tokens, forbidden, seen, vocab_size):
    """Append the token to the row's own, and update the state that its next step reads."""
    tl.store(tokens + length, token_id)
    if flags & PENALTIES:
        known = seen + row.to(tl.int64) * padded(vocab_size) + token_id
        times_seen = tl.load(known).to(tl.int32)
        tl.debug_barrier()  # wait until all threads have read it
        tl.store(known, tl.where((times_seen & COUNT) < COUNT, times_seen + 1, times_seen).to(tl.int16))
    if flags & FORBID:
        update_forbidden(row, length + 1, table, tokens, forbidden, vocab_size)


@triton.jit
def _sample_few(
    logits, vocab_size, space, keys, top, inverse_temperature, floor, k, p, first, second,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the Gumbel-max winner among the top k, sorted, that min_p and then top_p allow."""
    group_list, candidates = space
    keys, ids, count = sorted_top(
        logits, vocab_size, group_list, candidates, keys, k, top, GROUPS, GROUP, TILE, CANDIDATES
    )
    c = tl.arange(0, CANDIDATES)
    x = value_of(keys)
    allowed = (c < count) & (x * inverse_temperature >= floor)
    masses = tl.where(allowed, mass_of(x, top, inverse_temperature), 0.0).to(tl.float64)
    mass_before = tl.cumsum(masses, 0) - masses
    goal = tl.where(p < 1, p.to(tl.float64) * tl.sum(masses, 0), float("inf"))
    in_nucleus = (mass_before < goal) | (c == 0)
    scores = gumbel_scores(x, inverse_temperature, first, second, ids)
    _, winner = best_of(tl.where(allowed & in_nucleus, scores, -float("inf")), ids)
    return winner


@triton.jit
def _sample_restricted(
    logits,  # of the row
    vocab_size,
    space,
    keys,  # [GROUPS] of the groups' greatest logits, LEAST_KEY where min_p allows none of them
    scores,  # [CHUNKS] of the chunks' winners
    ids,  # [CHUNKS] of the winners
    top,
    inverse_temperature,
    floor,  # the least score that min_p allows
    k,
    p,
    whole_mass,  # of the whole vocabulary, or 0: not known
    first,
    second,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the Gumbel-max winner among the allowed tokens."""
    group_list, _ = space
    goal = tl.full((), float("inf"), tl.float64)
    if p < 1:
        mass = whole_mass.to(tl.float64)
        if whole_mass == 0:
            mass = _allowed_mass(
                logits, vocab_size, group_list, keys, top, inverse_temperature, floor, k, GROUPS, GROUP, TILE
            )
        goal = p.to(tl.float64) * mass
    key, token_id = LEAST_KEY, NO_TOKEN  # everything ranks before that
    searching = True
    while searching:
        token_id, scores, ids = _next(
            logits, vocab_size, scores, ids, key, token_id, inverse_temperature, floor, first, second, CHUNKS,
            CHUNK, GROUP,
        )  # fmt: skip
        key = key_of(_load(logits, token_id, token_id < vocab_size))
        if (p < 1) | (k < vocab_size):
            num_listed = list_groups(group_list, keys, key, GROUPS)
            rank, mass_before = rank_and_mass(
                logits, vocab_size, group_list, num_listed, key, token_id, top, inverse_temperature, floor,
                GROUP, TILE,
            )  # fmt: skip
            searching = (rank > 0) & ((rank >= k) | (mass_before >= goal))
        else:
            searching = False
    return token_id


@triton.jit
def _next(
    logits, vocab_size, scores, ids, key, token_id, inverse_temperature, floor, first, second,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the best token that min_p allows and that ranks before (key, token_id), and the updated chunk winners.

    No allowed token of a chunk beats the chunk's winner, so the best winner, if allowed, is the best token.
    """
    chunks = tl.arange(0, CHUNKS)
    searching = True
    best_id = token_id
    while searching:
        _, best_id = best_of(scores, ids)
        x = _load(logits, best_id, best_id < vocab_size)
        allowed = comes_before(key_of(x), best_id, key, token_id) & (x * inverse_temperature >= floor)
        searching = ~allowed & (best_id < vocab_size)
        if searching:
            chunk = best_id // (CHUNK * GROUP)
            score, winner = _rerun_chunk(
                logits, vocab_size, chunk, key, token_id, inverse_temperature, floor, first, second, CHUNK,
                GROUP,
            )  # fmt: skip
            scores = tl.where(chunks == chunk, score, scores)
            ids = tl.where(chunks == chunk, winner, ids)
    return best_id, scores, ids


@triton.jit
def _rerun_chunk(
    logits, vocab_size, chunk, key, token_id, inverse_temperature, floor, first, second,
    CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the best score and token of a chunk among those that min_p allows and that rank before (key, token_id)."""
    ids = ids_of_chunk(chunk, CHUNK, GROUP)
    x = _load(logits, ids, ids < vocab_size)
    allowed = (
        (ids < vocab_size) & comes_before(key_of(x), ids, key, token_id) & (x * inverse_temperature >= floor)
    )
    scores = tl.where(allowed, gumbel_scores(x, inverse_temperature, first, second, ids), -float("inf"))
    score, winner = best_of(scores, ids)
    return score, tl.where(score == -float("inf"), NO_TOKEN, winner)


@triton.jit
def _load(logits, token_ids, exists):
    return tl.load(logits + token_ids, mask=exists, other=-float("inf"))


@triton.jit
def _allowed_mass(
    logits, vocab_size, group_list, keys, top, inverse_temperature, floor, k,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the mass of the top k tokens that min_p allows, float64."""
    kth = LEAST_KEY + 1
    if k < vocab_size:
        kth, _ = kth_key(logits, vocab_size, group_list, keys, k, top, GROUPS, GROUP, TILE)
    num_listed = list_groups(group_list, keys, kth, GROUPS)
    above, mass = rank_and_mass(
        logits, vocab_size, group_list, num_listed, kth, -1, top, inverse_temperature, floor, GROUP, TILE
    )
    if k < vocab_size:  # of the tokens that tie with the last one, as many as still fit
        value = value_of(kth)
        if value * inverse_temperature >= floor:
            tie_mass = mass_of(value, top, inverse_temperature).to(tl.float64)
            mass += (k - above).to(tl.float64) * tie_mass
    return mass
