"""Mixtures of experts on a GPU: choosing experts, grouping tokens by expert, and the experts' products.

A *pair* is a token and one of its experts; pair p belongs to token p // TOP_K. Steps with few tokens multiply pair by
pair and read the weights of the chosen experts only:

    choose_experts   logits -> ids and weights of each token's experts
    pair_gate_up     pair by pair: activate(gate) * up
    pair_down        token by token: residual + weighted sum over its experts, and half of the next norm

Other steps group the pairs by expert into blocks of the same number of pairs, so that each weight tile is read once per
block. Blocks are laid out for the worst case, and programs beyond the last block in use end at once: nothing depends on
the host, and no pair is ever dropped.

    group_pairs      ids -> blocks of pairs, one expert each
    grouped_gate_up  block by block: activate(gate) * up, in the order of the blocks
    grouped_down     block by block: weighted products, in the order of the pairs
    combine          residual + sum over each token's pairs in order, and half of the next norm

Padding tokens have no experts. Sums are float32 and always in the same order.

Gate and up rows alternate in the weights: row 2i is the gate of output i, row 2i + 1 its up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.elementwise import activate
from inflight.layers.triton.linear_parts import NextNorm, allocate_next_norm, dot
from inflight.layers.triton.tuning import GroupedTile, PairTile
from inflight.triton_utils.padding import padded_empty
from inflight.triton_utils.pdl import launch_dependents_then_wait, launch_options

SCORES = {"softmax": 0, "sigmoid": 1, "chosen": 2}  # "chosen": a softmax over the chosen experts' logits
CLAMPED = 6  # the activation of gpt-oss, beside those of `elementwise.ACTIVATIONS`
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_GROUP_CHUNK = 4096  # pairs that a program of `group_pairs` looks at in one go


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION == 6:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * gate / (1.0 + tl.exp(-1.702 * gate))
    return activate(gate, ACTIVATION) * up


# ---- choosing ----


@triton.jit
def _choose_kernel(
    logits,  # [T, E] float32
    correction,  # [E] float32, or None: added to the scores that experts are chosen by
    live,  # [T] int32, negative: padding; or None
    ids,  # [T, TOP_K] int32; num_held: none
    weights,  # [T, TOP_K] float32
    num_experts,
    first_held,
    num_held,
    scale,
    SCORES: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    launch_dependents_then_wait(PDL)
    is_live = True
    num_logits = num_experts
    if live is not None:
        is_live = tl.load(live + token) >= 0
        num_logits = tl.where(is_live, num_experts, 0)
    exists = expert < num_experts
    # Whatever is in a padding token's logits is not read.
    values = tl.load(logits + token.to(tl.int64) * num_experts + expert, mask=expert < num_logits, other=0.0)
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
    chosen_ids = tl.zeros([PADDED_K], tl.int32)
    chosen = tl.full([PADDED_K], -float("inf"), tl.float32)
    for index in tl.static_range(TOP_K):
        best = tl.argmax(ranking, 0, tie_break_left=True)
        score = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        chosen_ids = tl.where(slot == index, best, chosen_ids)
        chosen = tl.where(slot == index, score, chosen)
        ranking = tl.where(expert == best, -float("inf"), ranking)
    inside = slot < TOP_K
    if SCORES == 2:
        powers = tl.where(inside, tl.exp(chosen - tl.max(chosen, 0)), 0.0)
        chosen = powers / tl.sum(powers, 0)
    elif NORMALISE:
        total = tl.sum(tl.where(inside, chosen, 0.0), 0)
        chosen = chosen / (total + 1e-20)
    place = token.to(tl.int64) * TOP_K + slot
    own = chosen_ids - first_held
    is_held = (own >= 0) & (own < num_held) & is_live
    tl.store(ids + place, tl.where(is_held, own, num_held), mask=inside)
    tl.store(weights + place, chosen * scale, mask=inside)


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
class Chosen:
    """The experts of each token, as indices of those that are held here."""

    ids: Tensor  # [T, top_k] int32; the number of experts held for padding, and for experts held by other ranks
    weights: Tensor  # [T, top_k] float32


def choose_experts(
    logits: Tensor,  # [T, E] float32
    top_k: int,
    *,
    scores: str,
    normalise: bool,
    scale: float,
    correction: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    live: Tensor | None = None,
    held: range | None = None,
    pdl: bool = False,
) -> Chosen:
    num_tokens, num_experts = logits.shape
    held = range(num_experts) if held is None else held
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        _choose_kernel[(num_tokens,)](
            logits,
            correction,
            live,
            ids,
            weights,
            num_experts,
            held.start,
            len(held),
            scale,
            SCORES=SCORES[scores],
            NORMALISE=normalise,
            TOP_K=top_k,
            PADDED_K=triton.next_power_of_2(max(2, top_k)),
            BLOCK_E=triton.next_power_of_2(max(2, num_experts)),
            NUM_GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            PDL=pdl,
            num_warps=1,
            **launch_options(pdl),
        )
    return Chosen(ids, weights)


# ---- few tokens: pair by pair ----


@triton.jit
def _pair_gate_up_kernel(
    x,  # [T, K]
    weight,  # [E, 2 * inner, K], gate and up rows alternate
    bias,  # [E, 2 * inner], or None
    ids,  # [T, TOP_K] int32
    out,  # [T * TOP_K, inner]
    inner,
    K,
    num_experts,
    LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    num_tiles = tl.cdiv(inner, BLOCK_N)
    pair, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    n = tl.minimum(tile * BLOCK_N + tl.arange(0, BLOCK_N), inner - 1)
    k = tl.arange(0, BLOCK_K)
    launch_dependents_then_wait(PDL)
    expert = tl.load(ids + pair)
    if expert < num_experts:
        rows = expert.to(tl.int64) * (2 * inner) + 2 * n
        gate = tl.zeros([BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inside = k < (BLOCK_K if EVEN_K else K - start)
            features = tl.load(x + (pair // TOP_K).to(tl.int64) * K + start + k, mask=inside, other=0.0)
            features = features.to(tl.float32)[None, :]
            at = weight + rows[:, None] * K + (start + k)[None, :]
            first = tl.load(at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            second = tl.load(at + K, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            gate += tl.sum(first.to(tl.float32) * features, 1)
            up += tl.sum(second.to(tl.float32) * features, 1)
        if bias is not None:
            gate += tl.load(bias + rows).to(tl.float32)
            up += tl.load(bias + rows + 1).to(tl.float32)
        y = _gated(gate, up, ACTIVATION, LIMIT)
        tl.store(out + pair.to(tl.int64) * inner + n, y.to(out.dtype.element_ty))


@triton.jit
def _pair_down_kernel(
    x,  # [T * TOP_K, K]: what `pair_gate_up` returned
    weight,  # [E, num_out, K]
    bias,  # [E, num_out], or None
    ids,  # [T, TOP_K] int32
    weights,  # [T, TOP_K] float32
    residual,  # [T, num_out], or None
    next_weight,  # [num_out] float32 of the norm that reads the result, or None
    out,  # [T, num_out]
    scaled,
    squares_left,
    num_tokens,
    num_out,
    K,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    num_tiles = tl.cdiv(num_out, BLOCK_N)
    token, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_out - 1)
    k = tl.arange(0, BLOCK_K)
    next_weights = next_weight
    if next_weight is not None:
        next_weights = tl.load(next_weight + row)
    launch_dependents_then_wait(PDL)
    total = tl.zeros([BLOCK_N], tl.float32)
    for index in tl.static_range(TOP_K):
        pair = token * TOP_K + index
        expert = tl.load(ids + pair)
        exists = expert < num_experts
        # No branch: the loads of one expert need not wait for the product of another.
        end = tl.where(exists, K, 0)
        rows = (tl.where(exists, expert, 0).to(tl.int64) * num_out + row)[:, None] * K
        acc = tl.zeros([BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inside = start + k < end
            features = tl.load(x + pair.to(tl.int64) * K + start + k, mask=inside, other=0.0)
            at = weight + rows + (start + k)[None, :]
            w = tl.load(at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            acc += tl.sum(w.to(tl.float32) * features.to(tl.float32)[None, :], 1)
        if bias is not None:
            acc += tl.load(bias + tl.where(exists, expert, 0).to(tl.int64) * num_out + row).to(tl.float32)
        total += tl.where(exists, acc * tl.load(weights + pair), 0.0)
    place = token.to(tl.int64) * num_out + n
    live = n < num_out
    if residual is not None:
        total += tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
    values = total.to(out.dtype.element_ty)
    tl.store(out + place, values, mask=live)
    if next_weight is not None:
        wide = values.to(tl.float32)
        tl.store(scaled + place, (wide * next_weights).to(values.dtype), mask=live)
        tl.store(squares_left + tile * num_tokens + token, tl.sum(tl.where(live, wide * wide, 0.0), 0))


def pair_gate_up(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Chosen,
    activation: int,
    tile: PairTile,
    limit: float = 0.0,
    pdl: bool = False,
) -> Tensor:
    """Return [T * top_k, inner]; rows of padding are undefined."""
    num_tokens, top_k = chosen.ids.shape
    num_experts, double, num_features = weight.shape
    inner = double // 2
    out = torch.empty(num_tokens * top_k, inner, dtype=x.dtype, device=x.device)
    if num_tokens:
        _pair_gate_up_kernel[(num_tokens * top_k * triton.cdiv(inner, tile.block_n),)](
            x,
            weight,
            bias,
            chosen.ids,
            out,
            inner,
            num_features,
            num_experts,
            LIMIT=limit,
            ACTIVATION=activation,
            TOP_K=top_k,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            EVEN_K=num_features % tile.block_k == 0,
            PDL=pdl,
            num_warps=tile.num_warps,
            **launch_options(pdl),
        )
    return out


def pair_down(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Chosen,
    tile: PairTile,
    residual: Tensor | None = None,
    next_norm: NextNorm | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return [T, num_out], in place of the residual if there is one."""
    num_tokens, top_k = chosen.ids.shape
    num_experts, num_out, num_features = weight.shape
    out = residual
    if out is None:
        out = padded_empty(num_tokens, num_out, x.dtype, x.device)
    num_tiles = triton.cdiv(num_out, tile.block_n)
    next_weight, scaled, squares = allocate_next_norm(next_norm, out, num_tiles)
    if num_tokens:
        _pair_down_kernel[(num_tokens * num_tiles,)](
            x,
            weight,
            bias,
            chosen.ids,
            chosen.weights,
            residual,
            next_weight,
            out,
            scaled,
            squares,
            num_tokens,
            num_out,
            num_features,
            num_experts,
            TOP_K=top_k,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            PDL=pdl,
            num_warps=tile.num_warps,
            **launch_options(pdl),
        )
    return out


