"""Operations that only encoders use, on a GPU: layer norms, activations and the exact GELU, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inflight.errors import ConfigError
from inflight.layers.kernels import ACTIVATIONS, Residual
from inflight.layers.triton.elementwise import activate_in_place, add_layer_norm, gate, layer_norm
from inflight.layers.triton.tuning import NormTile, choose_norm
from inflight.layers.triton_kernels import TritonKernels
from tests.layers.test_encoder_operations import EXACT
from tests.layers.test_triton_small_linear import DEVICE, TOLERANCE, assert_near, draw


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tile", [None, NormTile(rows=4, num_warps=2)])
@pytest.mark.parametrize(("shape", "has_bias"), [((1, 1), True), ((3, 17), False), ((9, 64), True)])
def test_layer_norm_matches_float64(
    shape: tuple[int, int], has_bias: bool, tile: NormTile | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, residual, weight = draw(*shape, dtype=dtype) + 3, draw(*shape, dtype=dtype), draw(shape[1])
    bias = draw(shape[1]) if has_bias else None
    wide = None if bias is None else bias.double()

    def expected(y: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(y, shape[1:], weight.double(), wide, 1e-5)

    assert_near(layer_norm(x, weight, bias, 1e-5, tile=tile), expected(x.double()), dtype)
    added = expected(residual.double() + x.double())  # not rounded in between
    assert_near(add_layer_norm(residual, x, weight, bias, 1e-5, tile=tile), added, dtype)


def test_layer_norm_of_large_values_and_of_no_tokens() -> None:
    torch.manual_seed(1)
    x, ones = draw(4, 48) + 1000, torch.ones(48, device=DEVICE)
    torch.testing.assert_close(
        layer_norm(x, ones, None, 1e-12).double(), F.layer_norm(x.double(), (48,)), rtol=1e-4, atol=1e-4
    )
    assert layer_norm(x[:0], ones, None, 1e-12).shape == (0, 48)


def test_rows_of_every_length_have_a_tile() -> None:
    for num_features in (1, 384, 768, 1000, 1024, 8192):
        tile = choose_norm(num_features)
        assert tile.num_warps & (tile.num_warps - 1) == 0
        assert 1 <= tile.num_warps <= 16


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_match_float64(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = draw(3, 1100, dtype=dtype, scale=3.0)
    x[0, :4] = torch.tensor([-1e4, -90.0, 90.0, 1e4])
    expected = EXACT[activation](x.double())
    assert activate_in_place(x, activation) is x
    assert_near(x, expected, dtype)
    assert activate_in_place(x[:0], activation).shape == (0, 1100)


def test_exact_gelu_matches_erf() -> None:
    x = torch.linspace(-12, 12, 20_001, device=DEVICE)
    expected = F.gelu(x.double())
    actual = activate_in_place(x, "gelu").double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1.5e-6)
    large = expected.abs() > 1e-3
    torch.testing.assert_close(actual[large], expected[large], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate_with_the_exact_gelu_matches_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    gate_up = draw(5, 2 * 40, dtype=dtype, scale=2.0)
    left, right = gate_up.double().chunk(2, dim=-1)
    assert_near(gate(gate_up, "gelu"), F.gelu(left) * right, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [0, 3, 20])
def test_product_with_an_activation_or_a_gate_matches_float64(num_tokens: int, dtype: torch.dtype) -> None:
    """This covers the kernels for few tokens and cuBLAS."""
    torch.manual_seed(num_tokens)
    kernels = TritonKernels(dtype, DEVICE, few_tokens=4)
    x, weight = draw(num_tokens, 40, dtype=dtype), draw(24, 40, dtype=dtype, scale=0.15)
    bias = draw(24, dtype=dtype)
    linear = kernels.linear(40, 24, dtype, bias=True)
    linear.load(weight)
    linear.load_bias(bias)
    product = F.linear(x.double(), weight.double(), bias.double())
    for activation in ACTIVATIONS:
        assert_near(linear.activated(x, activation), EXACT[activation](product), dtype)
    left, right = product.chunk(2, dim=-1)
    assert_near(linear.gated(Residual(x, None), 0.0, "gelu"), F.gelu(left) * right, dtype)
    with pytest.raises(ConfigError, match="activation is 'mish'"):
        linear.activated(x, "mish")
