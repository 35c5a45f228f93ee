"""Quantized linear layers on a GPU, or in Triton's interpreter, against float64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats.schemes import GroupScheme
from inflight.layers.gpu_weights import has_gpu_kernels
from inflight.layers.kernels import Residual
from inflight.layers.triton.held import ConvertedBytes, MultipliedBytes, PlainWeights
from inflight.layers.triton.int4 import pack_int4_scales
from inflight.layers.triton.linear_parts import NextNorm, SplitKWorkspace
from inflight.layers.triton.medium_linear import medium_linear
from inflight.layers.triton.quantized_inputs import quantize_rows
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import LinearTile, choose_medium, choose_small_int4
from inflight.layers.triton_kernels import TritonKernels, TritonLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
ROWS, COLUMNS = 48, 416
SCHEMES = [
    GroupScheme("fp8", inputs="fp8"),
    GroupScheme("fp8", 128, inputs="fp8"),
    GroupScheme("fp8"),
    GroupScheme("fp8", 128),
    GroupScheme("int4", 32),
    GroupScheme("int4", 128),
    GroupScheme("int4", 64, zeros=True),
    GroupScheme("int4"),
    GroupScheme("int8", inputs="int8"),
    GroupScheme("int8", 128, inputs="int8"),
    GroupScheme("int8"),
    GroupScheme("int8", 32, zeros=True, inputs="int8"),  # inputs are not quantized for this
]


def tolerance(scheme: GroupScheme) -> float:
    """The relative error of a product: of bfloat16 or int8, or of inputs in fp8, which the interpreter rounds towards
    zero."""
    return 0.09 if scheme.inputs == "fp8" else 0.012


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def normed(x: Tensor, norm: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()


def make(scheme: GroupScheme, few_tokens: int = 256) -> tuple[TritonLinear, Tensor, Tensor]:
    """Return a layer, its weights in float64 and its bias."""
    torch.manual_seed(0)
    kernels = TritonKernels(torch.bfloat16, DEVICE, few_tokens)
    linear = kernels.linear(COLUMNS, ROWS, torch.bfloat16, True, scheme=scheme)
    assert isinstance(linear, TritonLinear)
    matrix = scheme.quantize(torch.randn(ROWS, COLUMNS, device=DEVICE))
    linear.load(matrix[16:], 16)
    linear.load(matrix[:16])
    bias = torch.randn(ROWS, device=DEVICE).bfloat16()
    linear.load_bias(bias)
    return linear, matrix.dequantize(torch.float64), bias.double()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}, {s.inputs}")
@pytest.mark.parametrize(("num_tokens", "few_tokens"), [(1, 256), (2, 256), (3, 256), (33, 256), (5, 4)])
def test_operations_match_float64(scheme: GroupScheme, num_tokens: int, few_tokens: int) -> None:
    linear, weight, bias = make(scheme, few_tokens)
    x = torch.randn(num_tokens, COLUMNS, device=DEVICE).bfloat16()
    norm = torch.rand(COLUMNS, device=DEVICE) + 0.5
    plain = x.double() @ weight.T + bias
    scaled = normed(x, norm) @ weight.T + bias
    limit = tolerance(scheme)
    assert error(linear(x), plain) < limit
    assert error(linear.normed(Residual(x, norm), EPS), scaled) < limit
    assert error(linear.logits(x, norm, EPS), scaled) < limit
    gate, up = scaled.chunk(2, dim=-1)
    gated = linear.gated(Residual(x, norm), EPS, "silu")
    assert error(gated, torch.nn.functional.silu(gate) * up) < 2 * limit
    hidden, next_norm = torch.randn(num_tokens, ROWS, device=DEVICE).bfloat16(), torch.rand(ROWS) + 0.5
    expected = hidden.double() + plain
    residual = linear.add_to(Residual(hidden, None), x, None, EPS, next_norm.to(DEVICE))
    assert error(residual.x, expected) < limit
    if residual.scaled is not None:
        assert error(residual.scaled, expected * next_norm.to(DEVICE)) < limit


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}, {s.inputs}")
def test_rows_are_looked_up(scheme: GroupScheme) -> None:
    linear, weight, _ = make(scheme)
    ids = torch.tensor([5, 47, 5], device=DEVICE)
    torch.testing.assert_close(linear.embed(ids).double(), weight[ids], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("codes", ["fp8", "int8"])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("split_k", [1, 3])
def test_products_of_codes_match_their_inputs(
    codes: Literal["fp8", "int8"], group: int, split_k: int
) -> None:
    """With inputs as they were quantized, only the result is rounded."""
    torch.manual_seed(0)
    scheme = GroupScheme(codes, group)
    matrix = scheme.quantize(torch.randn(ROWS, COLUMNS, device=DEVICE))
    weight = MultipliedBytes(
        matrix.codes[None], COLUMNS, scheme=scheme, group=group, scales=matrix.scales[None].transpose(1, 2)
    )
    x, norm = torch.randn(70, COLUMNS, device=DEVICE).bfloat16(), torch.rand(COLUMNS, device=DEVICE) + 0.5
    inputs = quantize_rows(x, norm, EPS, group, dtype=matrix.codes.dtype)
    scales = inputs.scales.double().repeat_interleave(group or COLUMNS, 1)[:, :COLUMNS]
    quantized = inputs.codes.double() * scales
    assert error(quantized, normed(x, norm)) < tolerance(GroupScheme(codes, inputs=codes))
    workspace = SplitKWorkspace(torch.device(DEVICE))
    tile = LinearTile(block_m=64, block_n=32, block_k=32, num_warps=4, stages=2, split_k=split_k)
    product = quantized @ matrix.dequantize(torch.float64).T
    assert error(medium_linear(inputs, weight, workspace, tile=tile), product) < 5e-3
    gate, up = product.chunk(2, dim=-1)
    gated = medium_linear(inputs, weight, workspace, activation="silu", tile=tile)
    assert error(gated, torch.nn.functional.silu(gate) * up) < 1e-2


def test_inputs_are_rounded_to_the_nearest_int8() -> None:
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, -2.5, 0.49, -0.51, 126.6]], device=DEVICE)
    inputs = quantize_rows(x, dtype=torch.int8)
    assert inputs.scales.tolist() == [[1.0]]
    assert inputs.codes.tolist() == [[127, -127, 0, 2, -2, 0, -1, 127]]
    assert quantize_rows(torch.zeros(1, 8, device=DEVICE), dtype=torch.int8).codes.tolist() == [[0] * 8]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_inputs_that_are_not_finite_show_in_products_of_int8(value: float) -> None:
    linear = make(GroupScheme("int8", inputs="int8"))[0]
    for num_tokens in (2, 20):
        x = torch.ones(num_tokens, COLUMNS, device=DEVICE).bfloat16()
        x[1, 300] = value
        y = linear(x)
        assert not y[1].isfinite().any()
        assert y[0].isfinite().all()


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_sums_of_many_products_keep_their_precision(codes: Literal["fp8", "int8"]) -> None:
    """8,192 products of equal sign: a sum that lost bits on the way would be off by more than the result's rounding."""
    scheme = GroupScheme(codes, inputs=codes)
    linear = TritonKernels(torch.bfloat16, DEVICE).linear(8192, 16, torch.bfloat16, False, scheme=scheme)
    linear.load(torch.ones(16, 8192, device=DEVICE))
    for num_tokens in (1, 40):
        x = torch.ones(num_tokens, 8192, device=DEVICE).bfloat16()
        assert torch.equal(linear(x), torch.full((num_tokens, 16), 8192.0, device=DEVICE).bfloat16())


