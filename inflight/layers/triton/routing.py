"""Routing on a GPU: the experts of each token, and with many tokens the tokens of each expert.

A *pair* is a token and one of its experts; pair p belongs to token p // top_k. Padding tokens have no experts.

For few tokens, one kernel computes the router's logits and chooses: the program that computes a token's last logit goes
on to choose its experts. With more tokens the logits come from a linear layer.

Pairs are grouped by expert with one atomic addition each: the number of pairs that an expert already has is the place
of the next one. Their order among each other differs from run to run, but no result depends on it: a pair's product is
its own row, and a token's products are added in the order of its experts.

The tokens of each expert are also counted in total, for people (`Experts.tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.kernels import ExpertRouting
from inflight.layers.triton_utils.pdl import launch_dependents_then_wait, launch_options

_SCORES = {"softmax": 0, "sigmoid": 1, "chosen": 2}  # "chosen": a softmax over the chosen experts' logits


@triton.jit(do_not_specialize=["num_tokens", "num_squares"])
def _choose_kernel(
    logits,  # [T, E] float32
    correction,  # [E] float32, or None: added to the scores that experts are chosen by
    expert_scales,  # [E] float32, or None: factors of the weights
    padding_mask,  # [T] int32, negative: padding; or None
    squares,  # [num_squares, T] float32: sums of squares of the K features that the experts read; or None
    ids,  # [T, TOP_K] int32; num_held: none
    weights,  # [T, TOP_K] float32
    totals,  # [E] int64
    factors,  # [T] float32: what the norm multiplies the features by
    counts,  # [num_held] int32: how many pairs each expert has so far; or None
    pairs,  # [num_held, T] int32: the pairs of each expert
    num_tokens,
    num_experts,
    first_held,
    num_held,
    num_squares,
    K,
    eps,
    scale,
    SCORES: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SQUARES: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    launch_dependents_then_wait(PDL)
    num_logits, num_own = _allowed(padding_mask, token, num_experts, num_held)
    # Whatever is in a padding token's logits is not read.
    values = tl.load(logits + token.to(tl.int64) * num_experts + expert, mask=expert < num_logits, other=0.0)
    if squares is not None:
        tl.store(factors + token, _norm_factor(squares, token, num_tokens, num_squares, K, eps, SQUARES))
    _choose(
        values, token, num_logits, num_own, correction, expert_scales, ids, weights, totals, counts, pairs,
        num_tokens, num_experts, first_held, num_held, scale, SCORES, NORMALISE, TOP_K, PADDED_K, BLOCK_E,
        NUM_GROUPS, TOP_GROUPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_squares"])
def _route_kernel(
    x,  # [T, K], half normed: see `NextNorm`
    router,  # [E, K]
    bias,  # [E], or None
    logits,  # [T, E] float32, before norm and bias
    arrived,  # [T] int32, zero: how many of a token's logits are there
    correction,  # from here on as for `_choose_kernel`
    expert_scales,
    padding_mask,
    squares,
    ids,
    weights,
    totals,
    factors,
    counts,
    pairs,
    num_tokens,
    num_experts,
    first_held,
    num_held,
    num_squares,
    K,
    eps,
    scale,
    BLOCK_K: tl.constexpr,
    SCORES: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SQUARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one logit. The last program of a token chooses its experts."""
    token, expert_index = tl.program_id(0) // num_experts, tl.program_id(0) % num_experts
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    row = tl.load(router + expert_index.to(tl.int64) * K + k, mask=inside, other=0.0)
    launch_dependents_then_wait(PDL)
    features = tl.load(x + token.to(tl.int64) * K + k, mask=inside, other=0.0)
    factor = _norm_factor(squares, token, num_tokens, num_squares, K, eps, SQUARES)
    num_logits, num_own = _allowed(padding_mask, token, num_experts, num_held)
    token_logits = logits + token.to(tl.int64) * num_experts
    tl.store(token_logits + expert_index, tl.sum(row.to(tl.float32) * features.to(tl.float32), 0))
    tl.debug_barrier()  # the store comes before the atomic that announces it
    if tl.atomic_add(arrived + token, 1, sem="acq_rel", scope="gpu") == num_experts - 1:
        tl.store(arrived + token, 0)
        tl.store(factors + token, factor)
        expert = tl.arange(0, BLOCK_E)
        is_read = expert < num_logits
        values = tl.load(token_logits + expert, mask=is_read, other=0.0, cache_modifier=".cg") * factor
        if bias is not None:
            values += tl.load(bias + expert, mask=is_read, other=0.0).to(tl.float32)
        _choose(
            values, token, num_logits, num_own, correction, expert_scales, ids, weights, totals, counts, pairs,
            num_tokens, num_experts, first_held, num_held, scale, SCORES, NORMALISE, TOP_K, PADDED_K, BLOCK_E,
            NUM_GROUPS, TOP_GROUPS,
        )  # fmt: skip


