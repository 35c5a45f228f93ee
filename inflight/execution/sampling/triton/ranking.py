"""The ranking of a row's tokens by descending logit, ties by ascending id, without sorting the vocabulary.

A search only reads groups of tokens whose greatest logit, known from the Gumbel-max kernels, reaches the threshold.
Logits are compared as `key`s: integers in the same order, which a search can bisect.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.gumbel import LOG2_E, NO_TOKEN

# Below and above the key of every float.
LEAST_KEY = tl.constexpr(-(2**31))
GREATEST_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def key_of(x):
    """Return int32 keys that order like the float32 values; -0.0 becomes 0.0 first, since they are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, top, inverse_temperature):
    return tl.exp2((x - top) * (inverse_temperature * LOG2_E))


@triton.jit
def comes_before(keys, ids, key, token_id):
    return (keys > key) | ((keys == key) & (ids < token_id))


@triton.jit
def list_groups(group_list, keys, least, GROUPS: tl.constexpr):
    """List the groups whose keys [GROUPS] are at least `least`, in order; return their number."""
    chosen = (keys >= least).to(tl.int32)
    # The list is in global memory: wait for all reads of the old one, then for all writes of the new one.
    tl.debug_barrier()
    tl.store(group_list + tl.cumsum(chosen, 0) - 1, tl.arange(0, GROUPS), mask=chosen != 0)
    tl.debug_barrier()
    return tl.sum(chosen, 0)