# ---- many tokens: grouped by expert ----


@triton.jit
def _histogram(values, NUM_BINS: tl.constexpr):
    if _INTERPRETED:  # whose histograms fail
        is_equal = values[None, :] == tl.arange(0, NUM_BINS)[:, None]
        return tl.sum(is_equal.to(tl.int32), 1)
    return tl.histogram(values, NUM_BINS)


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    ids,  # [num_pairs] int32
    pairs,  # [max_blocks * BLOCK_M] int32: the pairs of each block; num_pairs: none
    experts,  # [max_blocks] int32: the expert of each block
    num_blocks,  # [1] int32
    num_pairs,
    num_experts,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lay out the blocks of one expert, after those of all experts before it."""
    own = tl.program_id(0)
    offset = tl.arange(0, CHUNK)
    expert = tl.arange(0, BLOCK_E)
    launch_dependents_then_wait(PDL)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in tl.range(0, num_pairs, CHUNK):
        some = tl.load(ids + start + offset, mask=start + offset < num_pairs, other=num_experts)
        counts += _histogram(some, BLOCK_E)
    blocks = tl.where(expert < num_experts, (counts + (BLOCK_M - 1)) // BLOCK_M, 0)
    first = tl.sum(tl.where(expert < own, blocks, 0), 0)
    mine = tl.sum(tl.where(expert == own, blocks, 0), 0)
    if own == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
    for block in tl.range(0, mine):
        tl.store(experts + first + block, own)
    number = 0
    for start in tl.range(0, num_pairs, CHUNK):
        some = tl.load(ids + start + offset, mask=start + offset < num_pairs, other=num_experts)
        is_own = some == own
        rank = number + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs + first * BLOCK_M + rank, start + offset, mask=is_own)
        number += tl.sum(is_own.to(tl.int32), 0)
    m = tl.arange(0, BLOCK_M)
    tl.store(pairs + first * BLOCK_M + number + m, num_pairs, mask=number + m < mine * BLOCK_M)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs grouped by expert, in blocks of `block_m`."""

    pairs: Tensor  # [max_blocks * block_m] int32
    experts: Tensor  # [max_blocks] int32
    num_blocks: Tensor  # [1] int32
    block_m: int

    @property
    def max_blocks(self) -> int:
        return len(self.experts)