@triton.jit
def _allowed(padding_mask, token, num_experts, num_held):
    """Return how many logits of a token are read, and how many of the experts held here it may have."""
    num_logits = num_experts
    num_own = num_held
    if padding_mask is not None:
        is_live = tl.load(padding_mask + token) >= 0
        num_logits = tl.where(is_live, num_experts, 0)
        num_own = tl.where(is_live, num_held, 0)
    return num_logits, num_own


@triton.jit
def _norm_factor(squares, token, num_tokens, num_squares, K, eps, SQUARES: tl.constexpr):
    i = tl.arange(0, SQUARES)
    sums = tl.load(squares + i * num_tokens + token, mask=i < num_squares, other=0.0)
    return tl.rsqrt(tl.sum(sums, 0) / K + eps)


@triton.jit
def _choose(
    values, token, num_logits, num_own, correction, expert_scales, ids, weights, totals, counts, pairs,
    num_tokens, num_experts, first_held, num_held, scale,
    SCORES: tl.constexpr, NORMALISE: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr,
    BLOCK_E: tl.constexpr, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
):  # fmt: skip
    """Choose the experts of a token by its logits `values` [BLOCK_E], and store them."""
    expert = tl.arange(0, BLOCK_E)
    exists = expert < num_experts
    values = tl.where(exists, values, -float("inf"))
    if SCORES == 0:
        powers = tl.exp(values - tl.max(values, 0))
        scores = powers / tl.sum(powers, 0)
    elif SCORES == 1:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        scores = values
    ranking = tl.where(exists, scores, -float("inf"))
    if correction is not None:
        ranking += tl.load(correction + expert, mask=exists, other=0.0)
    if NUM_GROUPS > 1:
        ranking = _only_best_groups(ranking, NUM_GROUPS, TOP_GROUPS, BLOCK_E)
    slot = tl.arange(0, PADDED_K)
    inside = slot < TOP_K
    chosen_ids = _best_first(ranking, PADDED_K, BLOCK_E)
    is_chosen = expert[None, :] == chosen_ids[:, None]
    chosen = tl.sum(tl.where(is_chosen & exists[None, :], scores[None, :], 0.0), 1)
    if SCORES == 2:
        chosen = tl.where(inside, chosen, -float("inf"))
        powers = tl.exp(chosen - tl.max(chosen, 0))
        chosen = powers / tl.sum(powers, 0)
    elif NORMALISE:
        total = tl.sum(tl.where(inside, chosen, 0.0), 0)
        chosen = chosen / (total + 1e-20)
    if expert_scales is not None:
        chosen *= tl.load(expert_scales + chosen_ids, mask=inside & (chosen_ids < num_experts), other=0.0)
    pair = token * TOP_K + slot
    local_ids = chosen_ids - first_held
    is_held = inside & (local_ids >= 0) & (local_ids < num_own)
    tl.store(ids + pair, tl.where(is_held, local_ids, num_held), mask=inside)
    tl.store(weights + pair, chosen * scale, mask=inside)
    tl.atomic_add(totals + chosen_ids, 1, mask=inside & (chosen_ids < num_logits), sem="relaxed")
    if counts is not None:
        place = tl.atomic_add(counts + local_ids, 1, mask=is_held, sem="relaxed")
        tl.store(pairs + local_ids.to(tl.int64) * num_tokens + place, pair, mask=is_held)