@triton.jit
def load_listed(logits, vocab_size, group_list, start, num_listed, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return logits, ids and whether they exist, [TILE, GROUP], of the listed groups from `start`."""
    listed = start + tl.arange(0, TILE)
    groups = tl.load(group_list + listed, mask=listed < num_listed, other=0)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    exists = (listed < num_listed)[:, None] & (ids < vocab_size)
    return tl.load(logits + ids, mask=exists, other=-float("inf")), ids, exists


@triton.jit
def rank_and_mass(
    logits, vocab_size, group_list, num_listed, key, token_id, top, inverse_temperature, floor,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return how many tokens that min_p allows rank before (key, token_id), and their mass, float64."""
    counts = tl.zeros((TILE, GROUP), tl.int32)
    masses = tl.zeros((TILE, GROUP), tl.float32)
    for start in range(0, num_listed, TILE):
        x, ids, exists = load_listed(logits, vocab_size, group_list, start, num_listed, GROUP, TILE)
        before = exists & comes_before(key_of(x), ids, key, token_id) & (x * inverse_temperature >= floor)
        counts += before.to(tl.int32)
        masses += tl.where(before, mass_of(x, top, inverse_temperature), 0.0)
    return tl.sum(counts), tl.sum(masses.to(tl.float64))


@triton.jit
def kth_key(
    logits, vocab_size, group_list, keys, k, top,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the key of the k-th token (the least allowed one if there are fewer) and the number of listed groups.

    `group_list` is left with the groups that hold tokens of at least this key.
    """
    reach = reach_of(keys, k)
    num_listed = list_groups(group_list, keys, reach, GROUPS)
    # Invariant: at least k tokens (if there are that many) have a key >= low, and fewer than k have a key >= high.
    low, high = reach, key_of(top) + 1
    count = count_from(logits, vocab_size, group_list, num_listed, low, GROUP, TILE)
    while (count > k) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)  # (low + high) / 2 without overflow
        middle_count = count_from(logits, vocab_size, group_list, num_listed, middle, GROUP, TILE)
        if middle_count >= k:
            low, count = middle, middle_count
        else:
            high = middle
    return low, num_listed


@triton.jit
def count_from(logits, vocab_size, group_list, num_listed, key, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Return how many tokens of the listed groups have at least this key."""
    counts = tl.zeros((TILE, GROUP), tl.int32)
    for start in range(0, num_listed, TILE):
        x, _, exists = load_listed(logits, vocab_size, group_list, start, num_listed, GROUP, TILE)
        counts += (exists & (key_of(x) >= key)).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def reach_of(keys, k):
    """Return a key that at least k of `keys` reach, and hardly more; the least key if there are fewer than k."""
    usable = keys > LEAST_KEY
    count = tl.sum(usable.to(tl.int32), 0)
    low, high = LEAST_KEY + 1, tl.max(keys, 0) + 1
    if count > k:
        low = tl.min(tl.where(usable, keys, high), 0)
    while (count > k) & (high > low + 1):
        middle = (low & high) + ((low ^ high) >> 1)
        middle_count = tl.sum((keys >= middle).to(tl.int32), 0)
        if middle_count >= k:
            low, count = middle, middle_count
        else:
            high = middle
    return low


@triton.jit
def sorted_top(
    logits, vocab_size, group_list, candidates, keys, k, top,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Return the first k tokens of the ranking, in order: keys and ids, [CANDIDATES] each, and their number.

    `keys` [GROUPS] belong to the groups' greatest logits; `candidates` is scratch space for 4 x CANDIDATES.
    """
    reach = reach_of(keys, k)
    num_listed = list_groups(group_list, keys, reach, GROUPS)
    count = _collect(
        logits, vocab_size, group_list, candidates, 0, num_listed, reach, GREATEST_KEY, GROUP, TILE,
        CANDIDATES,
    )  # fmt: skip
    if count > CANDIDATES:
        # Too many in few groups, or many ties: take the ones above the k-th, then, in order, its ties.
        kth, num_listed = kth_key(logits, vocab_size, group_list, keys, k, top, GROUPS, GROUP, TILE)
        count = 0
        for turn in range(0, 2):
            count += _collect(
                logits, vocab_size, group_list, candidates, count, num_listed,
                kth + 1 - turn, tl.where(turn == 0, GREATEST_KEY, kth), GROUP, TILE, CANDIDATES,
            )  # fmt: skip
        count = tl.minimum(count, CANDIDATES)
    c = tl.arange(0, CANDIDATES)
    tl.debug_barrier()
    best_keys = tl.load(candidates + c, mask=c < count, other=LEAST_KEY)
    ids = tl.load(candidates + CANDIDATES + c, mask=c < count, other=NO_TOKEN)
    rank = tl.zeros((CANDIDATES,), tl.int32)
    for start in range(0, count, 32):
        other = start + tl.arange(0, 32)
        other_keys = tl.load(candidates + other, mask=other < count, other=LEAST_KEY)
        other_ids = tl.load(candidates + CANDIDATES + other, mask=other < count, other=NO_TOKEN)
        before = comes_before(other_keys[None, :], other_ids[None, :], best_keys[:, None], ids[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    ranked = candidates + 2 * CANDIDATES
    tl.store(ranked + rank, best_keys, mask=c < count)
    tl.store(ranked + CANDIDATES + rank, ids, mask=c < count)
    tl.debug_barrier()
    count = tl.minimum(count, k)
    best_keys = tl.load(ranked + c, mask=c < count, other=LEAST_KEY)
    ids = tl.load(ranked + CANDIDATES + c, mask=c < count, other=NO_TOKEN)
    return best_keys, ids, count


@triton.jit
def _collect(
    logits, vocab_size, group_list, candidates, first, num_listed, least, most,
    GROUP: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Write keys and ids of tokens with keys from `least` to `most`, in order of id, from index `first` while they fit;
    return the number of such tokens."""
    count = tl.zeros((), tl.int32)
    for start in range(0, num_listed, TILE):
        x, ids, exists = load_listed(logits, vocab_size, group_list, start, num_listed, GROUP, TILE)
        keys = key_of(x)
        inside = exists & (keys >= least) & (keys <= most)
        flat = tl.reshape(inside.to(tl.int32), (TILE * GROUP,))
        place = first + count + tl.cumsum(flat, 0) - 1
        fits = (flat != 0) & (place < CANDIDATES)
        tl.store(candidates + place, tl.reshape(keys, (TILE * GROUP,)), mask=fits)
        tl.store(candidates + CANDIDATES + place, tl.reshape(ids, (TILE * GROUP,)), mask=fits)
        count += tl.sum(flat, 0)
    return count
