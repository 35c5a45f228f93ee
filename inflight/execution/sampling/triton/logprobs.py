"""Log-probabilities of tokens under the model's unmodified logits, without sorting the vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl

from inflight.execution.sampling.triton.gumbel import LOG2_E, ids_of_chunk, load_chunk, store_chunk
from inflight.execution.sampling.triton.ranking import (
    LEAST_KEY,
    key_of,
    list_groups,
    rank_and_mass,
    sorted_top,
    value_of,
)
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait

_LEAST_FLOAT = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def measure_kernel(
    logits,  # [P, V], rows logits_stride apart
    tops,  # [P, num_chunks] float32, this and the next two: as `special_gumbel_kernel` writes them
    masses,
    group_tops,  # [P, num_chunks * GROUPS] float32
    vocab_size,
    logits_stride,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Prepare what `logprobs_kernel` reads for logits that are scored but not sampled from."""
    chunk, entry = tl.program_id(0), tl.program_id(1)
    x = load_chunk(
        logits + entry.to(tl.int64) * logits_stride, ids_of_chunk(chunk, GROUPS, GROUP), vocab_size
    )
    place = entry * tl.num_programs(0) + chunk
    store_chunk(x, tl.max(x), place, tops, masses, group_tops, GROUPS)


@triton.jit(do_not_specialize_on_alignment=["targets"])
def logprobs_kernel(
    logits,  # [S, V], rows logits_stride apart
    targets,  # [S] int32
    counts,  # [S] int32: most likely tokens to report per entry, at most CANDIDATES / 2; negative: nothing
    places,  # [S] int32: the index of each entry in the results
    widths,  # [1] int32: 1 + the most that any entry wants
    tops,  # [S, num_chunks]
    masses,
    group_tops,  # [S, num_groups]
    group_list,  # [S, num_groups] int32: scratch
    candidates,  # [S, 4 * CANDIDATES] int32: scratch
    results,  # [places, 3, width] int32: ids, log-probabilities as bits, ranks; the target comes first
    vocab_size,
    num_chunks,
    num_groups,
    logits_stride,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    entry = tl.program_id(0)
    count, place = tl.load(counts + entry), tl.load(places + entry)
    launch_dependents_then_wait(PDL)
    if count < 0:
        return
    width = tl.load(widths)
    result = results + place * 3 * width
    target = tl.load(targets + entry)
    space = candidates + entry * 4 * CANDIDATES
    chunks = tl.arange(0, CHUNKS)
    partial = entry * num_chunks + chunks
    chunk_tops = tl.load(tops + partial, mask=chunks < num_chunks, other=-float("inf"))
    chunk_masses = tl.load(masses + partial, mask=chunks < num_chunks, other=0.0)
    top = tl.max(chunk_tops, 0)
    finite = tl.maximum(top, _LEAST_FLOAT)
    log_mass = tl.log(tl.sum(chunk_masses * tl.exp2((chunk_tops - finite) * LOG2_E), 0))

    x = logits + entry.to(tl.int64) * logits_stride
    listed = group_list + entry * num_groups
    groups = tl.arange(0, GROUPS)
    greatest = tl.load(
        group_tops + entry * num_groups + groups, mask=groups < num_groups, other=-float("inf")
    )
    keys = tl.where(groups < num_groups, key_of(greatest), LEAST_KEY)
    logit = tl.load(x + target)
    num_listed = list_groups(listed, keys, key_of(logit), GROUPS)
    above, _ = rank_and_mass(
        x, vocab_size, listed, num_listed, key_of(logit), -1, top, 1.0, -float("inf"), GROUP, TILE
    )
    _write_target(target, logit, above, top, log_mass, result, width)
    if count > 0:
        top_keys, ids, num_found = sorted_top(
            x, vocab_size, listed, space, keys, count, top, GROUPS, GROUP, TILE, CANDIDATES
        )
        _write_most_likely(top_keys, ids, num_found, space, top, log_mass, result, width, CANDIDATES)


@triton.jit
def _write_target(target, logit, above, top, log_mass, result, width):
    tl.store(result, target)
    tl.store(result + width, ((logit - top) - log_mass).to(tl.int32, bitcast=True))
    tl.store(result + 2 * width, above + 1)


@triton.jit
def _write_most_likely(keys, ids, num_found, space, top, log_mass, result, width, CANDIDATES: tl.constexpr):
    """Write keys and ids [CANDIDATES] in order, as `sorted_top` leaves them in `space`."""
    c = tl.arange(0, CANDIDATES)
    ranks = tl.full((CANDIDATES,), 1, tl.int32)
    for start in range(0, num_found, 32):
        other = start + tl.arange(0, 32)
        others = tl.load(space + 2 * CANDIDATES + other, mask=other < num_found, other=LEAST_KEY)
        ranks += tl.sum((others[None, :] > keys[:, None]).to(tl.int32), 1)
    logprob = (value_of(keys) - top) - log_mass
    tl.store(result + 1 + c, ids, mask=c < num_found)
    tl.store(result + width + 1 + c, logprob.to(tl.int32, bitcast=True), mask=c < num_found)
    tl.store(result + 2 * width + 1 + c, ranks, mask=c < num_found)
