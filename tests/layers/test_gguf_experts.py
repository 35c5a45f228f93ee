"""Experts with weights in GGUF blocks: exact up to the rounding of inputs, and the same bits in every batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats.gguf import BlockMatrix, BlockScheme, mxfp4_blocks
from inflight.layers.formats.gguf_blocks import BLOCKS
from inflight.layers.formats.schemes import GroupScheme, common_scheme
from inflight.layers.kernels import (
    CLAMPED_SILU,
    CLAMPED_SILU_SLOPE,
    ExpertRouting,
    Experts,
    ExpertsShape,
    Residual,
)
from inflight.layers.native.library import Library, native_library
from inflight.layers.native_kernels import NativeKernels
from tests.layers.test_gguf_products import SETS, blocks, inputs, kernels_of, rounded

EPS = 1e-6
HIDDEN, INNER, COUNT = 512, 256, 6
ROUTING = ExpertRouting(num_experts=COUNT, top_k=3, scores="chosen")
PARTS = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
LIMIT = 2.5  # with 3, many inner features would lie halfway between two codes


@pytest.fixture(scope="module")
def library() -> Library:
    library = native_library()
    if library is None:
        pytest.skip("there is no compiler")
    return library


@dataclass(frozen=True)
class Layer:
    """Random weights, by part and expert, the types of gate, up and down given for each expert."""

    types: list[tuple[str, str, str]]
    activation: str = "silu"

    @property
    def matrices(self) -> dict[str, list[BlockMatrix]]:
        return {
            part: [
                blocks(types[index], *shape, seed=10 * expert + index)
                for expert, types in enumerate(self.types)
            ]
            for index, (part, shape) in enumerate(PARTS.items())
        }

    @property
    def router(self) -> Tensor:
        return torch.randn(COUNT, HIDDEN, generator=torch.Generator().manual_seed(5))

    @property
    def biases(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(6)
        return {part: torch.randn(COUNT, rows, generator=generator) for part, (rows, _) in PARTS.items()}

    @property
    def has_bias(self) -> bool:
        return self.activation == CLAMPED_SILU

    def build(self, kernels: NativeKernels, held: range = range(COUNT)) -> Experts:
        matrices = self.matrices
        gate_up = common_scheme(matrix.scheme for part in ("gate", "up") for matrix in matrices[part])
        down = common_scheme(matrix.scheme for matrix in matrices["down"])
        sizes = HIDDEN, INNER, ROUTING, torch.bfloat16, self.activation, self.has_bias, LIMIT
        experts = kernels.experts(ExpertsShape(*sizes, held, gate_up, down))
        experts.router.load(self.router)
        for part in PARTS:
            for expert in held:
                experts.load(part, expert, matrices[part][expert])
                if self.has_bias:
                    experts.load_bias(part, expert, self.biases[part][expert])
        return experts

    def expected(self, x: Tensor, held: range = range(COUNT)) -> Tensor:
        """Return the experts' output, token by token in float64, from inputs rounded as the kernels round them."""
        matrices, biases = self.matrices, self.biases
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, row in enumerate(x):
            # Routers hold their weights in bfloat16.
            logits = self.router.bfloat16().double() @ row.double()
            shares, chosen = logits.topk(ROUTING.top_k)
            for share, expert in zip(shares.softmax(0), chosen.tolist(), strict=True):
                if expert not in held:
                    continue
                gate_type, up_type, down_type = self.types[expert]
                gate = product(matrices["gate"][expert], rounded(row[None], gate_type))
                up = product(matrices["up"][expert], rounded(row[None], up_type))
                if self.has_bias:
                    gate, up = gate + biases["gate"][expert], up + biases["up"][expert]
                    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                    inner = (up + 1) * gate * torch.sigmoid(CLAMPED_SILU_SLOPE * gate)
                else:
                    inner = F.silu(gate) * up
                y = product(matrices["down"][expert], rounded(inner, down_type))
                out[token] += share * (y[0] + biases["down"][expert] if self.has_bias else y[0])
        return out


def product(matrix: BlockMatrix, x: Tensor) -> Tensor:
    (run,) = matrix.runs
    weights = gguf.quants.dequantize(run.data.numpy(), gguf.GGMLQuantizationType[run.type_name])
    return x.double() @ torch.from_numpy(weights).double().T


