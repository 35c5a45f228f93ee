"""Products with weights in GGUF blocks: exact up to the rounding of inputs, and the same bits in every batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from inflight.checkpoint.gguf_file import BLOCK_TYPES
from inflight.errors import ConfigError
from inflight.layers.formats.gguf import BlockMatrix, BlockRun, BlockScheme
from inflight.layers.formats.gguf_blocks import BLOCKS
from inflight.layers.kernels import Linear, Residual
from inflight.layers.native.library import Library, native_library
from inflight.layers.native_gguf import BlockRows
from inflight.layers.native_kernels import NativeKernels
from inflight.layers.native_linears import NativeLinear

INPUTS, OUTPUTS = 512, 70  # the last panel is not full
SETS = ("vnni", "others")


@pytest.fixture(scope="module")
def library() -> Library:
    library = native_library()
    if library is None:
        pytest.skip("there is no compiler")
    return library


def kernels_of(library: Library, instructions: str) -> NativeKernels:
    if instructions == "others":
        return NativeKernels(library, instructions=frozenset())
    if instructions not in library.instructions:
        pytest.skip(f"the processor lacks {instructions}")
    return NativeKernels(library)


def blocks(name: str, num_rows: int = OUTPUTS, num_columns: int = INPUTS, seed: int = 0) -> BlockMatrix:
    """Random blocks with scales of ordinary size."""
    generator = torch.Generator().manual_seed(seed)
    block = BLOCK_TYPES[name]
    shape = num_rows, num_columns // block.num_values, block.num_bytes
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if name == "MXFP4":
        data[..., 0] = 118 + data[..., 0] % 8
    else:
        halves = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(
            name, (0,)
        )
        for at in halves:
            data[..., at + 1] = 0x18 | data[..., at + 1] & 0x83  # about 2^-9, of either sign
    return BlockMatrix([BlockRun(name, data.flatten(1))], num_columns)


def linear_of(kernels: NativeKernels, matrix: BlockMatrix, bias: Tensor | None = None) -> Linear:
    linear = kernels.linear(
        matrix.shape[1], len(matrix), torch.bfloat16, bias is not None, scheme=matrix.scheme
    )
    assert isinstance(linear, NativeLinear)
    assert isinstance(linear._weights, BlockRows)
    linear.load(matrix)
    if bias is not None:
        linear.load_bias(bias)
    return linear


def rounded(x: Tensor, name: str) -> Tensor:
    """The inputs as the kernels see them: int8 with one scale for 32 or 256 of them."""
    groups = x.view(len(x), -1, BLOCK_TYPES[name].num_values)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return (groups * (1 / scales)).round().double().mul(scales).flatten(1)


def inputs(num_rows: int, num_columns: int = INPUTS) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", BLOCKS)
def test_product_matches_float64(library: Library, name: str, instructions: str) -> None:
    matrix, x = blocks(name), inputs(29)
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(2))
    linear = linear_of(kernels_of(library, instructions), matrix, bias)
    weights = matrix.dequantize().double()
    expected = rounded(x, name) @ weights.T + bias
    size = (x.double().abs() @ weights.abs().T).max()
    assert float((linear(x) - expected).abs().max() / size) < 2e-6


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("name", BLOCKS)
def test_bits_do_not_depend_on_the_batch(library: Library, name: str, instructions: str) -> None:
    linear, x = linear_of(kernels_of(library, instructions), blocks(name)), inputs(40)
    expected = linear(x)
    for count in (1, 2, 3, 5, 7, 9, 11, 13):
        parts = [linear(x[first : first + count]) for first in range(0, len(x), count)]
        assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("name", BLOCKS)
def test_instruction_sets_have_the_same_bits(library: Library, name: str) -> None:
    x, results = inputs(9), []
    for instructions in SETS:
        results.append(linear_of(kernels_of(library, instructions), blocks(name))(x))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_looked_up_exactly(library: Library, name: str) -> None:
    matrix = blocks(name)
    ids = torch.tensor([0, 69, 31, 32, 5, 5])
    linear = linear_of(kernels_of(library, "others"), matrix)
    torch.testing.assert_close(linear.embed(ids), matrix.dequantize()[ids], rtol=1e-6, atol=0)
    with pytest.raises(IndexError, match=r"they must be in \[0, 70\)"):
        linear.embed(torch.tensor([70]))


def test_layer_may_pack_rows_of_several_types(library: Library) -> None:
    """Queries, keys and values in one product, each in its own type; gate and up in one type."""
    kernels, x = kernels_of(library, "others"), inputs(5)
    matrices = [
        blocks("Q4_K", 64, seed=1),
        blocks("Q4_K", 32, seed=2),
        blocks("Q6_K", 32, seed=3),
        blocks("Q8_0", 20, seed=4),
    ]
    firsts = [0, 64, 96, 128]
    scheme = BlockScheme(("Q4_K", "Q6_K", "Q8_0"))
    norm = torch.rand(INPUTS, generator=torch.Generator().manual_seed(3)) + 0.5
    whole = kernels.linear(INPUTS, 148, torch.bfloat16, True, scheme=scheme)
    bias = torch.randn(148, generator=torch.Generator().manual_seed(4))
    whole.load_bias(bias)
    for first, matrix in sorted(zip(firsts, matrices, strict=True), key=lambda pair: -pair[0]):
        whole.load(matrix, first)
    apart = [
        linear_of(kernels, matrix, bias[f : f + len(matrix)])
        for f, matrix in zip(firsts, matrices, strict=True)
    ]
    residual = Residual(x, norm)
    assert torch.equal(whole(x), torch.cat([linear(x) for linear in apart], dim=1))
    expected = torch.cat([linear.normed(residual, 1e-6) for linear in apart], dim=1)
    assert torch.equal(whole.normed(residual, 1e-6), expected)
    gated = torch.nn.functional.silu(expected[:, :74]) * expected[:, 74:]
    torch.testing.assert_close(whole.gated(residual, 1e-6, "silu"), gated, rtol=1e-5, atol=1e-5)
    ids = torch.tensor([147, 0, 100, 64])
    torch.testing.assert_close(
        whole.embed(ids), torch.cat([matrix.dequantize() for matrix in matrices])[ids], rtol=1e-6, atol=0
    )
    sections = whole._weights._sections  # type: ignore[attr-defined]
    assert [section.num_rows for section in sections] == [96, 32, 20], (
        "neighbours of one type are one section"
    )


def test_residual_is_added_in_the_call(library: Library) -> None:
    matrix, x = blocks("Q4_0", INPUTS), inputs(3)
    linear = linear_of(kernels_of(library, "others"), matrix)
    hidden = inputs(3) * 2
    result = linear.add_to(Residual(hidden.clone(), None), x, None, 1e-6, None)
    torch.testing.assert_close(result.x, hidden + linear(x))


def test_plain_weights_become_q8_0(library: Library) -> None:
    """As in dummy weights."""
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    linear = kernels_of(library, "others").linear(
        64, 40, torch.bfloat16, False, scheme=BlockScheme(("Q4_0",))
    )
    for first in (0, 20):
        linear.load(weight[first : first + 20], first)
    # Half a step of the codes of the largest group.
    torch.testing.assert_close(
        linear.embed(torch.arange(40)), weight, rtol=0, atol=float(weight.abs().max()) / 250
    )


def test_rows_that_are_missing_or_do_not_fit_are_rejected(library: Library) -> None:
    linear = kernels_of(library, "others").linear(
        64, 40, torch.bfloat16, False, scheme=BlockScheme(("Q8_0",))
    )
    linear.load(blocks("Q8_0", 20, 64))
    with pytest.raises(ConfigError, match="not all of the 40 rows"):
        linear(inputs(1, 64))
    with pytest.raises(ConfigError, match="does not fit at row 30"):
        linear.load(blocks("Q8_0", 20, 64), 30)
    with pytest.raises(ConfigError, match="cannot be loaded into a layer of 64 columns"):
        linear.load(blocks("Q8_0", 20, 32))


@pytest.mark.parametrize("step", [1, 3])
def test_matrix_is_cut_by_rows_and_columns(step: int) -> None:
    matrix = blocks("Q4_0", 10, 128)
    matrix.copy_rows(blocks("Q8_0", 4, 128, seed=5), 3)
    assert [run.type_name for run in matrix.runs] == ["Q4_0", "Q8_0", "Q4_0"]
    values = matrix.dequantize()
    for start, stop in itertools.combinations(range(11), 2):
        rows, columns = slice(start, stop, step), slice(32, 96)
        assert torch.equal(matrix.cut(rows, columns).dequantize(), values[rows, columns])
        assert torch.equal(matrix.cut(rows, slice(None)).dequantize(), values[rows])
