"""Second launch: one program a row finds the winner of its chunks, or of the tokens that the row allows.

top_k, top_p and min_p each allow a prefix of the ranking by (logit, greatest first; id, lowest first). So

    a candidate is allowed when few enough tokens, of little enough mass, rank before it,
    and when it is not allowed, nothing behind it is: the next candidate is the best of those before it.

The first candidate is the winner of the whole race, which is mostly allowed; there is no sort. A search
looks only into groups of tokens whose greatest logit, known from the first launch, reaches the candidate's.

Where the mass that top_p is a share of is that of the top_k, it takes one search more: for the least
logit of the k, by bisection of its bits over the groups that can hold one of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.noise import race_key, race_scores
from inflight.execution.sampling.triton.race import LOG2_E, NO_TOKEN, best_of
from inflight.triton_utils.pdl import launch_dependents_then_wait

# Below the key of every float.
_LEAST_KEY = tl.constexpr(-(2**31))


@triton.jit
def choose_kernel(
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
    chunk_scores,  # [S, num_chunks], this and the next four: what the first launch wrote
    chunk_ids,
    chunk_tops,
    chunk_masses,
    group_tops,  # [S, num_groups]
    group_list,  # [S, num_groups] int32: space for a list of groups
    tokens,  # [max_rows, max_len] int32, rows tokens_stride apart
    out_ids,  # [S] int32
    out_bad,  # [S]
    vocab_size,
    num_chunks,
    num_groups,
    logits_stride,
    table_stride,
    tokens_stride,
    CHUNKS: tl.constexpr,  # num_chunks, rounded up to a power of two
    GROUPS: tl.constexpr,  # num_groups, rounded up to a power of two
    GROUP: tl.constexpr,  # tokens of a group
    TILE: tl.constexpr,  # listed groups that are looked into at once
    PDL: tl.constexpr,
):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    launch_dependents_then_wait(PDL)
    if row < 0:
        return
    column, length = row * table_stride, tl.load(lengths + entry)
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    place = entry * num_chunks + chunks
    scores = tl.load(chunk_scores + place, mask=exists, other=-float("inf"))
    ids = tl.load(chunk_ids + place, mask=exists, other=NO_TOKEN)
    tops = tl.load(chunk_tops + place, mask=exists, other=-float("inf"))
    top = tl.max(tops, 0)
    _, token_id = best_of(scores, ids)
    bad = tl.abs(top) == float("inf")

    k, p, log_p = tl.load(top_k + column), tl.load(top_p + column), tl.load(log_min_p + column)
    is_argmax = tl.load(argmax + column) != 0
    if not (bad or is_argmax) and (k > 0 or p < 1 or log_p > -float("inf")):
        inverse_temperature = 1.0 / tl.load(temperature + column)
        chunk_mass = 0.0
        if p < 1 and k == 0 and log_p == -float("inf"):
            masses = tl.load(chunk_masses + place, mask=exists, other=0.0)
            chunk_mass = tl.sum(masses * tl.exp2((tops - top) * (inverse_temperature * LOG2_E)), 0)
        first, second = race_key(tl.load(seed_low + column), tl.load(seed_high + column), length)
        token_id = _restricted(
            logits + entry.to(tl.int64) * logits_stride,
            group_tops + entry * num_groups,
            group_list + entry * num_groups,
            token_id,
            top,
            inverse_temperature,
            top * inverse_temperature + log_p,
            tl.where(k > 0, k, vocab_size),
            p,
            chunk_mass,
            first,
            second,
            vocab_size,
            num_groups,
            GROUPS,
            GROUP,
            TILE,
        )
    tl.store(out_ids + entry, token_id)
    tl.store(out_bad + entry, bad)
    tl.store(tokens + row.to(tl.int64) * tokens_stride + length, token_id)


@triton.jit
def _restricted(
    logits,  # [V], one row from here on
    group_tops,  # [num_groups]
    group_list,  # [num_groups]
    token_id,  # the winner of the whole race
    top,
    inverse_temperature,
    floor,  # the least score that min_p allows
    k,
    p,
    whole_mass,  # of the whole vocabulary, or 0: not known
    first,
    second,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The winner of the race among the allowed tokens."""
    groups = tl.arange(0, GROUPS)
    tops = tl.load(group_tops + groups, mask=groups < num_groups, other=-float("inf"))
    keys = tl.where((groups < num_groups) & (tops * inverse_temperature >= floor), _key(tops), _LEAST_KEY)

    goal = tl.full((), float("inf"), tl.float64)
    if p < 1:
        mass = whole_mass.to(tl.float64)
        if whole_mass == 0:
            mass = _allowed_mass(
                logits, group_list, keys, top, inverse_temperature, floor, k,
                vocab_size, GROUPS, GROUP, TILE,
            )  # fmt: skip
        goal = p.to(tl.float64) * mass

    logit = tl.load(logits + token_id).to(tl.float32)
    # A candidate that min_p forbids gives way to one that ranks behind everything and is no token.
    is_token = logit * inverse_temperature >= floor
    key = tl.where(is_token, _key(logit), _LEAST_KEY + 1)
    searching = True
    while searching:
        num_listed = _list_groups(group_list, keys, key, GROUPS)
        rank, mass_before, next_id = _before(
            logits, group_list, num_listed, key, token_id, top, inverse_temperature, floor,
            first, second, vocab_size, GROUP, TILE,
        )  # fmt: skip
        allowed = is_token & (rank < k) & (mass_before < goal)
        searching = (rank > 0) & ~allowed
        if searching:
            token_id = next_id
            key = _key(tl.load(logits + token_id).to(tl.float32))
            is_token = True
    return token_id