@triton.jit
def _best_first(ranking, COUNT: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the indices of the COUNT largest values, of equal ones the first. All differ, even if values are NaN."""
    bits = ranking.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    keys = (ordered.to(tl.int64) << 32) | (BLOCK_E - 1 - tl.arange(0, BLOCK_E))
    return BLOCK_E - 1 - (tl.topk(keys, COUNT) & 0xFFFF).to(tl.int32)


@triton.jit
def _only_best_groups(ranking, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return the ranking without experts outside the groups whose two best experts have the highest sum."""
    SIZE: tl.constexpr = BLOCK_E // NUM_GROUPS
    grouped = tl.reshape(ranking, [NUM_GROUPS, SIZE])
    member = tl.arange(0, SIZE)[None, :]
    first = tl.max(grouped, 1)
    best = tl.argmax(grouped, 1, tie_break_left=True)
    second = tl.max(tl.where(member == best[:, None], -float("inf"), grouped), 1)
    score = first + second
    group = tl.arange(0, NUM_GROUPS)
    kept = tl.zeros([NUM_GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        winner = tl.argmax(score, 0, tie_break_left=True)
        kept = tl.where(group == winner, 1, kept)
        score = tl.where(group == winner, -float("inf"), score)
    return tl.reshape(tl.where(kept[:, None] > 0, grouped, -float("inf")), [BLOCK_E])


@dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of each expert that is held here, in no particular order."""

    counts: Tensor  # [num_held] int32: how many; zero between layers
    pairs: Tensor  # [num_held, T] int32


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """The half of a norm that is left to do: see `NextNorm`."""

    squares: Tensor | None = None  # [n, T] float32
    num_features: int = 1
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """The experts of each token, as indices of the local experts."""

    ids: Tensor  # [T, top_k] int32; the number of experts held for padding, and for experts held by other ranks
    weights: Tensor  # [T, top_k] float32
    factors: Tensor | None = None  # [T] float32: the half of the norm that is left to do
    groups: Groups | None = None


@dataclass(frozen=True, slots=True)
class RouterProduct:
    """Logits that are still to be computed, of tokens that are half normed."""

    x: Tensor  # [T, K]
    weight: Tensor  # [E, K], K at most MAX_ROUTED_FEATURES
    bias: Tensor | None  # [E]
    arrived: Tensor  # [T or more] int32, zero between layers


def choose_experts(
    logits: Tensor | RouterProduct,  # [T, E] float32
    routing: ExpertRouting,
    totals: Tensor,  # [E] int64: increased by the tokens of each expert
    *,
    correction: Tensor | None = None,
    scales: Tensor | None = None,
    padding_mask: Tensor | None = None,
    local_experts: range | None = None,
    counts: Tensor | None = None,
    half_normed: HalfNormed | None = None,
    pdl: bool = False,
) -> Chosen:
    """Choose each token's experts. With `counts`, which must be zero, also group the tokens by expert."""
    product = logits if isinstance(logits, RouterProduct) else None
    if isinstance(logits, RouterProduct):
        assert half_normed is not None
        assert half_normed.squares is not None
        num_tokens, device = len(logits.x), logits.x.device
        logits = torch.empty(num_tokens, len(logits.weight), dtype=torch.float32, device=device)
    (num_tokens, num_experts), top_k, device = logits.shape, routing.top_k, logits.device
    local_experts = range(num_experts) if local_experts is None else local_experts
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    groups, factors = None, None
    if counts is not None:
        groups = Groups(counts, torch.empty(len(local_experts), num_tokens, dtype=torch.int32, device=device))
    half = HalfNormed() if half_normed is None else half_normed
    if half.squares is not None:
        factors = torch.empty(num_tokens, dtype=torch.float32, device=device)
    num_squares = 0 if half.squares is None else len(half.squares)
    arguments = (
        correction, scales, padding_mask, half.squares, ids, weights, totals, factors, counts,
        None if groups is None else groups.pairs, num_tokens, num_experts, local_experts.start, len(local_experts),
        num_squares, half.num_features, half.eps, routing.scale,
    )  # fmt: skip
    constants = {
        "SCORES": _SCORES[routing.scores],
        "NORMALISE": routing.normalise,
        "TOP_K": top_k,
        "PADDED_K": triton.next_power_of_2(max(2, top_k)),
        "BLOCK_E": triton.next_power_of_2(max(2, num_experts)),
        "NUM_GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.top_groups,
        "SQUARES": triton.next_power_of_2(num_squares),
        "PDL": pdl,
        "num_warps": 1,
        **launch_options(pdl),
    }
    if num_tokens and product is None:
        _choose_kernel[(num_tokens,)](logits, *arguments, **constants)
    elif num_tokens and product is not None:
        assert num_tokens <= len(product.arrived)
        _route_kernel[(num_tokens * num_experts,)](
            product.x, product.weight, product.bias, logits, product.arrived, *arguments,
            BLOCK_K=triton.next_power_of_2(half.num_features), **constants,
        )  # fmt: skip
    return Chosen(ids, weights, factors, groups)
