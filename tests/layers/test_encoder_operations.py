"""Operations that only encoders use: layer norms, activations and the exact GELU, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inflight.errors import ConfigError
from inflight.layers.kernels import ACTIVATIONS
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.torch_kernels import TorchKernels
from tests.layers.test_elementwise import assert_near, native

CpuKernels = NativeKernels | TorchKernels

EXACT = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return native() if request.param == "native" else TorchKernels()


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 64), (40, 384)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_matches_float64(kernels: CpuKernels, shape: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(shape) + 3, torch.randn(shape), torch.randn(shape[1])
    bias = torch.randn(shape[1]) if has_bias else None
    wide = None if bias is None else bias.double()
    actual = kernels.layer_norm(x, weight, bias, 1e-12)
    assert_near(actual, F.layer_norm(x.double(), shape[1:], weight.double(), wide, 1e-12))
    expected = F.layer_norm((residual + x).double(), shape[1:], weight.double(), wide, 1e-5)
    assert_near(kernels.add_layer_norm(residual, x, weight, bias, 1e-5), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_product_with_an_activation_matches_float64(kernels: CpuKernels, activation: str) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(33, 24) / 4, torch.randn(33), torch.randn(7, 24)
    linear = kernels.linear(24, 33, torch.float32, bias=True)
    linear.load(weight)
    linear.load_bias(bias)
    expected = EXACT[activation](F.linear(x.double(), weight.double(), bias.double()))
    torch.testing.assert_close(linear.activated(x, activation).double(), expected, rtol=5e-6, atol=5e-6)
    with pytest.raises(ConfigError, match="activation is 'mish': it must be one of gelu, gelu_tanh"):
        linear.activated(x, "mish")


def test_gate_with_the_exact_gelu_matches_float64(kernels: CpuKernels) -> None:
    torch.manual_seed(2)
    x = torch.randn(9, 2 * 40) * 3
    first, second = x.double().chunk(2, dim=-1)
    # 1 + erf(x) of an x far below zero is a difference of neighbours in float32.
    torch.testing.assert_close(kernels.gate(x, "gelu").double(), F.gelu(first) * second, rtol=5e-6, atol=5e-6)


def test_token_has_the_same_bits_in_any_batch(kernels: CpuKernels) -> None:
    torch.manual_seed(3)
    x, weight, bias = torch.randn(90, 384), torch.randn(384), torch.randn(384)
    normed = kernels.layer_norm(x, weight, bias, 1e-12)
    added = kernels.add_layer_norm(x.clone(), normed, weight, None, 1e-12)
    for i in (0, 41, 89):
        one = slice(i, i + 1)
        assert torch.equal(kernels.layer_norm(x[one], weight, bias, 1e-12), normed[one])
        assert torch.equal(
            kernels.add_layer_norm(x[one].clone(), normed[one], weight, None, 1e-12), added[one]
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_any_size_match_float64(kernels: CpuKernels, activation: str) -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([1e-30, -1e-6, -1e4, 1e30, torch.inf])])
    if isinstance(kernels, TorchKernels):
        x = x[:-1]  # torch's own GELU of infinity is NaN on some CPUs
    linear = kernels.linear(1, 1, torch.float32, bias=False)
    linear.load(torch.ones(1, 1))
    actual = linear.activated(x.unsqueeze(1), activation)[:, 0]
    torch.testing.assert_close(actual.double(), EXACT[activation](x.double()), rtol=1e-6, atol=1e-6)
    assert linear.activated(torch.tensor([[torch.nan]]), activation).isnan()
