"""Quantized experts on a GPU, or in Triton's interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inflight.errors import WeightsError
from inflight.layers.formats.schemes import GroupedMatrix, GroupScheme, QuantizedMatrix, pack_nibbles
from inflight.layers.kernels import CLAMPED_SILU, ExpertRouting, ExpertsShape, Residual
from inflight.layers.triton.held import (
    ByteWeights,
    ConvertedBytes,
    MultipliedBytes,
    Mxfp4Weights,
)
from inflight.layers.triton.mxfp4 import pack_codes
from inflight.layers.triton.tuning import GroupedTile, PairTile
from inflight.layers.triton_experts import TritonExperts
from inflight.layers.triton_kernels import TritonKernels
from tests.layers.test_experts import EPS, Sum, Weights, expected_output, random_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUTING = ExpertRouting(num_experts=5, top_k=2, scores="chosen", has_bias=True)
HIDDEN, INNER = 288, 160  # both end in the middle of a tile of 128
SCHEMES = [
    GroupScheme("fp8", inputs="fp8"),
    GroupScheme("fp8", 128, inputs="fp8"),
    GroupScheme("fp8"),
    GroupScheme("fp8", 128),
    GroupScheme("fp4", 32),
    GroupScheme("int4", 32, zeros=True),
    GroupScheme("int4", 128),
    GroupScheme("int4", zeros=True),
    GroupScheme("int8", inputs="int8"),
    GroupScheme("int8", 128, inputs="int8"),
    GroupScheme("int8", 64, zeros=True),
    GroupScheme("int8", zeros=True),
]
FP8, FP8_BLOCKS, MXFP4, INT4, INT8 = (SCHEMES[i] for i in (0, 1, 4, 5, 8))


def tolerance(scheme: GroupScheme, dtype: torch.dtype) -> float:
    """The relative error of what experts add: of inputs in fp8, which the interpreter rounds towards zero, or in int8,
    or of the compute type."""
    if scheme.inputs:
        return 0.12 if scheme.inputs == "fp8" else 0.03
    return 0.02 if dtype == torch.bfloat16 else 1e-4


Matrices = dict[str, list[GroupedMatrix]]  # by part, those of all experts


def dequantized(weights: Weights, matrices: Matrices) -> Weights:
    """Return the same weights, but those that quantized matrices stand for."""
    parts = {
        part: torch.stack([matrix.dequantize() for matrix in own]).cpu() for part, own in matrices.items()
    }
    return Weights(**{**{name: getattr(weights, name) for name in Weights.__dataclass_fields__}, **parts})


def load(
    experts: TritonExperts, weights: Weights, matrices: Matrices, local_experts: range, inner: range
) -> None:
    """Load the quantized weights in two pieces of rows, as dummy weights come."""
    experts.router.load(weights.router.to(DEVICE))
    experts.router.load_bias(weights.router_bias.to(DEVICE))
    for expert in local_experts:
        for part in ("gate", "up", "down"):
            matrix: QuantizedMatrix = matrices[part][expert]
            bias = getattr(weights, f"{part}_bias")[expert].to(DEVICE)
            if part == "down":
                matrix = matrix[:, inner.start : inner.stop]
            else:
                matrix, bias = matrix[inner.start : inner.stop], bias[inner.start : inner.stop]
            experts.load(part, expert, matrix[7:], 7)
            experts.load(part, expert, matrix[:7])
            experts.load_bias(part, expert, bias)


def make(
    scheme: GroupScheme,
    dtype: torch.dtype,
    routing: ExpertRouting = ROUTING,
    inner: range = range(INNER),
    reduce: Sum | None = None,
    local_experts: range | None = None,
) -> tuple[TritonExperts, Weights]:
    torch.manual_seed(0)
    random = random_weights(routing, HIDDEN, INNER)
    matrices = {
        part: [scheme.quantize(matrix.to(DEVICE)) for matrix in getattr(random, part)]
        for part in ("gate", "up", "down")
    }
    weights = dequantized(random, matrices)
    kernels = TritonKernels(dtype, DEVICE)
    shape = ExpertsShape(
        HIDDEN, len(inner), routing, dtype, CLAMPED_SILU, True, 0.8, local_experts, scheme, scheme
    )
    experts = kernels.experts(shape, reduce)
    assert isinstance(experts, TritonExperts)
    load(experts, weights, matrices, local_experts or range(routing.num_experts), inner)
    return experts, weights


def inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, HIDDEN, device=DEVICE).to(dtype), torch.rand(HIDDEN, device=DEVICE) + 0.5


def check(actual: Tensor, x: Tensor, expected: Tensor, limit: float) -> None:
    reference = expected - x.cpu().double()
    added = actual.cpu().double() - x.cpu().double()
    assert float((added - reference).norm() / reference.norm()) < limit


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}, {scheme.inputs}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 4, 37, 90])
def test_experts_match_float64(scheme: GroupScheme, dtype: torch.dtype, num_tokens: int) -> None:
    check_experts(scheme, dtype, num_tokens)


def check_experts(scheme: GroupScheme, dtype: torch.dtype, num_tokens: int, top_k: int = 2) -> None:
    experts, weights = make(scheme, dtype, replace(ROUTING, top_k=top_k))
    weights.router_bias.copy_(torch.tensor([0.0, 3.0, 0.0, 2.0, 1.0]))
    experts.router.load_bias(weights.router_bias.to(DEVICE))
    weights.router.mul_(0.01)  # clear winners, whatever is rounded
    experts.router.load(weights.router.to(DEVICE))
    x, norm = inputs(num_tokens, dtype)
    expected = expected_output(weights, x.cpu(), norm.cpu(), CLAMPED_SILU, 0.8, bias=True)
    actual = experts.add_to(Residual(x.clone(), norm), EPS, norm).x
    # The result is rounded to the compute type, too.
    check(actual, x, expected, tolerance(scheme, dtype))


SHORT_STEPS = PairTile(block_n=8, block_k=64, num_warps=1, ahead=1), PairTile(16, 32, 2, 2)
SHARED_ROWS = (
    PairTile(block_n=8, block_k=256, num_warps=2, ahead=1, split=1),
    PairTile(block_n=16, block_k=256, num_warps=4, ahead=1, split=2),
)
QUANTIZED_WHERE_MULTIPLIED = GroupedTile(16, 128, 1, 1, weights_left=True)
PAIRS_LEFT = GroupedTile(16, 128, 1, 1, weights_left=False, quantize_first=True)


def use_pair_tiles(tiles: tuple[PairTile, PairTile], monkeypatch: pytest.MonkeyPatch) -> None:
    for way in (MultipliedBytes, ConvertedBytes, Mxfp4Weights):
        monkeypatch.setattr(way, "pair_tiles", lambda *_: tiles)


@pytest.mark.parametrize(
    "scheme", [s for s in SCHEMES if s.codes in ("fp8", "int8")], ids=lambda scheme: scheme.name
)
@pytest.mark.parametrize("top_k", [1, 3])
def test_pairs_match_float64_in_several_steps(
    scheme: GroupScheme, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pair_tiles(SHORT_STEPS, monkeypatch)
    check_experts(scheme, torch.float32, 2, top_k)


@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCKS, MXFP4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3])
def test_warps_may_share_rows_of_pairs(
    scheme: GroupScheme, dtype: torch.dtype, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pair_tiles(SHARED_ROWS, monkeypatch)
    monkeypatch.setattr(ByteWeights, "max_paired", 2)
    check_experts(scheme, dtype, 2, top_k)


@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCKS, INT8], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("tile", [QUANTIZED_WHERE_MULTIPLIED, PAIRS_LEFT])
def test_inputs_may_be_quantized_before_or_where_they_are_multiplied(
    scheme: GroupScheme, tile: GroupedTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ByteWeights, "grouped_tiles", lambda *_: (16, tile, tile))
    check_experts(scheme, torch.bfloat16, 37)


@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCKS, MXFP4, INT4, INT8], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 64, 65])
def test_one_expert_may_receive_every_token(scheme: GroupScheme, num_tokens: int) -> None:
    routing = ExpertRouting(num_experts=3, top_k=1, scores="chosen", has_bias=True)
    experts, weights = make(scheme, torch.float32, routing)
    weights.router_bias.copy_(torch.tensor([0.0, 1000.0, 0.0]))
    experts.router.load_bias(weights.router_bias.to(DEVICE))
    x, norm = inputs(num_tokens, torch.float32)
    expected = expected_output(weights, x.cpu(), norm.cpu(), CLAMPED_SILU, 0.8, bias=True)
    actual = experts.add_to(Residual(x.clone(), norm), EPS, None).x
    check(actual, x, expected, tolerance(scheme, torch.float32))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.name}, {scheme.inputs}")
@pytest.mark.parametrize("num_tokens", [2, 9])
@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter quantizes rows of padding, too
def test_padding_tokens_have_no_experts(scheme: GroupScheme, num_tokens: int) -> None:
    experts, _ = make(scheme, torch.bfloat16)
    x, norm = inputs(num_tokens, torch.bfloat16)
    x[1] = torch.nan
    live = torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE)
    live[1] = -1
    actual = experts.add_to(Residual(x.clone(), norm), EPS, None, live).x
    assert actual[live >= 0].isfinite().all()
    assert actual[1].isnan().all()
    live[:] = -1
    assert torch.equal(experts.add_to(Residual(x.clone(), norm), EPS, None, live).x[0], x[0])


@pytest.mark.parametrize("split", ["inner features", "experts"])
@pytest.mark.parametrize(("scheme", "num_tokens"), [(MXFP4, 2), (MXFP4, 9), (INT4, 9)])
def test_ranks_add_up_to_all_experts(split: str, scheme: GroupScheme, num_tokens: int) -> None:
    x, norm = inputs(num_tokens, torch.float32)
    reduce = Sum()
    for rank, part in enumerate((range(96), range(96, INNER))):
        local_experts = (range(3), range(3, 5))[rank] if split == "experts" else None
        inner = range(INNER) if split == "experts" else part
        experts, weights = make(
            scheme, torch.float32, inner=inner, reduce=reduce, local_experts=local_experts
        )
        if rank and split != "experts":
            for expert in range(ROUTING.num_experts):  # where products are summed, one rank adds the bias
                experts.load_bias("down", expert, torch.zeros(HIDDEN, device=DEVICE))
        actual = experts.add_to(Residual(x.clone(), norm), EPS, None).x
    expected = expected_output(weights, x.cpu(), norm.cpu(), CLAMPED_SILU, 0.8, bias=True)
    check(actual, x, expected, 1e-4)


def test_schemes_without_kernels_are_held_as_plain_numbers() -> None:
    kernels = TritonKernels(torch.bfloat16, DEVICE)
    for scheme in (GroupScheme("int8", 16), GroupScheme("fp4", 64), GroupScheme("int4", 16, zeros=True)):
        shape = ExpertsShape(
            64, 32, ROUTING, torch.bfloat16, "silu", gate_up_scheme=scheme, down_scheme=scheme
        )
        experts = kernels.experts(shape)
        assert isinstance(experts, TritonExperts)
        assert experts.down.codes.dtype == torch.bfloat16
        experts.load("down", 0, scheme.quantize(torch.randn(64, 32, device=DEVICE)))


def test_codes_stay_in_four_bits() -> None:
    experts, _ = make(GroupScheme("fp4", 32), torch.bfloat16)
    assert experts.gate_up.codes.nbytes == 5 * 2 * INNER * 384 // 2  # whole tiles
    experts, _ = make(GroupScheme("int4", 128, zeros=True), torch.bfloat16)
    assert experts.gate_up.codes.nbytes == 5 * 2 * INNER * 384 // 2  # whole groups
    assert pack_codes(torch.zeros(3, 2880, dtype=torch.uint8)).shape == (3, 32 * 23)


def test_scale_that_bfloat16_cannot_hold_is_rejected() -> None:
    experts, _ = make(GroupScheme("fp4", 32), torch.bfloat16)
    scales = torch.full((INNER, 9), 129, dtype=torch.uint8)
    codes = pack_nibbles(torch.ones(INNER, HIDDEN, dtype=torch.uint8))
    with pytest.raises(WeightsError, match=r"a scale is 2\^2: .* at most 2\^1"):
        experts.load("gate", 0, GroupedMatrix(GroupScheme("fp4", 32), HIDDEN, codes, scales))
