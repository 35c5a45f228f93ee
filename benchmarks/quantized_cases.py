"""Quantized linear layers and experts of models, and tiles to try for each, for `benchmarks.quantized` to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.device_timing import Call, Ceilings, num_copies
from benchmarks.shapes import SHAPES
from inflight.layers.formats.schemes import GroupScheme
from inflight.layers.kernels import CLAMPED_SILU, ExpertRouting, ExpertsShape, Residual
from inflight.layers.triton.grouped_experts import grouped_down, grouped_gate_up
from inflight.layers.triton.held import HeldWeights, Int4Weights
from inflight.layers.triton.linear_parts import SplitKWorkspace
from inflight.layers.triton.medium_linear import medium_linear
from inflight.layers.triton.pair_experts import pair_down, pair_gate_up
from inflight.layers.triton.quantized_inputs import QuantizedInputs, quantize_rows
from inflight.layers.triton.routing import Chosen, choose_experts
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import (
    MAX_BYTES_SMALL,
    MAX_GATED,
    MAX_PAIRED,
    MAX_TOKENS,
    GroupedTile,
    LinearTile,
    choose_grouped,
    choose_pairs,
    shared_memory,
    token_bucket,
)
from inflight.layers.triton_experts import TritonExperts
from inflight.layers.triton_kernels import TritonKernels, TritonLinear

SCHEMES = {
    "int8": GroupScheme("int8", inputs="int8"),
    "int4": GroupScheme("int4", 128, zeros=True),
    "fp8": GroupScheme("fp8", inputs="fp8"),
    "fp8-blocks": GroupScheme("fp8", 128, inputs="fp8"),
    "int8-weights": GroupScheme("int8"),  # inputs stay in 16 bits
    "mxfp4": GroupScheme("fp4", 32),
}
LARGEST_ERROR = 0.15  # relative, of a gated product with inputs in fp8
_DISTINCT_ROWS = 1000  # of weights, then they repeat; no multiple of a tile, so that mistaken rows show
_DISTINCT_EXPERTS = 3
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Product:
    """One linear layer, or one matrix of all experts, and the tokens of a step."""

    shape: str
    part: str
    scheme: str
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.shape} {self.part} {self.scheme} {self.num_tokens}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel and its tile. Experts also choose the pairs of a block."""

    kernel: str  # small, medium or grouped
    tile: LinearTile | GroupedTile
    block_m: int

    def __str__(self) -> str:
        tile = self.tile
        name = f"{self.kernel} {self.block_m}x{tile.block_n}x{tile.block_k} w{tile.num_warps} s{tile.stages}"
        if isinstance(tile, LinearTile):
            return f"{name} k{tile.split_k}" if tile.split_k > 1 else name
        name += f" {'weights' if tile.weights_left else 'pairs'} left"
        return f"{name} quantize first" if tile.quantize_first else name


class Problem(Protocol):
    """A product with its weights and inputs, in copies that overflow the caches."""

    candidates: list[Candidate]  # the first one is what `tuning.py` chooses, unless it chooses the library

    def calls(self, candidate: Candidate) -> list[Call]: ...

    def others(self) -> Iterator[tuple[str, list[Call]]]:
        """Return what to compare with, by name."""

    def error(self, candidate: Candidate) -> float:
        """Return the relative error of a result."""

    def limit(self, ceilings: Ceilings) -> float | None:
        """Return the seconds that the chip needs at least."""


def products_of(shapes: list[str], schemes: list[str], tokens: list[int]) -> list[Product]:
    """Return all products, those of the first numbers of tokens first."""
    return [
        Product(shape, part, scheme, num_tokens)
        for num_tokens in tokens
        for shape in shapes
        for part in _parts(SHAPES[shape])
        for scheme in schemes
        if _exists(shape, part, scheme)
    ]


def _parts(config: dict[str, Any]) -> tuple[str, ...]:
    if _num_experts(config):
        return "expert gate_up", "expert down", "qkv", "output"
    return "qkv", "output", "gate_up", "down"