def group_pairs(chosen: Chosen, num_experts: int, block_m: int, pdl: bool = False) -> Blocks:
    num_pairs, device = chosen.ids.numel(), chosen.ids.device
    max_blocks = max(1, min(num_pairs, num_experts + num_pairs // block_m))
    pairs = torch.empty(max_blocks * block_m, dtype=torch.int32, device=device)
    experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=device)
    _group_kernel[(num_experts,)](
        chosen.ids,
        pairs,
        experts,
        num_blocks,
        num_pairs,
        num_experts,
        BLOCK_M=block_m,
        # `tl.histogram` needs a power of two; one bin more holds the padding.
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        CHUNK=min(_GROUP_CHUNK, triton.next_power_of_2(max(128, num_pairs))),
        PDL=pdl,
        num_warps=4 if num_pairs <= 1024 else 8,
        **launch_options(pdl),
    )
    return Blocks(pairs, experts, num_blocks, block_m)


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _grouped_kernel(
    x,  # GATED: [T, K], else [max_blocks * BLOCK_M, K] in the order of the blocks
    weight,  # [E, num_rows, K]
    bias,  # [E, num_rows], or None
    pairs,
    experts,
    num_blocks,
    weights,  # [num_pairs] float32, or None
    out,  # GATED: [max_blocks * BLOCK_M, num_rows // 2], else [num_pairs, num_rows]
    num_rows,
    K,
    num_pairs,
    max_blocks,
    LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr,  # 0: no gate
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    block, tile = tl.program_id(0) % max_blocks, tl.program_id(0) // max_blocks
    GATED: tl.constexpr = ACTIVATION != 0
    k = tl.arange(0, BLOCK_K)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, num_rows - 1)
    launch_dependents_then_wait(PDL)
    if block < tl.load(num_blocks):
        expert = tl.load(experts + block).to(tl.int64)
        at = block * BLOCK_M + tl.arange(0, BLOCK_M)
        pair = tl.load(pairs + at)
        is_live = pair < num_pairs
        if GATED:
            x_rows = x + (tl.where(is_live, pair, 0) // TOP_K).to(tl.int64) * K
        else:
            x_rows = x + at.to(tl.int64) * K
        rows = weight + (expert * num_rows + row) * K
        if WEIGHTS_LEFT:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            inside = k < (BLOCK_K if EVEN_K else K - start)
            w = tl.load(rows[:, None] + (start + k)[None, :], mask=inside[None, :], other=0.0)
            if WEIGHTS_LEFT:
                live = inside[:, None] & is_live[None, :]
                features = tl.load(x_rows[None, :] + (start + k)[:, None], mask=live, other=0.0)
                acc = dot(w, features, acc, PRECISION)
            else:
                live = inside[None, :] & is_live[:, None]
                features = tl.load(x_rows[:, None] + (start + k)[None, :], mask=live, other=0.0)
                acc = dot(features, tl.trans(w), acc, PRECISION)
        if bias is not None:
            extra = tl.load(bias + expert * num_rows + row).to(tl.float32)
            acc += extra[:, None] if WEIGHTS_LEFT else extra[None, :]
        if GATED:
            WIDTH: tl.constexpr = BLOCK_N // 2
            if WEIGHTS_LEFT:
                gate, up = tl.split(tl.permute(tl.reshape(acc, [WIDTH, 2, BLOCK_M]), [0, 2, 1]))
            else:
                gate, up = tl.split(tl.reshape(acc, [BLOCK_M, WIDTH, 2]))
            values = _gated(gate, up, ACTIVATION, LIMIT)
            column = tile * WIDTH + tl.arange(0, WIDTH)
            num_columns = num_rows // 2
            place = at.to(tl.int64)
        else:
            values = acc
            column = n
            num_columns = num_rows
            place = pair.to(tl.int64)
            if weights is not None:
                factor = tl.load(weights + pair, mask=is_live, other=0.0)
                values *= factor[None, :] if WEIGHTS_LEFT else factor[:, None]
        values = values.to(out.dtype.element_ty)
        exists = column < num_columns
        if WEIGHTS_LEFT:
            where = place[None, :] * num_columns + column[:, None]
            tl.store(out + where, values, mask=exists[:, None] & is_live[None, :])
        else:
            where = place[:, None] * num_columns + column[None, :]
            tl.store(out + where, values, mask=exists[None, :] & is_live[:, None])


def grouped_gate_up(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Chosen,
    blocks: Blocks,
    activation: int,
    tile: GroupedTile,
    limit: float = 0.0,
    pdl: bool = False,
) -> Tensor:
    """Return [max_blocks * block_m, inner] in the order of the blocks; rows of no pair are undefined."""
    inner = weight.shape[1] // 2
    out = torch.empty(len(blocks.pairs), inner, dtype=x.dtype, device=x.device)
    _launch_grouped(x, weight, bias, chosen, blocks, None, out, activation, limit, tile, pdl)
    return out


def grouped_down(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Chosen,
    blocks: Blocks,
    tile: GroupedTile,
    out_dtype: torch.dtype,
    pdl: bool = False,
) -> Tensor:
    """Return the weighted products [T * top_k, num_out] in the order of the pairs; rows of padding are undefined."""
    out = torch.empty(chosen.ids.numel(), weight.shape[1], dtype=out_dtype, device=x.device)
    _launch_grouped(x, weight, bias, chosen, blocks, chosen.weights, out, 0, 0.0, tile, pdl)
    return out


def _launch_grouped(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    chosen: Chosen,
    blocks: Blocks,
    weights: Tensor | None,
    out: Tensor,
    activation: int,
    limit: float,
    tile: GroupedTile,
    pdl: bool,
) -> None:
    _, num_rows, num_features = weight.shape
    _grouped_kernel[(blocks.max_blocks * triton.cdiv(num_rows, tile.block_n),)](
        x,
        weight,
        bias,
        blocks.pairs,
        blocks.experts,
        blocks.num_blocks,
        weights,
        out,
        num_rows,
        num_features,
        chosen.ids.numel(),
        blocks.max_blocks,
        LIMIT=limit,
        ACTIVATION=activation,
        TOP_K=chosen.ids.shape[1],
        BLOCK_M=blocks.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        EVEN_K=num_features % tile.block_k == 0,
        STAGES=tile.stages,
        WEIGHTS_LEFT=tile.weights_left,
        PRECISION="ieee" if weight.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=tile.num_warps,
        **launch_options(pdl),
    )


@triton.jit
def _combine_kernel(
    y,  # [T * TOP_K, num_out]
    ids,  # [T, TOP_K] int32
    residual,  # [T, num_out], or None
    next_weight,
    out,
    scaled,
    squares_left,
    num_tokens,
    num_out,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    num_tiles = tl.cdiv(num_out, BLOCK_N)
    token, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    live = n < num_out
    next_weights = next_weight
    if next_weight is not None:
        next_weights = tl.load(next_weight + n, mask=live, other=0.0)
    launch_dependents_then_wait(PDL)
    total = tl.zeros([BLOCK_N], tl.float32)
    for index in tl.static_range(TOP_K):
        pair = token.to(tl.int64) * TOP_K + index
        end = tl.where(tl.load(ids + pair) < num_experts, num_out, 0)
        total += tl.load(y + pair * num_out + n, mask=n < end, other=0.0).to(tl.float32)
    place = token.to(tl.int64) * num_out + n
    if residual is not None:
        total += tl.load(residual + place, mask=live, other=0.0).to(tl.float32)
    values = total.to(out.dtype.element_ty)
    tl.store(out + place, values, mask=live)
    if next_weight is not None:
        wide = values.to(tl.float32)
        tl.store(scaled + place, (wide * next_weights).to(values.dtype), mask=live)
        tl.store(squares_left + tile * num_tokens + token, tl.sum(tl.where(live, wide * wide, 0.0), 0))


def combine(
    y: Tensor,  # [T * top_k, num_out]
    chosen: Chosen,
    num_experts: int,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    next_norm: NextNorm | None = None,
    pdl: bool = False,
) -> Tensor:
    """Return the sum over each token's pairs [T, num_out], added to the residual in place if there is one."""
    num_tokens, top_k = chosen.ids.shape
    num_out = y.shape[1]
    out = residual
    if out is None:
        out = padded_empty(num_tokens, num_out, dtype, y.device)
    block = min(1024, triton.next_power_of_2(num_out))
    num_tiles = triton.cdiv(num_out, block)
    next_weight, scaled, squares = allocate_next_norm(next_norm, out, num_tiles)
    if num_tokens:
        _combine_kernel[(num_tokens * num_tiles,)](
            y,
            chosen.ids,
            residual,
            next_weight,
            out,
            scaled,
            squares,
            num_tokens,
            num_out,
            num_experts,
            TOP_K=top_k,
            BLOCK_N=block,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return out
