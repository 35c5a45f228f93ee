"""Products in bfloat16 instructions against float64, and against themselves in other batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import ExpertsShape, Residual
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels
from tests.layers.test_experts import EPS, ROUTINGS, expected_output, random_weights
from tests.layers.test_linear import make, native

BF16 = torch.bfloat16


@pytest.fixture(params=["avx512_bf16", "amx_bf16"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return native(request.param)


def assert_rounded_product(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    expected = x.bfloat16().double() @ weight.double().T + (0 if bias is None else bias.double())
    # Products are exact in float32, and every sum is rounded.
    tolerance = 1e-6 * weight.shape[1] ** 0.5 * 4
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_tokens", [1, 2, 13, 14, 15, 16, 17, 32, 33])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (17, 31), (64, 64), (129, 33), (256, 100), (3073, 40)]
)
def test_product_matches_float64_on_rounded_activations(
    kernels: NativeKernels, num_tokens: int, in_features: int, out_features: int
) -> None:
    torch.manual_seed(num_tokens)
    weight, bias = torch.randn(out_features, in_features).to(BF16), torch.randn(out_features)
    x = torch.randn(num_tokens, in_features)
    assert_rounded_product(make(kernels, weight)(x), x, weight)
    assert_rounded_product(make(kernels, weight, bias)(x), x, weight, bias)


@pytest.mark.parametrize(("in_features", "out_features"), [(96, 77), (1030, 64), (3000, 130)])
def test_row_has_the_same_bits_in_every_batch_and_with_any_number_of_threads(
    kernels: NativeKernels, in_features: int, out_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    linear = make(kernels, torch.randn(out_features, in_features).to(BF16), torch.randn(out_features))
    x = torch.randn(600, in_features)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    for threads in (1, 2, 5):
        monkeypatch.setattr(native_library(), "threads", threads)
        for num_tokens in (2, 3, 8, 13, 14, 15, 16, 17, 31, 32, 33, 47, 64, 191, 600):
            assert torch.equal(linear(x[:num_tokens]), alone[:num_tokens])
        assert torch.equal(linear(x.flip(0)), alone.flip(0))


def test_activations_are_applied_to_the_sums(kernels: NativeKernels) -> None:
    torch.manual_seed(2)
    weight, bias = torch.randn(70, 90).to(BF16), torch.randn(70)
    linear, x = make(kernels, weight, bias), torch.randn(40, 90)
    expected = F.gelu(x.bfloat16().double() @ weight.double().T + bias.double())
    torch.testing.assert_close(linear.activated(x, "gelu").double(), expected, rtol=1e-5, atol=1e-5)


def test_embeddings_are_the_weights(kernels: NativeKernels) -> None:
    weight = torch.randn(75, 41).to(BF16)
    ids = torch.tensor([0, 74, 31, 32, 33, 16, 15, 0])
    assert torch.equal(make(kernels, weight).embed(ids), weight[ids].float())


def test_row_that_is_not_finite_leaves_its_neighbours_alone(kernels: NativeKernels) -> None:
    torch.manual_seed(3)
    linear, x = make(kernels, torch.randn(40, 50).to(BF16)), torch.randn(6, 50)
    expected = linear(x)
    x[2], x[4, 7] = torch.nan, torch.inf
    assert torch.equal(linear(x)[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])
    assert linear(x)[2].isnan().all()


def test_float32_weights_are_not_rounded(kernels: NativeKernels) -> None:
    torch.manual_seed(4)
    weight, x = torch.randn(40, 50), torch.randn(6, 50)
    assert torch.equal(make(kernels, weight)(x), make(native(), weight)(x))


@pytest.mark.parametrize("case", ["softmax", "chosen", "groups"])
def test_experts_match_float64_up_to_the_rounding_of_activations(kernels: NativeKernels, case: str) -> None:
    torch.manual_seed(5)
    routing, norm = ROUTINGS[case], torch.rand(64) + 0.5
    weights = random_weights(routing, 64, 48, BF16)
    experts = kernels.experts(ExpertsShape(64, 48, routing, BF16, "silu"))
    weights.load(experts)
    x = torch.randn(50, 64)
    actual = experts.add_to(Residual(x.clone(), norm), EPS, None).x
    torch.testing.assert_close(actual.double(), expected_output(weights, x, norm), rtol=0.02, atol=0.02)


def test_experts_give_a_token_the_same_bits_in_every_batch(kernels: NativeKernels) -> None:
    torch.manual_seed(6)
    routing, norm = ROUTINGS["groups"], torch.rand(1100) + 0.5
    weights = random_weights(routing, 1100, 70, BF16)
    experts = kernels.experts(ExpertsShape(1100, 70, routing, BF16, "silu"))
    weights.load(experts)
    x = torch.randn(700, 1100)
    crowd = experts.add_to(Residual(x.clone(), norm), EPS, None).x
    for tokens in ([5], [699, 5], [*range(20)], [*range(0, 700, 3)]):
        assert torch.equal(experts.add_to(Residual(x[tokens], norm), EPS, None).x, crowd[tokens])


def test_norm_gate_and_residual_are_those_of_single_operations(kernels: NativeKernels) -> None:
    torch.manual_seed(7)
    weight, bias, norm = torch.randn(84, 70).to(BF16), torch.randn(84), torch.rand(70) + 0.5
    linear, x = make(kernels, weight, bias), torch.randn(37, 70)
    product = linear(kernels.rms_norm(x, norm, EPS))
    assert torch.equal(linear.normed(Residual(x, norm), EPS), product)
    assert torch.equal(linear.normed(Residual(x, None), EPS), linear(x))
    assert torch.equal(linear.logits(x, norm, EPS), product)
    assert torch.equal(linear.gated(Residual(x, norm), EPS, "silu"), kernels.gate(product, "silu"))
    hidden, next_norm = torch.randn(37, 84), torch.ones(84)
    added = linear.add_to(Residual(hidden.clone(), None), x, None, EPS, next_norm)
    assert torch.equal(added.x, hidden + linear(x))
    assert added.norm is next_norm
    out_norm = torch.rand(84)
    normed = linear.add_to(Residual(hidden.clone(), None), x, out_norm, EPS, None)
    assert torch.equal(normed.x, hidden + kernels.rms_norm(linear(x), out_norm, EPS))


def test_mismatched_residual_and_norm_are_rejected(kernels: NativeKernels) -> None:
    linear = make(kernels, torch.ones(6, 4).to(BF16))
    with pytest.raises(ConfigError, match=r"must be \[2, 6\]"):
        linear.add_to(Residual(torch.ones(2, 5), None), torch.ones(2, 4), None, EPS, None)
    with pytest.raises(ConfigError, match=r"must be float32 \[4\]"):
        linear.normed(Residual(torch.ones(2, 4), torch.ones(3)), EPS)
