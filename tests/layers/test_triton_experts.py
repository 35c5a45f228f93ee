"""The kernels of mixtures of experts against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.layers.triton.elementwise import ACTIVATIONS
from inflight.layers.triton.experts import (
    CLAMPED,
    Chosen,
    choose_experts,
    combine,
    group_pairs,
    grouped_down,
    grouped_gate_up,
    pair_down,
    pair_gate_up,
)
from inflight.layers.triton.linear_parts import NextNorm
from inflight.layers.triton.tuning import GroupedTile, PairTile

HIDDEN, INNER, EXPERTS, TOP_K = 48, 20, 6, 2
PAIR = PairTile(block_n=8, block_k=32, num_warps=1)
TILES = {
    "weights left": GroupedTile(block_n=16, block_k=32, num_warps=1, stages=1, weights_left=True),
    "pairs left": GroupedTile(block_n=16, block_k=32, num_warps=1, stages=1, weights_left=False),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_choice(num_tokens: int, seed: int = 0) -> Chosen:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)])
    return Chosen(ids.int(), torch.rand(num_tokens, TOP_K, generator=generator))


CHOICES = {
    "random": random_choice(37),
    "one token": random_choice(1),
    "one expert gets every token": Chosen(torch.tensor([[3, 1]] * 17).int(), torch.rand(17, TOP_K)),
    "an expert gets exactly one tile": Chosen(torch.tensor([[0, 5]] * 16).int(), torch.rand(16, TOP_K)),
    "padding": Chosen(
        torch.cat((random_choice(9).ids, torch.full((7, TOP_K), EXPERTS).int())), torch.rand(16, TOP_K)
    ),
    "only padding": Chosen(torch.full((4, TOP_K), EXPERTS).int(), torch.rand(4, TOP_K)),
}


def activated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return torch.nn.functional.silu(gate) * up


class Layer:
    """Random experts, and what they compute in float64."""

    def __init__(self, has_bias: bool) -> None:
        self.gate_up = randn(EXPERTS, 2 * INNER, HIDDEN, seed=1)
        self.down = randn(EXPERTS, HIDDEN, INNER, seed=2)
        self.gate_up_bias = randn(EXPERTS, 2 * INNER, seed=3) if has_bias else None
        self.down_bias = randn(EXPERTS, HIDDEN, seed=4) if has_bias else None

    def reference(self, x: Tensor, chosen: Chosen, activation: str) -> Tensor:
        """Return what is added to each token."""
        total = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        for token, (ids, weights) in enumerate(
            zip(chosen.ids.tolist(), chosen.weights.double(), strict=True)
        ):
            for expert, weight in zip(ids, weights, strict=True):
                if expert == EXPERTS:
                    continue
                both = self.gate_up[expert].double() @ x[token].double()
                if self.gate_up_bias is not None:
                    both += self.gate_up_bias[expert].double()
                y = self.down[expert].double() @ activated(both[0::2], both[1::2], activation)
                if self.down_bias is not None:
                    y += self.down_bias[expert].double()
                total[token] += weight * y
        return total


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(("activation", "has_bias"), [("silu", False), ("clamped", True)])
@pytest.mark.parametrize("way", ["pairs", *TILES])
def test_experts_match_float64(name: str, activation: str, has_bias: bool, way: str) -> None:
    chosen, layer = CHOICES[name], Layer(has_bias)
    num_tokens = len(chosen.ids)
    x, residual = randn(num_tokens, HIDDEN, seed=5), randn(num_tokens, HIDDEN, seed=6)
    expected = residual.double() + layer.reference(x, chosen, activation)
    code = CLAMPED if activation == "clamped" else ACTIVATIONS[activation]
    norm = NextNorm(torch.rand(HIDDEN) + 0.5)
    if way == "pairs":
        inner = pair_gate_up(x, layer.gate_up, layer.gate_up_bias, chosen, code, PAIR, 7.0)
        out = pair_down(inner, layer.down, layer.down_bias, chosen, PAIR, residual, norm)
    else:
        tile = TILES[way]
        blocks = group_pairs(chosen, EXPERTS, 16)
        inner = grouped_gate_up(x, layer.gate_up, layer.gate_up_bias, chosen, blocks, code, tile, 7.0)
        y = grouped_down(inner, layer.down, layer.down_bias, chosen, blocks, tile, torch.float32)
        out = combine(y, chosen, EXPERTS, x.dtype, residual, norm)
    assert out is residual
    close(out, expected)
    assert norm.scaled is not None
    assert norm.squares is not None
    close(norm.scaled, expected * norm.weight)
    close(norm.squares.sum(0), expected.square().sum(1))


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("block_m", [16, 32])
def test_blocks_hold_every_pair_once_and_one_expert_each(name: str, block_m: int) -> None:
    chosen = CHOICES[name]
    blocks = group_pairs(chosen, EXPERTS, block_m)
    num_blocks, ids = int(blocks.num_blocks), chosen.ids.flatten().tolist()
    assert num_blocks <= blocks.max_blocks
    seen = []
    for block, expert in enumerate(blocks.experts[:num_blocks].tolist()):
        pairs = blocks.pairs[block * block_m : (block + 1) * block_m].tolist()
        real = [pair for pair in pairs if pair < len(ids)]
        assert pairs == real + [len(ids)] * (block_m - len(real))
        assert {ids[pair] for pair in real} == {expert}
        seen += real
    assert sorted(seen) == [pair for pair, expert in enumerate(ids) if expert < EXPERTS]


@pytest.mark.parametrize("num_experts", [6, 8, 128])
@pytest.mark.parametrize(
    ("scores", "normalise"), [("softmax", True), ("softmax", False), ("sigmoid", True), ("chosen", False)]
)
def test_chosen_experts_match_float64(num_experts: int, scores: str, normalise: bool) -> None:
    logits, top_k = randn(5, num_experts, seed=num_experts), 3
    correction = randn(num_experts, seed=9) if scores == "sigmoid" else None
    live = torch.tensor([4, 0, -1, 7, 2]).int()
    chosen = choose_experts(
        logits, top_k, scores=scores, normalise=normalise, scale=2.5, correction=correction, live=live
    )
    wide = logits.double()
    values = {"softmax": wide.softmax(-1), "sigmoid": wide.sigmoid(), "chosen": wide}[scores]
    ranking = values if correction is None else values + correction.double()
    ids = ranking.topk(top_k).indices
    weights = values.gather(1, ids)
    if scores == "chosen":
        weights = weights.softmax(-1)
    elif normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    is_live = live >= 0
    assert chosen.ids[is_live].tolist() == ids[is_live].tolist()
    assert chosen.ids[~is_live].tolist() == [[num_experts] * top_k]
    close(chosen.weights[is_live], 2.5 * weights[is_live])


def test_experts_outside_the_best_groups_are_not_chosen() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 9.0, 2.0, 3.0, 4.0, 4.0]])  # sums of two: 0, 9, 5, 8
    options = {"scores": "sigmoid", "normalise": True, "scale": 1.0}
    correction = logits[0].clone()
    chosen = choose_experts(logits, 4, correction=correction, num_groups=4, top_groups=2, **options)  # type: ignore[arg-type]
    assert sorted(chosen.ids[0].tolist()) == [2, 3, 6, 7]
