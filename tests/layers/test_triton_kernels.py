"""The GPU's kernels against float64: norms, gates, and operations of decoders with few and with many tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.layers.triton.elementwise import add_normed, embed, gate, rms_norm
from inflight.layers.triton_kernels import TritonKernels
from tests.layers.test_triton_small_linear import DEVICE, TOLERANCE, assert_near, draw, normed64, reference

FEW = 4  # tokens, so that the threshold is crossed by small tests


def make(kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> Linear:
    linear = kernels.linear(weight.shape[1], weight.shape[0], weight.dtype, bias is not None)
    linear.load(weight)
    if bias is not None:
        linear.load_bias(bias)
    return linear


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 17), (40, 64), (5, 4, 128), (3, 2, 20), (2, 3, 4, 24), (2, 5000)]
)
def test_rms_norm_matches_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1])
    actual = rms_norm(x, weight, 1e-6)
    assert actual.shape == x.shape
    assert_near(actual, normed64(x, weight, 1e-6), dtype)


def test_rms_norm_of_views_matches_float64() -> None:
    torch.manual_seed(1)
    packed, weight = draw(6, 7 * 32), draw(32)
    for x in (
        packed.view(6, 7, 32)[:, 2:5],
        packed[:, 32:64],
        packed.view(6, 7, 32).transpose(1, 2)[..., :7],
        packed.view(2, 3, 7, 32)[:, 1:, 2:5],
    ):
        scale = weight[: x.shape[-1]]
        assert_near(rms_norm(x, scale, 1e-5), normed64(x, scale, 1e-5), torch.float32)


def test_rms_norm_of_large_values_and_of_no_tokens() -> None:
    x = torch.full((2, 48), 3e4, dtype=torch.float16, device=DEVICE)
    ones = torch.ones(48, device=DEVICE)
    assert torch.equal(rms_norm(x, ones, 1e-6), torch.ones_like(x))
    assert torch.equal(rms_norm(torch.zeros_like(x), ones, 1e-6), torch.zeros_like(x))
    assert rms_norm(x[:0], ones, 1e-6).shape == (0, 48)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm_is_added_in_place(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    residual, x, weight = draw(5, 40, dtype=dtype), draw(5, 40, dtype=dtype), draw(40)
    expected = residual.double() + normed64(x, weight, 1e-6)
    assert add_normed(residual, x, weight, 1e-6) is residual
    assert_near(residual, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (2, 2100), (0, 8)])
def test_gate_matches_float64(shape: tuple[int, int], activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    gate_up = draw(*shape, dtype=dtype, scale=3.0)
    identity = torch.eye(shape[1], device=DEVICE)
    assert_near(gate(gate_up, activation), reference(gate_up, identity, activation=activation), dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_far_from_zero_matches_float64(activation: str) -> None:
    values = torch.tensor([-1e4, -90.0, 90.0, 1e4], device=DEVICE)
    actual = gate(torch.cat((values, torch.ones(4, device=DEVICE))).unsqueeze(0), activation)
    torch.testing.assert_close(actual[0], values.clamp(min=0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("num_tokens", "with_bias"),
    [(0, False), (1, True), (FEW, False), (FEW + 1, True), (11, False)],
)
def test_operations_of_decoders_match_torch(num_tokens: int, with_bias: bool, dtype: torch.dtype) -> None:
    check_the_decoders_operations(TritonKernels(dtype, DEVICE, few_tokens=FEW), num_tokens, with_bias)


@pytest.mark.parametrize(
    ("num_tokens", "with_bias", "dtype"),
    [
        (16, True, torch.float16),
        (17, False, torch.bfloat16),
        (40, False, torch.float16),
        (70, True, torch.bfloat16),
    ],
)
def test_operations_of_decoders_with_more_tokens_match_torch(
    num_tokens: int, with_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm is fused into the product or runs before it; nothing is left to cuBLAS."""
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    check_the_decoders_operations(TritonKernels(dtype, DEVICE), num_tokens, with_bias)


