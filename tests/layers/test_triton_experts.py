"""The kernels of mixtures of experts against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.layers.kernels import ExpertRouting
from inflight.layers.triton.elementwise import ACTIVATIONS
from inflight.layers.triton.expert_parts import CLAMPED, Gate
from inflight.layers.triton.grouped_experts import combine, grouped_down, grouped_gate_up
from inflight.layers.triton.held import PlainWeights
from inflight.layers.triton.linear_parts import NextNorm
from inflight.layers.triton.pair_experts import pair_down, pair_gate_up
from inflight.layers.triton.routing import Chosen, Groups, HalfNormed, RouterProduct, choose_experts
from inflight.layers.triton.tuning import GroupedTile, PairTile

HIDDEN, INNER, EXPERTS, TOP_K = 48, 20, 6, 2
PAIR = PairTile(block_n=8, block_k=32, num_warps=1)
AHEAD = PairTile(block_n=8, block_k=16, num_warps=1, ahead=1)
TILES = {
    "weights left": GroupedTile(block_n=16, block_k=32, num_warps=1, stages=1, weights_left=True),
    "pairs left": GroupedTile(block_n=16, block_k=32, num_warps=1, stages=1, weights_left=False),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(ids: Tensor) -> Chosen:
    """Return random weights for these experts, and the tokens of each expert."""
    num_tokens = len(ids)
    counts, pairs = torch.zeros(EXPERTS).int(), torch.full((EXPERTS, num_tokens), -1).int()
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert < EXPERTS:
            pairs[expert, counts[expert]] = pair
            counts[expert] += 1
    return Chosen(ids.int(), randn(*ids.shape, seed=7).abs(), groups=Groups(counts, pairs))


def random_ids(num_tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(num_tokens)])


IDS = {
    "random": random_ids(37),
    "one token": random_ids(1),
    "one expert gets every token": torch.tensor([[3, 1]] * 17),
    "an expert gets exactly one tile": torch.tensor([[0, 5]] * 16),
    "padding": torch.cat((random_ids(9), torch.full((7, TOP_K), EXPERTS))),
    "only padding": torch.full((4, TOP_K), EXPERTS),
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
    # Large terms may cancel.
    atol = 1e-6 * max(100.0, expected.abs().max().item())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(("activation", "has_bias"), [("silu", False), ("clamped", True)])
@pytest.mark.parametrize("half_normed", [False, True])
@pytest.mark.parametrize("way", ["pairs", *TILES])
def test_experts_match_float64(
    name: str, activation: str, has_bias: bool, half_normed: bool, way: str
) -> None:
    chosen, layer = grouped(IDS[name]), Layer(has_bias)
    num_tokens = len(chosen.ids)
    x, residual = randn(num_tokens, HIDDEN, seed=5), randn(num_tokens, HIDDEN, seed=6)
    factors = randn(num_tokens, seed=8).abs() if half_normed else None
    normed = x if factors is None else x * factors[:, None]
    expected = residual.double() + layer.reference(normed, chosen, activation)
    chosen = replace(chosen, factors=factors)
    gate = Gate(CLAMPED.value if activation == "clamped" else ACTIVATIONS[activation], 7.0)
    gate_up = PlainWeights(layer.gate_up, HIDDEN, layer.gate_up_bias)
    down = PlainWeights(layer.down, INNER, layer.down_bias)
    norm = NextNorm(randn(HIDDEN, seed=9))
    if way == "pairs":
        inner = pair_gate_up(x, gate_up, chosen, gate, PAIR)
        out = pair_down(inner, down, chosen, AHEAD, residual, norm)
    else:
        tile = TILES[way]
        inner, blocks = grouped_gate_up(x, gate_up, chosen, 16, gate, tile)
        y = grouped_down(inner, down, chosen, blocks, 16, tile, torch.float32)
        out = combine(y, chosen, x.dtype, residual, norm)
        assert chosen.groups is not None
        assert not chosen.groups.counts.any()  # ready for the next step
    assert out is residual
    close(out, expected)
    assert norm.scaled is not None
    assert norm.squares is not None
    close(norm.scaled, expected * norm.weight)
    close(norm.squares.sum(0), expected.square().sum(1))


@pytest.mark.parametrize("num_experts", [6, 8, 128])
@pytest.mark.parametrize(
    ("scores", "normalise"), [("softmax", True), ("softmax", False), ("sigmoid", True), ("chosen", False)]
)
def test_chosen_experts_match_float64(num_experts: int, scores: str, normalise: bool) -> None:
    logits, top_k = randn(5, num_experts, seed=num_experts), 3
    correction = randn(num_experts, seed=9) if scores == "sigmoid" else None
    padding_mask = torch.tensor([4, 0, -1, 7, 2]).int()
    routing = ExpertRouting(num_experts, top_k, scores, normalise, 2.5)  # type: ignore[arg-type]
    counts, totals = torch.zeros(num_experts).int(), torch.full((num_experts,), 100)
    half = HalfNormed(torch.rand(3, 5), 20, 0.1)
    chosen = choose_experts(
        logits,
        routing,
        totals,
        correction=correction,
        padding_mask=padding_mask,
        counts=counts,
        half_normed=half,
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
    is_token = padding_mask >= 0
    assert chosen.ids[is_token].tolist() == ids[is_token].tolist()
    assert chosen.ids[~is_token].tolist() == [[num_experts] * top_k]
    close(chosen.weights[is_token], 2.5 * weights[is_token])
    assert torch.equal(totals, 100 + torch.bincount(ids[is_token].flatten(), minlength=num_experts))
    assert half.squares is not None
    assert chosen.factors is not None
    close(chosen.factors, (half.squares.sum(0) / 20 + 0.1).rsqrt())


@pytest.mark.parametrize("num_experts", [6, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_router_in_the_choosing_kernel_matches_float64(
    num_experts: int, dtype: torch.dtype, has_bias: bool
) -> None:
    num_tokens, hidden, top_k = 5, 24, 3
    x, weight = randn(num_tokens, hidden).to(dtype), randn(num_experts, hidden, seed=1).to(dtype)
    bias = randn(num_experts, seed=2).to(dtype) if has_bias else None
    padding_mask = torch.tensor([4, 0, -1, 7, 2]).int()
    arrived, totals = torch.zeros(8).int(), torch.zeros(num_experts).long()
    half = HalfNormed(torch.rand(3, num_tokens), hidden, 0.1)
    assert half.squares is not None
    x[2] = float("nan")  # padding
    product = RouterProduct(x, weight, bias, arrived)
    factors = (half.squares.double().sum(0) / hidden + 0.1).rsqrt()
    wide = x.double() @ weight.double().T * factors[:, None] + (0.0 if bias is None else bias.double())
    probabilities, ids = wide.softmax(-1).topk(top_k)
    is_token = padding_mask >= 0
    for _ in range(2):  # arrivals are zero again
        counts = torch.zeros(num_experts).int()
        chosen = choose_experts(
            product, ExpertRouting(num_experts, top_k, "softmax"), totals,
            padding_mask=padding_mask, counts=counts, half_normed=half,
        )  # fmt: skip
        assert chosen.ids[is_token].tolist() == ids[is_token].tolist()
        assert chosen.ids[~is_token].tolist() == [[num_experts] * top_k]
        close(chosen.weights[is_token], probabilities[is_token])
        assert chosen.factors is not None
        close(chosen.factors, factors)
        assert counts.tolist() == torch.bincount(ids[is_token].flatten(), minlength=num_experts).tolist()
    assert not arrived.any()


@pytest.mark.parametrize("local_experts", [range(6), range(2, 5)])
def test_every_pair_is_in_the_group_of_its_expert(local_experts: range) -> None:
    logits = randn(40, 6)
    routing = ExpertRouting(6, 2, "softmax")
    counts, totals = torch.zeros(len(local_experts)).int(), torch.zeros(6).long()
    chosen = choose_experts(logits, routing, totals, local_experts=local_experts, counts=counts)
    ids = logits.topk(2).indices.flatten().tolist()
    assert chosen.groups is not None
    for index, expert in enumerate(local_experts):
        pairs = [pair for pair, other in enumerate(ids) if other == expert]
        assert chosen.groups.counts[index] == len(pairs)
        assert sorted(chosen.groups.pairs[index, : len(pairs)].tolist()) == pairs
    assert totals.tolist() == [ids.count(expert) for expert in range(6)]  # also of experts held elsewhere


def test_experts_outside_the_best_groups_are_not_chosen() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 9.0, 2.0, 3.0, 4.0, 4.0]])  # sums of two: 0, 9, 5, 8
    routing = ExpertRouting(8, 4, "sigmoid", normalise=True, num_groups=4, top_groups=2)
    chosen = choose_experts(logits, routing, torch.zeros(8).long(), correction=logits[0].clone())
    assert sorted(chosen.ids[0].tolist()) == [2, 3, 6, 7]
