"""Experts against float64, and the compiled ones against themselves in other batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import CLAMPED_SILU, ExpertRouting, Experts, ExpertsShape, Kernels, Residual
from inflight.layers.torch_kernels import TorchKernels
from inflight.layers.triton_kernels import TritonKernels
from tests.layers.test_linear import native

EPS = 1e-6
SOFTMAX = ExpertRouting(num_experts=8, top_k=3, scores="softmax")
ROUTINGS = {
    "softmax": SOFTMAX,
    "normalised": replace(SOFTMAX, normalise=True, scale=1.7),
    "chosen": replace(SOFTMAX, scores="chosen", has_bias=True),
    "sigmoid": replace(SOFTMAX, scores="sigmoid", normalise=True, scale=2.5, has_correction=True),
    "groups": replace(
        SOFTMAX, scores="sigmoid", normalise=True, has_correction=True, num_groups=4, top_groups=2
    ),
    "one of one": ExpertRouting(num_experts=1, top_k=1, scores="softmax"),
    "all": replace(SOFTMAX, top_k=8),
}


@pytest.fixture(params=["native", "torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "triton":
        return TritonKernels(torch.float32, "cpu")
    return native() if request.param == "native" else TorchKernels()


@dataclass(frozen=True)
class Weights:
    """Random weights of a layer of experts."""

    routing: ExpertRouting
    router: Tensor
    router_bias: Tensor
    correction: Tensor
    gate: Tensor  # [E, inner, hidden]
    up: Tensor
    down: Tensor  # [E, hidden, inner]
    gate_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor

    def load(self, experts: Experts, local_experts: range | None = None, bias: bool = False) -> None:
        experts.router.load(self.router)
        if self.routing.has_bias:
            experts.router.load_bias(self.router_bias)
        if self.routing.has_correction:
            assert experts.correction is not None
            experts.correction.copy_(self.correction)
        for expert in range(self.routing.num_experts) if local_experts is None else local_experts:
            for part in ("gate", "up", "down"):
                experts.load(part, expert, getattr(self, part)[expert])
                if bias:
                    experts.load_bias(part, expert, getattr(self, f"{part}_bias")[expert])


def random_weights(
    routing: ExpertRouting, hidden: int, inner: int, dtype: torch.dtype = torch.float32
) -> Weights:
    count = routing.num_experts

    def matrices(*shape: int) -> Tensor:
        scale: float = shape[-1] ** -0.5
        return (torch.randn(*shape) * scale).to(dtype)

    return Weights(
        routing,
        matrices(count, hidden) * 4,
        torch.randn(count),
        torch.randn(count),
        matrices(count, inner, hidden),
        matrices(count, inner, hidden),
        matrices(count, hidden, inner),
        torch.randn(count, inner),
        torch.randn(count, inner),
        torch.randn(count, hidden),
    )


def expected_output(
    weights: Weights,
    x: Tensor,
    norm: Tensor,
    activation: str = "silu",
    limit: float = 0.0,
    bias: bool = False,
) -> Tensor:
    """Compute token by token in float64."""
    routing, x = weights.routing, x.double()
    read = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    out = x.clone()
    for token, row in enumerate(read):
        logits = weights.router.double() @ row + (weights.router_bias.double() if routing.has_bias else 0)
        scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(0)
        ranking = scores + weights.correction.double() if routing.has_correction else scores
        groups = ranking.view(routing.num_groups, -1)
        if routing.num_groups > 1:
            sums = groups.sort(dim=1, descending=True).values[:, :2].sum(1)
            groups[sums.sort(descending=True).indices[routing.top_groups :]] = -torch.inf
        chosen = groups.view(-1).sort(descending=True).indices[: routing.top_k]
        shares = logits[chosen].softmax(0) if routing.scores == "chosen" else scores[chosen]
        if routing.normalise:
            shares = shares / shares.sum()
        for expert, share in zip(chosen.tolist(), shares, strict=True):
            gate, up = weights.gate[expert].double() @ row, weights.up[expert].double() @ row
            if bias:
                gate, up = gate + weights.gate_bias[expert].double(), up + weights.up_bias[expert].double()
            if activation == CLAMPED_SILU:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                inner = (F.silu if activation == "silu" else F.gelu)(gate) * up
            y = weights.down[expert].double() @ inner
            out[token] += share * routing.scale * (y + weights.down_bias[expert].double() if bias else y)
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize("case", ROUTINGS)
def test_experts_match_float64(kernels: Kernels, case: str, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    routing = ROUTINGS[case]
    weights = random_weights(routing, 48, 20)
    experts = kernels.experts(ExpertsShape(48, 20, routing, torch.float32, "silu"))
    weights.load(experts)
    x, norm, next_norm = torch.randn(num_tokens, 48), torch.rand(48) + 0.5, torch.ones(48)
    expected = expected_output(weights, x, norm)
    actual = experts.add_to(Residual(x.clone(), norm), EPS, next_norm)
    torch.testing.assert_close(actual.x.double(), expected, rtol=1e-5, atol=1e-5)
    assert actual.norm is next_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "inner"), [(33, 7), (64, 96)])
@pytest.mark.parametrize(("activation", "limit", "bias"), [(CLAMPED_SILU, 0.8, True), ("gelu", 0.0, True)])
def test_biases_and_other_gates_match_float64(
    kernels: Kernels, dtype: torch.dtype, hidden: int, inner: int, activation: str, limit: float, bias: bool
) -> None:
    torch.manual_seed(hidden)
    routing = ROUTINGS["chosen"]
    weights = random_weights(routing, hidden, inner, dtype)
    experts = kernels.experts(ExpertsShape(hidden, inner, routing, dtype, activation, bias, limit))
    weights.load(experts, bias=bias)
    x, norm = torch.randn(19, hidden), torch.rand(hidden) + 0.5
    expected = expected_output(weights, x, norm, activation, limit, bias)
    actual = experts.add_to(Residual(x.clone(), norm), EPS, None)
    torch.testing.assert_close(actual.x.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [14, 15, 200])
def test_one_expert_may_receive_every_token(kernels: Kernels, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    routing = ExpertRouting(num_experts=4, top_k=1, scores="chosen", has_bias=True)
    weights = random_weights(routing, 64, 32)
    weights.router_bias.copy_(torch.tensor([0.0, 0.0, 1000.0, 0.0]))
    experts = kernels.experts(ExpertsShape(64, 32, routing, torch.float32, "silu"))
    weights.load(experts)
    x, norm = torch.randn(num_tokens, 64), torch.ones(64)
    expected = expected_output(weights, x, norm)
    actual = experts.add_to(Residual(x.clone(), norm), EPS, None).x
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_padding_tokens_have_no_experts(kernels: Kernels) -> None:
    torch.manual_seed(0)
    weights = random_weights(SOFTMAX, 32, 16)
    experts = kernels.experts(ExpertsShape(32, 16, SOFTMAX, torch.float32, "silu"))
    weights.load(experts)
    x, norm = torch.randn(5, 32), torch.ones(32)
    x[4] = torch.nan
    whole = experts.add_to(Residual(x[:4].clone(), norm), EPS, None).x
    padding_mask = torch.tensor([0, -1, 7, 3, -1], dtype=torch.int32)
    some = experts.add_to(Residual(x.clone(), norm), EPS, None, padding_mask).x
    torch.testing.assert_close(some[[0, 2, 3]], whole[[0, 2, 3]], rtol=1e-5, atol=1e-5)
    assert torch.equal(some[1], x[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["softmax", "groups"])
def test_compiled_experts_give_a_token_the_same_bits_in_every_batch(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    routing, norm = ROUTINGS[case], torch.rand(1100) + 0.5
    weights = random_weights(routing, 1100, 70, dtype)
    experts = native().experts(ExpertsShape(1100, 70, routing, dtype, "silu"))
    weights.load(experts)
    x = torch.randn(700, 1100)
    crowd = experts.add_to(Residual(x.clone(), norm), EPS, None).x
    for tokens in ([5], [699, 5], [*range(20)], [*range(0, 700, 3)]):
        some = experts.add_to(Residual(x[tokens], norm), EPS, None).x
        assert torch.equal(some, crowd[tokens])


def test_compiled_experts_survive_logits_that_are_not_finite() -> None:
    weights = random_weights(ROUTINGS["groups"], 32, 16)
    experts = native().experts(ExpertsShape(32, 16, ROUTINGS["groups"], torch.float32, "silu"))
    weights.load(experts)
    x = torch.randn(4, 32)
    x[1], x[2, 3] = torch.nan, torch.inf
    out = experts.add_to(Residual(x.clone(), torch.ones(32)), EPS, None).x
    assert out[[0, 3]].isfinite().all()
    assert not out[1].isfinite().any()


class Sum:
    """Implements `Reduce` for two layers that are called one after the other."""

    def __init__(self) -> None:
        self.other: Tensor | None = None

    def sum(self, x: Tensor) -> Tensor:
        self.other, other = x.clone(), self.other
        return x if other is None else x + other


def test_tokens_of_each_expert_are_counted(kernels: Kernels) -> None:
    torch.manual_seed(0)
    weights = random_weights(SOFTMAX, 32, 16)
    experts = kernels.experts(ExpertsShape(32, 16, SOFTMAX, torch.float32, "silu", local_experts=range(3, 8)))
    weights.load(experts, range(3, 8))
    x, padding_mask = torch.randn(40, 32), torch.ones(40, dtype=torch.int32)
    padding_mask[::7] = -1
    chosen = (x @ weights.router.T).topk(SOFTMAX.top_k).indices  # of experts held elsewhere, too
    for num_tokens in (40, 40, 2):
        experts.add_to(Residual(x[:num_tokens].clone(), None), EPS, None, padding_mask[:num_tokens])
    counts = torch.bincount(chosen[padding_mask > 0].flatten(), minlength=8)
    assert torch.equal(experts.tokens, 2 * counts + torch.bincount(chosen[1], minlength=8))


@pytest.mark.parametrize("num_tokens", [2, 9])
def test_partial_sum_is_reduced_with_that_of_the_experts(kernels: Kernels, num_tokens: int) -> None:
    torch.manual_seed(0)
    weights = random_weights(SOFTMAX, 32, 16)
    x, norm, partial = torch.randn(num_tokens, 32), torch.rand(32) + 0.5, torch.randn(num_tokens, 32)
    expected = expected_output(weights, x, norm) + partial
    for reduce in (None, Sum()):
        experts = kernels.experts(ExpertsShape(32, 16, SOFTMAX, torch.float32, "silu"), reduce)
        weights.load(experts)
        actual = experts.add_to(Residual(x.clone(), norm), EPS, None, partial=partial.clone()).x
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("split", ["inner features", "experts"])
def test_ranks_add_up_to_all_experts(kernels: Kernels, split: str) -> None:
    torch.manual_seed(0)
    routing = ROUTINGS["groups"]
    weights = random_weights(routing, 32, 21)
    x, norm, reduce = torch.randn(9, 32), torch.rand(32) + 0.5, Sum()
    for rank, part in enumerate((range(13), range(13, 21))):
        local_experts = (range(5), range(5, 8))[rank] if split == "experts" else range(8)
        features = range(21) if split == "experts" else part
        rank_weights = replace(
            weights,
            gate=weights.gate[:, features.start : features.stop],
            up=weights.up[:, features.start : features.stop],
            down=weights.down[:, :, features.start : features.stop],
        )
        experts = kernels.experts(
            ExpertsShape(32, len(features), routing, torch.float32, "silu", local_experts=local_experts),
            reduce,
        )
        rank_weights.load(experts, local_experts)
        actual = experts.add_to(Residual(x.clone(), norm), EPS, None).x
    torch.testing.assert_close(actual.double(), expected_output(weights, x, norm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gate", 4, torch.zeros(16, 32)), "expert 4: experts 0 to 3 are held here"),
        (("gate", -1, torch.zeros(16, 32)), "expert -1"),
        (("side", 0, torch.zeros(16, 32)), "'side' of an expert: it must be gate, up or down"),
        (("gate", 0, torch.zeros(32, 16)), r"shape \[32, 16\] does not fit .* \[16, 32\]"),
        (("down", 0, torch.zeros(32, 16), 1), r"does not fit at row 1, column 0: the layer is \[32, 16\]"),
        (("up", 3, torch.zeros(16)), r"shape \[16\] does not fit"),
    ],
)
def test_weights_that_do_not_fit_are_rejected(
    kernels: Kernels, arguments: tuple[str, int, Tensor], message: str
) -> None:
    experts = kernels.experts(ExpertsShape(32, 16, replace(SOFTMAX, num_experts=4), torch.float32, "silu"))
    with pytest.raises(ConfigError, match=message):
        experts.load(*arguments)
    with pytest.raises(ConfigError, match="created without one"):
        experts.load_bias("gate", 0, torch.zeros(16))
    with pytest.raises(ConfigError, match="a gate's activation is 'relu'"):
        kernels.experts(ExpertsShape(32, 16, SOFTMAX, torch.float32, "relu"))
