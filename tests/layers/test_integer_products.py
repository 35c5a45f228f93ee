"""Products of int8 and int4 weights against float64, and against themselves in other batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats.schemes import GroupScheme, QuantizedMatrix
from inflight.layers.kernels import ExpertRouting, ExpertsShape, Linear, Residual
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.native_linears import NativeLinear, Panels, QuantizedPanels
from tests.layers.test_linear import native

EPS = 1e-6
INT8 = GroupScheme("int8")
SCHEMES = [INT8, GroupScheme("int4", 32), GroupScheme("int4", 128, zeros=True), GroupScheme("int4", 8)]


@pytest.fixture(params=["", "vnni", "amx_int8"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return native(*([request.param] if request.param else []))


def make(kernels: NativeKernels, matrix: QuantizedMatrix, bias: Tensor | None = None) -> Linear:
    out_features, in_features = matrix.shape
    linear = kernels.linear(in_features, out_features, torch.bfloat16, bias is not None, scheme=matrix.scheme)
    linear.load(matrix)
    if bias is not None:
        linear.load_bias(bias)
    return linear


def is_held_in(kind: type[object], linear: Linear) -> bool:
    return isinstance(linear, NativeLinear) and isinstance(linear._weights, kind)


def rounded(x: Tensor) -> Tensor:
    """Return x as the layers see it: whole multiples of a 127th of each row's largest magnitude."""
    scales = x.abs().amax(dim=1, keepdim=True) / 127
    return (x / scales).round().double() * scales.double()