@triton.jit
def _before(
    logits,
    group_list,
    num_listed,
    key,
    token_id,
    top,
    inverse_temperature,
    floor,
    first,
    second,
    vocab_size,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many tokens rank before (key, token_id), their mass, and which of them wins the race."""
    counts = tl.zeros((TILE, GROUP), tl.int32)
    masses = tl.zeros((TILE, GROUP), tl.float32)
    best = tl.full((TILE, GROUP), -float("inf"), tl.float32)
    best_ids = tl.full((TILE, GROUP), NO_TOKEN, tl.int32)
    for start in range(0, num_listed, TILE):
        x, ids, exists = _tile(logits, group_list, start, num_listed, vocab_size, GROUP, TILE)
        keys = _key(x)
        before = exists & ((keys > key) | ((keys == key) & (ids < token_id)))
        before = before & (x * inverse_temperature >= floor)
        counts += before.to(tl.int32)
        masses += tl.where(before, _mass(x, top, inverse_temperature), 0.0)
        scores = tl.where(before, race_scores(x, inverse_temperature, first, second, ids), -float("inf"))
        # Groups are listed in order, so of equals the one that came first has the lower id.
        best_ids = tl.where(scores > best, ids, best_ids)
        best = tl.maximum(best, scores)
    _, winner = best_of(best, best_ids)
    return tl.sum(counts), _exact_sum(masses), winner


@triton.jit
def _allowed_mass(
    logits,
    group_list,
    keys,  # [GROUPS] of the groups' greatest logits, _LEAST_KEY where min_p allows none of them
    top,
    inverse_temperature,
    floor,
    k,
    vocab_size,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The mass of the top k tokens that min_p allows, float64."""
    reach = _reach(keys, k)
    num_listed = _list_groups(group_list, keys, reach, GROUPS)
    # Always: at least k tokens have a key of `low` or more, if there are k at all, and less than k one of `high`.
    low, high = reach, _key(top) + 1
    count, mass = _from(
        logits, group_list, num_listed, low, top, inverse_temperature, floor, vocab_size, GROUP, TILE
    )
    high_count, high_mass = 0, tl.full((), 0.0, tl.float64)
    while (count > k) & (high > low + 1):
        middle = _middle(low, high)
        middle_count, middle_mass = _from(
            logits, group_list, num_listed, middle, top, inverse_temperature, floor, vocab_size, GROUP, TILE
        )
        if middle_count >= k:
            low, count, mass = middle, middle_count, middle_mass
        else:
            high, high_count, high_mass = middle, middle_count, middle_mass
    # Too many still: they are equals, and those with the lowest ids fill the places that are left.
    last = _mass(_value(low), top, inverse_temperature).to(tl.float64)
    return tl.where(count > k, high_mass + (k - high_count).to(tl.float64) * last, mass)


@triton.jit
def _from(
    logits,
    group_list,
    num_listed,
    key,
    top,
    inverse_temperature,
    floor,
    vocab_size,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """How many tokens that min_p allows have this key or a greater one, and their mass."""
    counts = tl.zeros((TILE, GROUP), tl.int32)
    masses = tl.zeros((TILE, GROUP), tl.float32)
    for start in range(0, num_listed, TILE):
        x, _, exists = _tile(logits, group_list, start, num_listed, vocab_size, GROUP, TILE)
        inside = exists & (_key(x) >= key) & (x * inverse_temperature >= floor)
        counts += inside.to(tl.int32)
        masses += tl.where(inside, _mass(x, top, inverse_temperature), 0.0)
    return tl.sum(counts), _exact_sum(masses)


@triton.jit
def _reach(keys, k):
    """A key that at least k of `keys` reach, and hardly more; the least key where there are not k."""
    usable = keys > _LEAST_KEY
    count = tl.sum(usable.to(tl.int32), 0)
    low, high = _LEAST_KEY + 1, tl.max(keys, 0) + 1
    if count > k:
        low = tl.min(tl.where(usable, keys, high), 0)
    while (count > k) & (high > low + 1):
        middle = _middle(low, high)
        middle_count = tl.sum((keys >= middle).to(tl.int32), 0)
        if middle_count >= k:
            low, count = middle, middle_count
        else:
            high = middle
    return low


@triton.jit
def _list_groups(group_list, keys, least, GROUPS: tl.constexpr):
    """Write down the groups whose keys [GROUPS] are at least `least`, in order; return how many they are."""
    chosen = (keys >= least).to(tl.int32)
    # The list is in global memory: all threads have read the old one, then all have written the new one.
    tl.debug_barrier()
    tl.store(group_list + tl.cumsum(chosen, 0) - 1, tl.arange(0, GROUPS), mask=chosen != 0)
    tl.debug_barrier()
    return tl.sum(chosen, 0)


@triton.jit
def _tile(logits, group_list, start, num_listed, vocab_size, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Logits, ids and whether they exist, [TILE, GROUP], of the listed groups from `start`."""
    at = start + tl.arange(0, TILE)
    groups = tl.load(group_list + at, mask=at < num_listed, other=0)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = (at < num_listed)[:, None] & (ids < vocab_size)
    return tl.load(logits + ids, mask=exists, other=-float("inf")).to(tl.float32), ids, exists


@triton.jit
def _mass(x, top, inverse_temperature):
    return tl.exp2((x - top) * (inverse_temperature * LOG2_E))


@triton.jit
def _exact_sum(masses):
    return tl.sum(masses.to(tl.float64))


@triton.jit
def _key(x):
    """An int32 that orders as the float32 does; -0.0 becomes 0.0 first, for they are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """(low + high) / 2, rounded down, where the sum may overflow."""
    return (low & high) + ((low ^ high) >> 1)
