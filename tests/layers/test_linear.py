"""Linear layers against float64, and the compiled ones against themselves in other batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import Kernels, Linear
from inflight.layers.native.library import native_library
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.native_linears import LOAD_ROWS, SLAB_BYTES, Slabs
from inflight.layers.torch_kernels import TorchKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def native(*instructions: str) -> NativeKernels:
    """Return compiled kernels that use these instructions beyond those every processor of its kind has."""
    library = native_library()
    if library is None:
        pytest.skip("nothing can be compiled here")
    for instruction in instructions:
        if instruction not in library.instructions:
            pytest.skip(f"this processor has no {instruction}")
    return NativeKernels(library, instructions=frozenset(instructions))


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native() if request.param == "native" else TorchKernels()


def make(kernels: Kernels, weight: Tensor, bias: Tensor | None = None) -> Linear:
    out_features, in_features = weight.shape
    linear = kernels.linear(in_features, out_features, weight.dtype, bias is not None)
    linear.load(weight)
    if bias is not None:
        linear.load_bias(bias)
    return linear


def assert_product(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # A chain of K roundings, each relative to the sum so far.
    tolerance = 1e-6 * weight.shape[1] ** 0.5 * 4
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 13, 14, 15, 16, 28, 29, 33])
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (17, 31), (64, 64), (129, 33), (256, 100)])
def test_product_matches_float64(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int, in_features: int, out_features: int
) -> None:
    torch.manual_seed(num_tokens)
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features)
    x = torch.randn(num_tokens, in_features)
    assert_product(make(kernels, weight)(x), x, weight)
    assert_product(make(kernels, weight, bias)(x), x, weight, bias)


@pytest.mark.parametrize("num_tokens", [1, 5, 30])
@pytest.mark.parametrize("in_features", [1023, 1024, 2049, 3073])
def test_products_deeper_than_one_block_match_float64(
    kernels: Kernels, num_tokens: int, in_features: int
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(70, in_features), torch.randn(num_tokens, in_features)
    assert_product(make(kernels, weight)(x), x, weight)


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(1, 45),
    in_features=st.integers(1, 80),
    out_features=st.integers(1, 110),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_matches_float64(
    num_tokens: int, in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features)
    x = torch.randn(num_tokens, in_features)
    assert_product(make(native(), weight, bias)(x), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(96, 77), (1030, 64)])
def test_row_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    torch.manual_seed(1)
    linear = make(native(), torch.randn(out_features, in_features).to(dtype), torch.randn(out_features))
    x = torch.randn(57, in_features)
    alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
    for num_tokens in range(1, len(x) + 1):
        assert torch.equal(linear(x[:num_tokens]), alone[:num_tokens])
    assert torch.equal(linear(x.flip(0)), alone.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), [(40, 33), (1100, 150)])
def test_products_of_many_rows_match_float64(dtype: torch.dtype, in_features: int, out_features: int) -> None:
    """Many rows are computed in blocks, with the same bits as few rows."""
    torch.manual_seed(7)
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features)
    linear, x = make(native(), weight, bias), torch.randn(1000, in_features)
    few = torch.cat([linear(rows) for rows in torch.split(x, 100)])
    assert_product(few, x, weight, bias)
    for num_tokens in (192, 193, 200, 577, 1000):
        assert torch.equal(linear(x[:num_tokens]), few[:num_tokens])
    activated = torch.cat([linear.activated(row.unsqueeze(0), "gelu") for row in x[:20]])
    assert torch.equal(linear.activated(x, "gelu")[:20], activated)


@pytest.mark.parametrize(("num_tokens", "in_features"), [(130, 64), (981, 384), (1100, 4096)])
def test_bits_do_not_depend_on_the_threads(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, in_features: int
) -> None:
    """More threads cut the rows into smaller blocks. Very many rows are packed in several parts."""
    library = native_library()
    if library is None:
        pytest.skip("nothing can be compiled here")
    torch.manual_seed(8)
    linear, x = make(native(), torch.randn(72, in_features)), torch.randn(num_tokens, in_features)
    few = torch.cat([linear(rows) for rows in torch.split(x, 100)])
    for threads in (1, 3, 16):
        monkeypatch.setattr(library, "threads", threads)
        assert torch.equal(linear(x), few)


def test_bfloat16_weights_compute_as_if_widened() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(50, 90).bfloat16(), torch.randn(9, 90)
    assert torch.equal(make(native(), weight)(x), make(native(), weight.float())(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_packed_side_by_side(kernels: Kernels, dtype: torch.dtype) -> None:
    """Query, key and value weights become one layer, at rows that are no multiple of anything."""
    torch.manual_seed(3)
    pieces = [torch.randn(rows, 40).to(dtype) for rows in (45, 3, 70, 1)]
    biases = [torch.randn(len(piece)) for piece in pieces]
    packed = kernels.linear(40, 119, dtype, bias=True)
    for index in (2, 0, 3, 1):
        first = sum(len(piece) for piece in pieces[:index])
        packed.load(pieces[index], first)
        packed.load_bias(biases[index], first)
    x = torch.randn(6, 40)
    assert_product(packed(x), x, torch.cat(pieces), torch.cat(biases))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_the_weights(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    weight = torch.randn(75, 41).to(dtype)
    ids = torch.tensor([0, 74, 31, 32, 33, 16, 15, 0])
    assert torch.equal(make(kernels, weight).embed(ids), weight[ids].float())
    assert make(kernels, weight).embed(ids[:0]).shape == (0, 41)


def test_weight_is_loaded_in_parts() -> None:
    weight = torch.arange(float(LOAD_ROWS + 50)).unsqueeze(1).repeat(1, 2)
    ids = torch.tensor([0, LOAD_ROWS - 1, LOAD_ROWS, LOAD_ROWS + 49])
    assert torch.equal(make(native(), weight).embed(ids), weight[ids])


def test_strided_weight_and_input_match_float64(kernels: Kernels) -> None:
    torch.manual_seed(5)
    weight, x = torch.randn(30, 40).T, torch.randn(30, 5).T
    assert_product(make(kernels, weight)(x), x, weight)


def test_no_tokens_give_an_empty_result(kernels: Kernels) -> None:
    assert make(kernels, torch.ones(5, 3))(torch.empty(0, 3)).shape == (0, 5)


def test_mismatched_tensors_are_rejected(kernels: Kernels) -> None:
    linear = kernels.linear(4, 6, torch.float32, bias=True)
    for weight, first in (
        (torch.ones(6, 5), 0),
        (torch.ones(6, 4), 1),
        (torch.ones(1, 4), -1),
        (torch.ones(4), 0),
    ):
        with pytest.raises(ConfigError, match="does not fit"):
            linear.load(weight, first)
    with pytest.raises(ConfigError, match="does not fit"):
        linear.load_bias(torch.ones(3), 4)
    with pytest.raises(ConfigError, match="created without one"):
        kernels.linear(4, 6, torch.float32, bias=False).load_bias(torch.ones(6))


def test_compiled_layer_reads_no_memory_outside() -> None:
    linear = make(native(), torch.ones(6, 4))
    with pytest.raises(IndexError, match=r"\[0, 6\)"):
        linear.embed(torch.tensor([6]))
    with pytest.raises(ConfigError, match="takes 4"):
        linear(torch.ones(2, 3))


def test_small_weights_share_slabs() -> None:
    library = native_library()
    if library is None or library.num_nodes > 1:
        pytest.skip("weights share no memory here")
    slabs = Slabs(library, torch.device("cpu"))
    with torch.inference_mode():
        first = slabs.empty(3, 10)
    second = slabs.empty(28)
    first.zero_()  # it may be loaded outside of inference mode
    second.fill_(1)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.data_ptr() - first.data_ptr() == 64
    assert not first.any()
    large = slabs.empty(SLAB_BYTES // 2 + 1)
    assert large.untyped_storage().nbytes() == large.nbytes, "a large weight has memory of its own"
    halves = [slabs.empty(SLAB_BYTES // 2) for _ in range(2)]
    assert len({half.untyped_storage().data_ptr() for half in (first, *halves)}) == 2, (
        "full slabs are replaced"
    )