def assert_product(linear: Linear, x: Tensor, matrix: QuantizedMatrix, bias: Tensor | None = None) -> None:
    weight = matrix.dequantize(torch.float64)
    expected = rounded(x) @ weight.T + (0 if bias is None else bias.double())
    # Activations halfway between two integers may be rounded to either.
    step = x.abs().amax(dim=1, keepdim=True).double() / 127
    assert ((linear(x).double() - expected).abs() <= 1e-4 + 1.01 * step * weight.abs().amax()).all()
    assert (linear(x).double() - expected).abs().mean() < 1e-3


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("num_tokens", [1, 2, 11, 14, 17, 33])
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 1), (66, 31), (256, 100), (1152, 40)])
def test_product_matches_float64_on_rounded_activations(
    kernels: NativeKernels, scheme: GroupScheme, num_tokens: int, in_features: int, out_features: int
) -> None:
    torch.manual_seed(num_tokens)
    matrix = scheme.quantize(torch.randn(out_features, in_features) * in_features**-0.5)
    bias, x = torch.randn(out_features), torch.randn(num_tokens, in_features)
    assert is_held_in(QuantizedPanels, make(kernels, matrix))
    assert_product(make(kernels, matrix), x, matrix)
    assert_product(make(kernels, matrix, bias), x, matrix, bias)


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=lambda scheme: scheme.name)
def test_row_has_the_same_bits_in_every_batch_and_with_any_number_of_threads(
    kernels: NativeKernels, scheme: GroupScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    linear = make(kernels, scheme.quantize(torch.randn(77, 1152)), torch.randn(77))
    x = torch.randn(300, 1152)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    for threads in (1, 2, 5):
        monkeypatch.setattr(native_library(), "threads", threads)
        for num_tokens in (2, 3, 8, 11, 12, 13, 14, 15, 17, 32, 33, 64, 300):
            assert torch.equal(linear(x[:num_tokens]), alone[:num_tokens])
        assert torch.equal(linear(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=lambda scheme: scheme.name)
def test_all_instructions_give_the_same_bits(kernels: NativeKernels, scheme: GroupScheme) -> None:
    torch.manual_seed(2)
    matrix, x = scheme.quantize(torch.randn(70, 500)), torch.randn(40, 500)
    assert torch.equal(make(kernels, matrix)(x), make(native(), matrix)(x))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_embeddings_are_the_weights(kernels: NativeKernels, scheme: GroupScheme) -> None:
    torch.manual_seed(3)
    matrix = scheme.quantize(torch.randn(75, 42))
    ids = torch.tensor([0, 74, 31, 32, 33, 16, 15, 0])
    actual = make(kernels, matrix).embed(ids)
    torch.testing.assert_close(actual, matrix.dequantize()[ids], rtol=1e-5, atol=0)


def test_rows_that_are_zero_or_not_finite_leave_their_neighbours_alone(kernels: NativeKernels) -> None:
    torch.manual_seed(4)
    for scheme in SCHEMES[:2]:
        linear, x = make(kernels, scheme.quantize(torch.randn(40, 64))), torch.randn(6, 64)
        expected = linear(x)
        x[1], x[2], x[4, 7] = 0.0, torch.nan, torch.inf
        actual = linear(x)
        assert torch.equal(actual[[0, 3, 5]], expected[[0, 3, 5]])
        assert not actual[1].any()
        assert actual[[2, 4]].isnan().all()


def test_plain_weights_are_quantized_when_they_are_loaded_in_parts(kernels: NativeKernels) -> None:
    torch.manual_seed(5)
    weight, x = torch.randn(100, 64), torch.randn(3, 64)
    linear = kernels.linear(64, 100, torch.bfloat16, bias=False, scheme=INT8)
    linear.load(weight[:37])
    linear.load(INT8.quantize(weight[37:]), 37)
    assert torch.equal(linear(x), make(kernels, INT8.quantize(weight))(x))


def test_schemes_without_kernels_are_widened(kernels: NativeKernels) -> None:
    torch.manual_seed(6)
    for scheme in (
        GroupScheme("int8", 32),
        GroupScheme("int8", zeros=True),
        GroupScheme("int4"),
        GroupScheme("fp8"),
    ):
        matrix, x = scheme.quantize(torch.randn(40, 64)), torch.randn(3, 64)
        linear = kernels.linear(64, 40, torch.float32, bias=False, scheme=scheme)
        linear.load(matrix)
        assert is_held_in(Panels, linear)
        torch.testing.assert_close(linear(x), x @ matrix.dequantize().T, rtol=1e-5, atol=1e-5)


def test_parts_of_rows_and_other_schemes_are_rejected(kernels: NativeKernels) -> None:
    linear = kernels.linear(64, 40, torch.bfloat16, bias=False, scheme=INT8)
    with pytest.raises(ConfigError, match="it takes whole rows"):
        linear.load(torch.ones(40, 32), 0, 32)
    with pytest.raises(ConfigError, match="cannot be loaded into a layer held as int8"):
        linear.load(SCHEMES[1].quantize(torch.ones(40, 64)))


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=lambda scheme: scheme.name)
def test_experts_match_those_with_dequantized_weights(kernels: NativeKernels, scheme: GroupScheme) -> None:
    torch.manual_seed(7)
    routing = ExpertRouting(num_experts=4, top_k=2, scores="softmax")
    sizes = ExpertsShape(64, 96, routing, torch.float32, "silu", gate_up_scheme=scheme, down_scheme=scheme)
    quantized = kernels.experts(sizes)
    exact = native().experts(replace(sizes, gate_up_scheme=None, down_scheme=None))
    router = torch.randn(4, 64)
    quantized.router.load(router)
    exact.router.load(router)
    for expert in range(4):
        for part, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            matrix = scheme.quantize(torch.randn(shape) * 0.1)
            quantized.load(part, expert, matrix)
            exact.load(part, expert, matrix)
    x, norm = torch.randn(30, 64), torch.ones(64)
    actual = quantized.add_to(Residual(x.clone(), norm), EPS, None).x
    expected = exact.add_to(Residual(x.clone(), norm), EPS, None).x
    torch.testing.assert_close(actual, expected, rtol=0.03, atol=0.03)
    few = quantized.add_to(Residual(x[:3].clone(), norm), EPS, None).x
    assert torch.equal(few, actual[:3])
