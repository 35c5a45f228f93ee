"""Quantizing and cutting matrices, and MXFP4 against transformers."""

from __future__ import annotations

import pytest
import torch

from inflight.errors import ConfigError, WeightsError
from inflight.layers.formats.schemes import FP4_VALUES, Codes, GroupScheme, to_tensor
from inflight.layers.formats.weight_format import Mxfp4Format
from inflight.layers.torch_kernels import TorchKernels

SCHEMES = [
    GroupScheme("fp8"),
    GroupScheme("fp8", 32),
    GroupScheme("int8"),
    GroupScheme("int8", 32, zeros=True),
    GroupScheme("int4", 32),
    GroupScheme("int4", 32, zeros=True),
    GroupScheme("int4", 48),  # the last group is shorter
    GroupScheme("fp4", 32),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_quantized_weight_is_within_half_a_step(scheme: GroupScheme) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 96, dtype=torch.float64)
    weight[3] = 0.0
    matrix = scheme.quantize(weight)
    back = matrix.dequantize(torch.float64)
    assert torch.equal(back[3], torch.zeros(96, dtype=torch.float64))
    error = (back - weight).norm() / weight.norm()
    assert error < {"fp8": 0.03, "int8": 0.01, "int4": 0.12, "fp4": 0.15}[scheme.codes]
    torch.testing.assert_close(matrix.dequantize(), back.float())
    # A quantized matrix is quantized again without any error, unless some weights were clipped.
    if scheme.codes in ("fp8", "fp4") or scheme == GroupScheme("int8"):
        torch.testing.assert_close(scheme.quantize(back).dequantize(torch.float64), back)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_cut_matrix_is_the_cut_of_its_weights(scheme: GroupScheme) -> None:
    torch.manual_seed(0)
    matrix = scheme.quantize(torch.randn(24, 96))
    whole = matrix.dequantize()
    step = scheme.column_multiple
    columns = slice(step, 96)
    for rows in (slice(3, 17), slice(1, None, 2), slice(None)):
        part = matrix[rows, columns]
        assert part.shape == tuple(whole[rows, columns].shape)
        assert torch.equal(part.dequantize(), whole[rows, columns])
    assert torch.equal(matrix[5:9].dequantize(), whole[5:9])
    if step > 2:
        with pytest.raises(WeightsError, match=f"columns 2 to 95 cannot be cut .* multiples of {step}"):
            matrix[:, 2:]


@pytest.mark.parametrize("codes", ["int4", "fp4"])
def test_odd_number_of_columns_is_rejected(codes: Codes) -> None:
    with pytest.raises(WeightsError, match=r"33 columns .* must be even"):
        GroupScheme(codes).empty(4, 33, torch.device("meta"))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_layers_multiply_quantized_weights(scheme: GroupScheme) -> None:
    torch.manual_seed(0)
    first, second, x = torch.randn(16, 96), torch.randn(8, 96), torch.randn(5, 96)
    matrices = [scheme.quantize(first), scheme.quantize(second)]
    expected = x @ torch.cat([to_tensor(matrix) for matrix in matrices]).T
    for kernels in (TorchKernels(quantized=True), TorchKernels()):
        linear = kernels.linear(96, 24, torch.float32, False, scheme=scheme)
        linear.load(matrices[0])
        linear.load(matrices[1], 16)
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(linear.embed(torch.tensor([17])), to_tensor(matrices[1])[1:2])


def test_matrix_of_another_scheme_is_rejected() -> None:
    linear = TorchKernels(quantized=True).linear(32, 8, torch.float32, False, scheme=GroupScheme("fp8"))
    with pytest.raises(
        ConfigError, match="held as int8 cannot be loaded into a layer of 32 columns held as fp8"
    ):
        linear.load(GroupScheme("int8").quantize(torch.randn(8, 32)))


def test_mxfp4_agrees_with_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 24, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (2, 24, 3), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [2, 96, 24]
    for expert in range(2):
        matrix = Mxfp4Format().matrix({"blocks": blocks[expert], "scales": scales[expert]}, 96)
        assert torch.equal(to_tensor(matrix), expected[expert].T)
    with pytest.raises(WeightsError, match="scales contains NaN"):
        Mxfp4Format().matrix({"blocks": blocks[0], "scales": scales[0] | 255}, 96)
    with pytest.raises(WeightsError, match="blocks of 32 columns, but the matrix has 90"):
        Mxfp4Format().tensors(24, 90)
    assert set(FP4_VALUES) == {value for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for value in (value, -value)}