def added(experts: Experts, x: Tensor) -> Tensor:
    """Return the experts' output for x."""
    return experts.add_to(Residual(x.clone(), None), EPS, None, partial=torch.zeros(x.shape)).x - x


def same(*types: str) -> list[tuple[str, str, str]]:
    gate, up, down = types if len(types) == 3 else types * 3
    return [(gate, up, down)] * COUNT


LAYERS = {
    **{name: Layer(same(name)) for name in BLOCKS},
    "down in another type": Layer(same("Q4_K", "Q4_K", "Q6_K")),
    "each in its own type": Layer(same("Q4_K", "Q5_K", "Q8_0")),
    "experts in several types": Layer([("Q4_0", "Q4_0", "Q5_0"), ("Q8_0", "Q4_0", "Q8_0")] * (COUNT // 2)),
    "biases and clamped activation": Layer(same("MXFP4"), CLAMPED_SILU),
}


@pytest.mark.parametrize("case", LAYERS)
def test_experts_match_float64(library: Library, case: str) -> None:
    layer, x = LAYERS[case], inputs(7, HIDDEN)
    expected = layer.expected(x)
    for instructions in SETS:
        actual = added(layer.build(kernels_of(library, instructions)), x)
        assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-3


@pytest.mark.parametrize("case", LAYERS)
def test_bits_do_not_depend_on_the_batch(library: Library, case: str) -> None:
    x = inputs(70, HIDDEN)
    results = []
    for instructions in SETS:
        experts = LAYERS[case].build(kernels_of(library, instructions))
        crowd = experts.add_to(Residual(x.clone(), None), EPS, None).x
        for tokens in ([5], [69, 5], [*range(20)], [*range(0, 70, 3)]):
            assert torch.equal(experts.add_to(Residual(x[tokens], None), EPS, None).x, crowd[tokens])
        results.append(crowd)
    assert torch.equal(*results), "the instruction sets agree"


def test_rank_holds_some_of_the_experts(library: Library) -> None:
    layer, x = LAYERS["each in its own type"], inputs(9, HIDDEN)
    expected = layer.expected(x, range(2, 5))
    actual = added(layer.build(kernels_of(library, "others"), range(2, 5)), x)
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-3


def test_mxfp4_of_other_checkpoints_is_held_in_blocks(library: Library) -> None:
    """The experts of gpt-oss, whose safetensors pair neighbouring columns."""
    kernels, scheme = kernels_of(library, "others"), GroupScheme("fp4", 32)
    generator = torch.Generator().manual_seed(0)
    routing, blocks = ExpertRouting(num_experts=2, top_k=2, scores="chosen"), BlockScheme(("MXFP4",))
    sizes = ExpertsShape(64, 96, routing, torch.bfloat16, "silu", gate_up_scheme=scheme, down_scheme=scheme)
    grouped = kernels.experts(sizes)
    in_blocks = kernels.experts(replace(sizes, gate_up_scheme=blocks, down_scheme=blocks))
    router = torch.randn(2, 64, generator=generator)
    for experts in (grouped, in_blocks):
        experts.router.load(router)
    for part, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
        for expert in range(2):
            matrix = scheme.quantize(torch.randn(shape, generator=generator))
            assert torch.equal(mxfp4_blocks(matrix).dequantize(), matrix.dequantize())
            grouped.load(part, expert, matrix)
            in_blocks.load(part, expert, mxfp4_blocks(matrix))
    x = inputs(5, 64)
    assert torch.equal(added(grouped, x), added(in_blocks, x))


def test_matrices_that_are_missing_or_incomplete_are_rejected(library: Library) -> None:
    scheme, kernels = BlockScheme(("Q8_0",)), kernels_of(library, "others")
    shape = ExpertsShape(64, 64, ROUTING, torch.bfloat16, "silu", gate_up_scheme=scheme, down_scheme=scheme)
    experts = kernels.experts(shape)
    with pytest.raises(ConfigError, match="rows 0 to 19 of an expert cannot be loaded alone"):
        experts.load("gate", 0, blocks("Q8_0", 20, 64))
    with pytest.raises(ConfigError, match="cannot be loaded into a layer of 64 columns"):
        experts.load("down", 0, blocks("Q8_0", 64, 32))
    experts.load("gate", 0, blocks("Q8_0", 64, 64))
    with pytest.raises(ConfigError, match="local expert 0 is incomplete"):
        added(experts, inputs(1, 64))