def _num_experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts", config.get("num_local_experts", 0)))


def _exists(shape: str, part: str, scheme: str) -> bool:
    """Experts of gpt-oss are in MXFP4, and nothing else of it is quantized."""
    if SHAPES[shape]["model_type"] == "gpt_oss":
        return scheme == "mxfp4" and part.startswith("expert")
    return scheme != "mxfp4"


def make_problem(product: Product, device: torch.device, tune: bool, copied: bool) -> Problem:
    """Without `tune`, the only candidate is the first; without `copied`, there is one copy."""
    make = ExpertProblem if product.part.startswith("expert") else LinearProblem
    return make(product, device, tune, copied)


class LinearProblem:
    """Implements `Problem`."""

    def __init__(self, product: Product, device: torch.device, tune: bool, copied: bool) -> None:
        config = SHAPES[product.shape]
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        heads, kv_heads, size = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        rows, features = {
            "qkv": ((heads + 2 * kv_heads) * size, hidden),
            "output": (hidden, heads * size),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }[product.part]
        scheme = SCHEMES[product.scheme]
        self._activation = "silu" if product.part == "gate_up" else None
        self._kernels = kernels = TritonKernels(_DTYPE, device)
        self._num_tokens, self._rows, self._features = product.num_tokens, rows, features
        torch.manual_seed(0)
        distinct = scheme.quantize(torch.randn(min(rows, _DISTINCT_ROWS), features, device=device))
        plain = distinct.dequantize(_DTYPE)
        self._plain: list[Tensor] = []
        self._layers: list[TritonLinear] = []
        for _ in range(num_copies(rows * features) if copied else 1):
            layer = kernels.linear(features, rows, _DTYPE, False, scheme=scheme)
            assert isinstance(layer, TritonLinear)
            for row in range(0, rows, len(distinct)):
                layer.load(distinct[: rows - row], row)
            self._layers.append(layer)
            self._plain.append(plain.repeat(-(-rows // len(plain)), 1)[:rows].contiguous())
        self._x = torch.randn(product.num_tokens, features, device=device).to(_DTYPE)
        self.candidates = self._candidates(tune)

    @property
    def _weights(self) -> HeldWeights:
        return self._layers[0].weights

    def _candidates(self, tune: bool) -> list[Candidate]:
        held, shared_bytes = self._weights, shared_memory(self._x.device)
        bucket = max(16, token_bucket(self._num_tokens))
        small = held.small_tile(bucket)
        if not held.quantizes_inputs:
            if not held.pays_small(self._num_tokens, True):
                return []
            current, other = Candidate("small", small, small.block_m), []
        else:
            tile = held.medium_tile(self._num_tokens)
            current, medium = (
                Candidate("small", small, small.block_m),
                Candidate("medium", tile, tile.block_m),
            )
            other = [medium]
            if self._num_tokens > MAX_BYTES_SMALL:
                current, other = medium, [current] if self._num_tokens <= MAX_GATED else []
        if not tune:
            return [current]
        assert isinstance(current.tile, LinearTile)
        near = [
            replace(current, tile=tile, block_m=tile.block_m)
            for tile in _near(current.tile, current.kernel == "medium", held.group)
            if self._fits(tile, current.kernel, shared_bytes)
        ]
        return [current, *other, *near]

    def _fits(self, tile: LinearTile, kernel: str, shared_bytes: int) -> bool:
        if kernel == "small":
            packed = 2 if isinstance(self._weights, Int4Weights) else 1
            stage = tile.block_n * tile.block_k // packed + 2 * tile.block_m * tile.block_k
        else:
            stage = (tile.block_m + tile.block_n) * tile.block_k
        token_tiles = -(-self._num_tokens // tile.block_m)
        if tile.split_k > 1:
            try:
                SplitKWorkspace(torch.device("meta")).check(
                    -(-self._rows // tile.block_n) * token_tiles, tile
                )
            except AssertionError:
                return False
        return stage * tile.stages <= shared_bytes

    def calls(self, candidate: Candidate) -> list[Call]:
        return [_bind(self._multiply, layer, candidate) for layer in self._layers]

    def _multiply(self, layer: TritonLinear, candidate: Candidate) -> Tensor:
        assert isinstance(candidate.tile, LinearTile)
        kernels = self._kernels
        after: dict[str, Any] = {"activation": self._activation, "tile": candidate.tile, "pdl": kernels.pdl}
        if candidate.kernel == "small":
            return small_linear(self._x, layer.weights, kernels.workspace, **after)
        return medium_linear(self._inputs(layer.weights), layer.weights, kernels.workspace, **after)

    def _inputs(self, held: HeldWeights) -> QuantizedInputs:
        return quantize_rows(self._x, group=held.group, pdl=self._kernels.pdl, dtype=held.codes.dtype)

    def others(self) -> Iterator[tuple[str, list[Call]]]:
        yield "bf16", [_bind(self._gated, _bind(F.linear, self._x, plain)) for plain in self._plain]
        held = self._weights
        integers = held.codes.dtype == torch.int8
        if (
            held.quantizes_inputs
            and integers
            and not held.group
            and self._num_tokens > 16
            and self._x.is_cuda
        ):
            # Sums of 32 bits alone: another kernel would have to scale them.
            codes = self._inputs(held).codes
            yield "library", [_bind(torch._int_mm, codes, layer.weights.codes[0].T) for layer in self._layers]
        large = not integers and not held.group and self._num_tokens > MAX_TOKENS
        if large or not held.quantizes_inputs:
            yield "library", [_bind(self._gated, _bind(self._large, layer)) for layer in self._layers]

    def _large(self, layer: TritonLinear) -> Tensor:
        return layer._large(Residual(self._x, None), 0.0)

    def _gated(self, product: Callable[[], Any]) -> Tensor:
        y: Tensor = product()
        return y if self._activation is None else self._kernels.gate(y, self._activation)

    def error(self, candidate: Candidate) -> float:
        expected = self._gated(_bind(F.linear, self._x, self._plain[0]))
        return _error(self._multiply(self._layers[0], candidate), expected)

    def limit(self, ceilings: Ceilings) -> float | None:
        moved = self._num_tokens * (self._rows + self._features) * 2
        num_bytes = _num_bytes(self._weights) + moved
        flops = 2 * self._num_tokens * self._rows * self._features
        return _limit(ceilings, num_bytes, flops, self._weights)


class ExpertProblem:
    """Implements `Problem`. Copies differ in the experts that tokens choose."""

    def __init__(self, product: Product, device: torch.device, tune: bool, copied: bool) -> None:
        config = SHAPES[product.shape]
        self._is_down = product.part == "expert down"
        clamped = config["model_type"] == "gpt_oss"
        hidden, inner = (
            config["hidden_size"],
            config.get("moe_intermediate_size", config["intermediate_size"]),
        )
        num_experts, self._top_k = _num_experts(config), config["num_experts_per_tok"]
        self._routing = ExpertRouting(num_experts, self._top_k, "softmax")
        self._kernels = kernels = TritonKernels(_DTYPE, device)
        self._num_tokens, scheme = product.num_tokens, SCHEMES[product.scheme]
        torch.manual_seed(0)
        activation, limit = (CLAMPED_SILU, 7.0) if clamped else ("silu", 0.0)

        def make(scheme: GroupScheme | None) -> TritonExperts:
            shape = ExpertsShape(
                hidden,
                inner,
                self._routing,
                _DTYPE,
                activation,
                limit=limit,
                gate_up_scheme=scheme,
                down_scheme=scheme,
            )
            experts = kernels.experts(shape)
            assert isinstance(experts, TritonExperts)
            return experts

        self._experts, self._plain = make(scheme), make(None)
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for expert in range(_DISTINCT_EXPERTS):
            for part, size in shapes.items():
                matrix = scheme.quantize(torch.randn(size, device=device) * size[1] ** -0.5)
                self._experts.load(part, expert, matrix)
                self._plain.load(part, expert, matrix)
        for experts in (self._experts, self._plain):
            for matrices in (experts.gate_up, experts.down):
                for tensor in (matrices.codes, matrices.scales, matrices.zeros):
                    if tensor is not None:
                        _repeat_experts(tensor)
        self._gate = self._experts._gate
        self._x = torch.randn(product.num_tokens, hidden, device=device).to(_DTYPE)
        self._sizes = hidden, inner
        self._chosen = [self._choose()]
        if copied:
            self._chosen += [self._choose() for _ in range(1, num_copies(self._bytes_read()))]
        self.candidates = self._candidates(tune)

    def _choose(self) -> Chosen:
        device, num_experts = self._x.device, self._routing.num_experts
        logits = torch.randn(self._num_tokens, num_experts, device=device)
        totals = torch.zeros(num_experts, dtype=torch.int64, device=device)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
        return choose_experts(logits, self._routing, totals, counts=counts)

    @property
    def _matrices(self) -> HeldWeights:
        return self._experts.down if self._is_down else self._experts.gate_up

    def _bytes_read(self) -> int:
        own, chosen = self._matrices, len(set(self._chosen[0].ids.flatten().tolist()))
        return _num_bytes(own) * chosen // len(own.codes)

    def _candidates(self, tune: bool) -> list[Candidate]:
        held, num_pairs = self._matrices, self._num_tokens * self._top_k
        block_m, gate_up, down = held.grouped_tiles(num_pairs)
        tile = down if self._is_down else gate_up
        current = Candidate("grouped", tile, block_m)
        if not tune:
            return [current]
        tiles = [
            replace(tile, block_n=2 * tile.block_n),
            replace(tile, block_n=tile.block_n // 2, num_warps=4),
            replace(tile, stages=tile.stages + 1),
            replace(tile, stages=max(2, tile.stages - 1)),
            replace(tile, num_warps=12 - tile.num_warps),
        ]
        if not held.group:
            tiles += [replace(tile, block_k=256), replace(tile, block_k=64)]
        if held.quantizes_inputs:
            tiles.append(replace(tile, weights_left=not tile.weights_left))
            tiles.append(replace(tile, quantize_first=not tile.quantize_first))
        near = [replace(current, tile=other) for other in tiles]
        near += [replace(current, block_m=size) for size in (block_m // 2, 2 * block_m) if 16 <= size <= 128]
        return [current, *(candidate for candidate in near if candidate != current)]

    def calls(self, candidate: Candidate) -> list[Call]:
        experts = self._experts
        return [self._call(experts, chosen, candidate.tile, candidate.block_m) for chosen in self._chosen]

    def _call(
        self, experts: TritonExperts, chosen: Chosen, tile: LinearTile | GroupedTile, block_m: int
    ) -> Callable[[], Tensor]:
        assert isinstance(tile, GroupedTile)
        pdl = self._kernels.pdl
        if not self._is_down:
            call = _bind(grouped_gate_up, self._x, experts.gate_up, chosen, block_m, self._gate, tile, pdl)
            return lambda: call()[0]
        y, blocks = self._hidden(chosen, block_m)
        dtype = torch.float32 if self._num_tokens <= 1024 else _DTYPE
        return _bind(grouped_down, y, experts.down, chosen, blocks, block_m, tile, dtype, pdl)

    def _hidden(self, chosen: Chosen, block_m: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of the second product, and the blocks."""
        _, tile, _ = choose_grouped(self._num_tokens * self._top_k, self._routing.num_experts, 2)
        return grouped_gate_up(self._x, self._plain.gate_up, chosen, block_m, self._gate, tile)

    def others(self) -> Iterator[tuple[str, list[Call]]]:
        num_pairs, pdl = self._num_tokens * self._top_k, self._kernels.pdl
        if self._num_tokens > MAX_PAIRED:
            block_m, gate_up, down = choose_grouped(num_pairs, self._routing.num_experts, 2)
            tile = down if self._is_down else gate_up
            yield "bf16", [self._call(self._plain, chosen, tile, block_m) for chosen in self._chosen]
            return
        tiles = choose_pairs(self._top_k, *self._sizes, 2)
        if self._is_down:
            y = torch.randn(num_pairs, self._sizes[1], device=self._x.device).to(_DTYPE)
            calls = [
                _bind(pair_down, y, self._plain.down, chosen, tiles[1], None, None, pdl)
                for chosen in self._chosen
            ]
        else:
            calls = [
                _bind(pair_gate_up, self._x, self._plain.gate_up, chosen, self._gate, tiles[0], pdl)
                for chosen in self._chosen
            ]
        yield "bf16", calls

    def error(self, candidate: Candidate) -> float:
        chosen, block_m = self._chosen[0], candidate.block_m
        _, gate_up, down = choose_grouped(self._num_tokens * self._top_k, self._routing.num_experts, 2)
        actual = self._call(self._experts, chosen, candidate.tile, block_m)()
        expected = self._call(self._plain, chosen, down if self._is_down else gate_up, block_m)()
        if self._is_down:
            return _error(actual, expected)
        _, blocks = self._hidden(chosen, block_m)
        live = torch.arange(block_m, device=actual.device)[None, :] < blocks[2][:, None]
        return _error(actual[live.flatten()], expected[live.flatten()])

    def limit(self, ceilings: Ceilings) -> float | None:
        num_pairs = self._num_tokens * self._top_k
        hidden, inner = self._sizes
        moved = 2 * (self._num_tokens * hidden + num_pairs * (hidden + inner if self._is_down else inner))
        flops = 2 * num_pairs * hidden * inner * (1 if self._is_down else 2)
        return _limit(ceilings, self._bytes_read() + moved, flops, self._matrices)


def _near(tile: LinearTile, medium: bool, group: int) -> Iterator[LinearTile]:
    """Yield tiles that differ from one in a single number."""
    for block_n in (tile.block_n // 2, 2 * tile.block_n):
        if 32 <= block_n <= 256:
            yield replace(tile, block_n=block_n)
    yield replace(tile, stages=tile.stages + 1)
    if tile.stages > 2:
        yield replace(tile, stages=tile.stages - 1)
    if tile.split_k < 8:
        yield replace(tile, split_k=2 * tile.split_k)
    if tile.split_k > 1:
        yield replace(tile, split_k=tile.split_k // 2)
    if max(tile.block_n, tile.block_m) >= 128:
        yield replace(tile, num_warps=12 - tile.num_warps)
    if medium:
        yield replace(tile, block_m=192 - tile.block_m)
    if not group:
        yield replace(tile, block_k=384 - tile.block_k)


def _repeat_experts(tensor: Tensor) -> None:
    """Copy the first experts to all others."""
    first = tensor[:_DISTINCT_EXPERTS].clone()
    for expert in range(_DISTINCT_EXPERTS, len(tensor)):
        tensor[expert] = first[expert % _DISTINCT_EXPERTS]


def _num_bytes(held: HeldWeights) -> int:
    tensors = held.codes, held.scales, held.zeros
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _limit(ceilings: Ceilings, num_bytes: int, flops: int, held: HeldWeights) -> float | None:
    if ceilings.read is None or ceilings.matmul is None:
        return None
    rate = ceilings.matmul * (2 if held.quantizes_inputs else 1)
    return max(num_bytes / ceilings.read, flops / rate) / 1e12


def _error(actual: Tensor, expected: Tensor) -> float:
    wide = expected.float()
    return float((actual.float() - wide).norm() / wide.norm())


def _bind(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)