def check_the_decoders_operations(kernels: Kernels, num_tokens: int, with_bias: bool) -> None:
    torch.manual_seed(num_tokens)
    dtype = kernels.compute_dtype
    x, norm, next_norm = draw(num_tokens, 40, dtype=dtype), draw(40), draw(24)
    weight, bias = draw(24, 40, dtype=dtype, scale=0.15), draw(24, dtype=dtype) if with_bias else None
    back_weight = draw(36, 24, dtype=dtype, scale=0.2)
    linear, back = make(kernels, weight, bias), make(kernels, back_weight)
    residual = draw(num_tokens, 24, dtype=dtype)

    assert_near(linear(x), reference(x, weight, bias=bias), dtype)
    for in_norm in (norm, None):
        read = Residual(x, in_norm)
        expected = reference(x, weight, in_norm, 1e-5, bias)
        assert_near(linear.normed(read, 1e-5), expected, dtype)
        for activation in ("silu", "gelu_tanh"):
            gated = reference(x, weight, in_norm, 1e-5, bias, activation)
            assert_near(linear.gated(read, 1e-5, activation), gated, dtype)
    plain = reference(x, weight, bias=bias)
    for out_norm in (None, draw(24)):
        expected = residual.double() + normed64(plain, out_norm, 1e-5)
        added = linear.add_to(Residual(residual.clone(), None), x, out_norm, 1e-5, next_norm)
        assert_near(added.x, expected, dtype)
        assert added.norm is next_norm
        for read in (added, Residual(added.x, next_norm)):
            actual = back.normed(read, 1e-5)
            assert_near(actual, reference(added.x, back_weight, next_norm, 1e-5), dtype)
            gated = reference(added.x, back_weight, next_norm, 1e-5, activation="silu")
            assert_near(back.gated(read, 1e-5, "silu"), gated, dtype)


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "left"),
    [
        (1, torch.bfloat16, True),
        (20, torch.bfloat16, True),
        (60, torch.bfloat16, True),
        (2, torch.float32, True),
        (2, torch.float16, False),
        (300, torch.bfloat16, False),
    ],
)
def test_half_of_the_next_norm_is_precomputed_where_that_is_safe(
    num_tokens: int, dtype: torch.dtype, left: bool
) -> None:
    """cuBLAS precomputes nothing, and float16 may not hold hidden states times a norm weight."""
    kernels = TritonKernels(dtype, DEVICE)
    linear = make(kernels, draw(24, 40, dtype=dtype))
    residual = Residual(draw(num_tokens, 24, dtype=dtype), None)
    x = draw(num_tokens, 40, dtype=dtype)
    assert (linear.add_to(residual, x, None, 1e-5, draw(24)).scaled is not None) == left
    assert linear.add_to(residual, x, None, 1e-5, None).scaled is None


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_tokens", [2, FEW + 1])
def test_logits_are_float32(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    kernels = TritonKernels(dtype, DEVICE, few_tokens=FEW)
    x, weight, norm = draw(num_tokens, 32, dtype=dtype), draw(50, 32, dtype=dtype), draw(32)
    actual = make(kernels, weight).logits(x, norm, 1e-6)
    assert actual.dtype == torch.float32
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double(), reference(x, weight, norm, 1e-6), rtol=tolerance, atol=tolerance * 10
    )


def test_large_float16_hidden_states_do_not_overflow() -> None:
    """x times the norm's weight is beyond float16, the normed x is not."""
    kernels = TritonKernels(torch.float16, DEVICE)
    x, norm = (
        torch.full((1, 64), 6e4, dtype=torch.float16, device=DEVICE),
        torch.full((64,), 8.0, device=DEVICE),
    )
    linear = make(kernels, torch.full((16, 64), 0.125, dtype=torch.float16, device=DEVICE))
    assert torch.equal(linear.normed(Residual(x, norm), 1e-6), torch.full((1, 16), 64.0).half().to(DEVICE))


def test_weights_are_loaded_in_pieces_and_read_by_row() -> None:
    kernels = TritonKernels(torch.bfloat16, DEVICE)
    linear = kernels.linear(8, 6, torch.float32, bias=True)
    weight = torch.arange(48.0).view(6, 8)
    linear.load(weight[4:], 4)
    linear.load(weight[:4])
    linear.load_bias(torch.ones(6))
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([5, 0, 5], dtype=dtype, device=DEVICE)
        assert torch.equal(linear.embed(ids).cpu(), weight[[5, 0, 5]].bfloat16())
    assert linear.embed(ids[:0]).shape == (0, 8)
    x = torch.eye(8, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(linear(x).cpu(), weight.T.bfloat16() + 1)


def test_long_rows_are_looked_up_whole() -> None:
    table = draw(4, 5000)
    assert torch.equal(embed(table, torch.tensor([3, 1], device=DEVICE)), table[[3, 1]])


def test_mismatched_tensors_are_rejected() -> None:
    kernels = TritonKernels(torch.float32, DEVICE)
    linear = kernels.linear(4, 6, torch.float32, bias=False)
    with pytest.raises(ConfigError, match="does not fit"):
        linear.load(torch.ones(6, 5))
    with pytest.raises(ConfigError, match="created without one"):
        linear.load_bias(torch.ones(6))
    with pytest.raises(ConfigError, match="must be one of silu, gelu_tanh"):
        kernels.gate(draw(1, 4), "relu")
