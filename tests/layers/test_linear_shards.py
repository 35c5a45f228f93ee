"""Linear layers of every device: loaded by ranges of rows and columns, and sharded over columns."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import Kernels, Linear, Reduce, Residual
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.torch_kernels import TorchKernels
from inflight.layers.triton_kernels import TritonKernels, TritonLinear
from tests.layers.test_triton_small_linear import DEVICE

KINDS = ["torch", "native", "triton", "triton without fused kernels"]


def make_kernels(kind: str) -> Kernels:
    if kind == "torch":
        return TorchKernels()
    if kind == "native":
        library = native_library()
        if library is None:
            pytest.skip("nothing can be compiled here")
        return NativeKernels(library)
    return TritonKernels(torch.float32, DEVICE, few_tokens=256 if kind == "triton" else 0)


@pytest.fixture(params=KINDS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return make_kernels(request.param)


def make(
    kernels: Kernels, weight: Tensor, bias: Tensor | None = None, reduce: Reduce | None = None
) -> Linear:
    linear = kernels.linear(weight.shape[1], weight.shape[0], weight.dtype, bias is not None, reduce)
    linear.load(weight)
    if bias is not None:
        linear.load_bias(bias)
    return linear


def contents(linear: Linear) -> Tensor:
    return linear.embed(torch.arange(linear.out_features, device=device_of(linear)))


def device_of(linear: Linear) -> torch.device:
    return torch.device(DEVICE if isinstance(linear, TritonLinear) else "cpu")


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS[:3]),
    row_cuts=st.sets(st.integers(1, 69), max_size=3),
    column_cuts=st.sets(st.integers(1, 40), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    order=st.randoms(use_true_random=False),
)
def test_loading_by_ranges_equals_loading_at_once(
    kind: str, row_cuts: set[int], column_cuts: set[int], dtype: torch.dtype, order: Random
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, 41).to(dtype)
    kernels = make_kernels(kind)
    linear = kernels.linear(41, 70, dtype, bias=False)
    rows, columns = sorted({0, *row_cuts, 70}), sorted({0, *column_cuts, 41})
    ranges = [
        (row, column, next_row, next_column)
        for row, next_row in pairwise(rows)
        for column, next_column in pairwise(columns)
    ]
    order.shuffle(ranges)
    for row, column, next_row, next_column in ranges:
        linear.load(weight[row:next_row, column:next_column], row, column)
    assert torch.equal(contents(linear), contents(make(kernels, weight)))
    x = torch.randn(3, 41, device=device_of(linear))
    assert torch.equal(linear(x), make(kernels, weight)(x))


def test_loading_a_range_leaves_the_rest_unchanged(kernels: Kernels) -> None:
    linear = make(kernels, torch.zeros(70, 41))
    linear.load(torch.ones(3, 5), 32, 7)
    expected = torch.zeros(70, 41)
    expected[32:35, 7:12] = 1
    assert torch.equal(contents(linear).cpu(), expected)


def test_ranges_outside_are_rejected(kernels: Kernels) -> None:
    linear = make(kernels, torch.zeros(6, 4))
    for weight, row, column in (
        (torch.ones(6, 5), 0, 0),
        (torch.ones(6, 3), 0, 2),
        (torch.ones(2, 4), 5, 0),
        (torch.ones(2, 2), 0, -1),
        (torch.ones(2, 2), -1, 0),
    ):
        with pytest.raises(ConfigError, match=rf"does not fit at row {row}, column {column}"):
            linear.load(weight, row, column)
    assert not contents(linear).any()


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_halves_of_the_columns_add_up_to_the_whole(
    kernels: Kernels, num_tokens: int, with_bias: bool, with_norm: bool
) -> None:
    """Two ranks hold half of the columns each, and see half of the input; each reduces before the residual and the
    norm. One of them has the bias."""
    torch.manual_seed(num_tokens)
    device = device_of(kernels.linear(1, 1, torch.float32, bias=False))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    weight, bias = draw(24, 40) / 6, draw(24) if with_bias else None
    norm, next_norm = draw(24) if with_norm else None, draw(24)
    x, hidden = draw(num_tokens, 40), draw(num_tokens, 24)
    expected = make(kernels, weight, bias).add_to(Residual(hidden.clone(), None), x, norm, 1e-6, next_norm)

    reduced: list[Tensor] = []

    class OtherRank:
        def sum(self, partial: Tensor) -> Tensor:
            """Adds the other rank's simultaneous result."""
            reduced.append(partial.clone())
            return partial + right(x[:, 20:].contiguous())

    left = make(kernels, weight[:, :20], bias, OtherRank())
    right = make(kernels, weight[:, 20:])
    actual = left.add_to(Residual(hidden.clone(), None), x[:, :20].contiguous(), norm, 1e-6, next_norm)

    torch.testing.assert_close(actual.x, expected.x, rtol=1e-5, atol=1e-5)
    assert actual.norm is next_norm
    # It is the product that is reduced, once, and neither the residual nor the norm is in it.
    (partial,) = reduced
    product = x[:, :20] @ weight[:, :20].T + (0 if bias is None else bias)
    torch.testing.assert_close(partial, product, rtol=1e-5, atol=1e-5)