def test_rows_too_long_for_exact_sums_are_converted() -> None:
    kernels, scheme = TritonKernels(torch.bfloat16, "meta"), GroupScheme("int8", inputs="int8")
    assert isinstance(kernels.allocate((1, 16, 132_104), scheme), MultipliedBytes)
    assert isinstance(kernels.allocate((1, 16, 132_105), scheme), ConvertedBytes)


@pytest.mark.parametrize("shared_bytes", [227 << 10, 99 << 10])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(("rows", "features"), [(6144, 4096), (28672, 4096), (4096, 14336), (1024, 3072)])
def test_tiles_of_bytes_fit_the_workspace_and_the_chip(
    rows: int, features: int, group: int, shared_bytes: int
) -> None:
    workspace = SplitKWorkspace(torch.device("meta"))
    for num_tokens in (17, 64, 65, 128, 129, 256, 257, 400, 1000, 8192, 32768):
        tile = choose_medium(num_tokens, rows, features, 1, 132, shared_bytes, group)
        if tile.split_k > 1:
            workspace.check(-(-rows // tile.block_n) * -(-num_tokens // tile.block_m), tile)
        assert tile.stages * tile.block_k * (tile.block_m + tile.block_n) <= shared_bytes


INT4_TILES = [
    LinearTile(block_m=64, block_n=64, block_k=128, num_warps=4, stages=2),
    LinearTile(block_m=16, block_n=64, block_k=256, num_warps=4, stages=2, split_k=3),
    LinearTile(block_m=64, block_n=32, block_k=128, num_warps=4, stages=2, scaled=True),
    LinearTile(block_m=64, block_n=64, block_k=256, num_warps=4, stages=2, split_k=2, scaled=True),
]


@pytest.mark.parametrize("scheme", [GroupScheme("int4", 32, zeros=True), GroupScheme("int4", 128)], ids=str)
@pytest.mark.parametrize("tile", INT4_TILES, ids=str)
@pytest.mark.parametrize("num_tokens", [16, 70])
def test_tiles_of_int4_match_float64(scheme: GroupScheme, tile: LinearTile, num_tokens: int) -> None:
    """One tile of tokens or several, weights that are scaled or their sums, and features that end within a step."""
    linear, weight, _ = make(scheme)
    x, norm = torch.randn(num_tokens, COLUMNS, device=DEVICE).bfloat16(), torch.rand(COLUMNS) + 0.5
    workspace, own = SplitKWorkspace(torch.device(DEVICE)), linear.weights
    product = normed(x, norm.to(DEVICE)) @ weight.T
    gate, up = product.chunk(2, dim=-1)
    after: dict[str, Any] = {"norm": norm.to(DEVICE), "eps": EPS, "tile": tile}
    gated = small_linear(x, own, workspace, activation="silu", **after)
    assert error(gated, torch.nn.functional.silu(gate) * up) < 0.02
    hidden, next_norm = (
        torch.randn(num_tokens, ROWS, device=DEVICE).bfloat16(),
        NextNorm(torch.rand(ROWS) + 0.5),
    )
    next_norm.weight = next_norm.weight.to(DEVICE)
    expected = hidden.double() + product
    y = small_linear(x, own, workspace, residual=hidden, next_norm=next_norm, **after)
    assert error(y, expected) < 0.012
    assert next_norm.scaled is not None
    assert next_norm.squares is not None
    assert error(next_norm.scaled, expected * next_norm.weight.double()) < 0.012
    torch.testing.assert_close(next_norm.squares.sum(0), y.float().square().sum(1), rtol=1e-4, atol=0.0)
    # Half of the norm is already done.
    scaled, squares = (x.double() * norm.to(DEVICE)).bfloat16(), x.float().square().sum(1)[None]
    y = small_linear(scaled, own, workspace, squares=squares, eps=EPS, tile=tile)
    assert error(y, product) < 0.012
    assert not workspace.counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_16_bits_are_held_exactly(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    scales, zeros = torch.rand(7, 3).to(dtype).float(), torch.randint(0, 17, (7, 3), dtype=torch.uint8)
    words = pack_int4_scales(scales, zeros, 3)
    assert torch.equal((words & -256).view(torch.float32).T, scales)
    assert torch.equal((words & 255).T, zeros.int())
    assert pack_int4_scales(scales[:, :1], None, 5).shape == (5, 7)


@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_int4_is_dequantized_exactly(group: int) -> None:
    torch.manual_seed(0)
    scheme = GroupScheme("int4", group, zeros=True)
    matrix = scheme.quantize(torch.randn(ROWS, COLUMNS, device=DEVICE))
    matrix.scales.copy_(matrix.scales.bfloat16())
    linear = TritonKernels(torch.float32, DEVICE).linear(COLUMNS, ROWS, torch.float32, False, scheme=scheme)
    linear.load(matrix)
    assert isinstance(linear, TritonLinear)
    assert torch.equal(linear.weights.dense(torch.float32), matrix.dequantize())


@pytest.mark.parametrize("shared_bytes", [227 << 10, 99 << 10])
@pytest.mark.parametrize(("rows", "features"), [(6144, 4096), (28672, 4096), (4096, 14336), (1024, 3072)])
def test_tiles_of_int4_fit_the_workspace_and_the_chip(rows: int, features: int, shared_bytes: int) -> None:
    workspace = SplitKWorkspace(torch.device("meta"))
    for num_tokens in (16, 32, 64, 128, 256):
        tile = choose_small_int4(num_tokens, rows, features, 128, 132, shared_bytes)
        if tile.split_k > 1:
            workspace.check(-(-rows // tile.block_n) * -(-num_tokens // tile.block_m), tile)
        assert tile.stages * tile.block_k * (2 * tile.block_m + tile.block_n // 2) <= shared_bytes


def test_other_schemes_are_held_as_plain_weights() -> None:
    kernels = TritonKernels(torch.bfloat16, DEVICE)
    for scheme in (GroupScheme("int8", 48), GroupScheme("fp4", 32), GroupScheme("int4", 48)):
        assert not has_gpu_kernels(scheme)
        linear = kernels.linear(96, 16, torch.bfloat16, False, scheme=scheme)
        assert isinstance(linear, TritonLinear)
        assert isinstance(linear.weights, PlainWeights)
        matrix = scheme.quantize(torch.randn(16, 96, device=DEVICE))
        linear.load(matrix)
        ids = torch.arange(16, device=DEVICE)
        torch.testing.assert_close(linear.embed(ids).float(), matrix.dequantize(), rtol=1e-2, atol=1e-2)


def test_part_of_a_row_is_rejected() -> None:
    linear = make(GroupScheme("int4", 128))[0]
    with pytest.raises(ConfigError, match="cannot be loaded into a layer of 416 columns"):
        linear.load(GroupScheme("int4", 128).quantize(torch.randn(ROWS, 128, device=DEVICE)))
