"""Mixtures of experts on a GPU: the kernels of `triton/routing.py`, and those for few or for many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats import GroupedMatrix, GroupScheme, Scheme, Weight, plain
from inflight.layers.formats.schemes import unpack_nibbles
from inflight.layers.gpu_weights import empty_words, held_on_gpu
from inflight.layers.kernels import (
    CLAMPED_SILU,
    ExpertsShape,
    Linear,
    Reduce,
    Residual,
    check_bias_fits,
    check_expert,
    check_fits,
    taken_as,
)
from inflight.layers.triton.elementwise import ACTIVATIONS
from inflight.layers.triton.expert_parts import CLAMPED, ExpertWeights, Gate
from inflight.layers.triton.grouped_experts import combine, grouped_down, grouped_gate_up
from inflight.layers.triton.linear_parts import NextNorm
from inflight.layers.triton.mxfp4 import GROUP, pack_codes, pack_scales
from inflight.layers.triton.pair_experts import pair_down, pair_gate_up
from inflight.layers.triton.quantized import (
    FP8,
    INT4,
    MXFP4,
    PLAIN,
    PRODUCTS,
    pack_int4,
    pack_int4_scales,
)
from inflight.layers.triton.routing import Chosen, HalfNormed, RouterProduct, choose_experts
from inflight.layers.triton.tuning import (
    MAX_PAIRED,
    MAX_PAIRED_BYTES,
    MAX_PAIRED_MXFP4,
    MAX_ROUTED,
    MAX_ROUTED_FEATURES,
    choose_grouped,
    choose_grouped_quantized,
    choose_pairs,
    choose_pairs_quantized,
)

if TYPE_CHECKING:
    from inflight.layers.triton_kernels import TritonKernels, TritonLinear

_FLOAT32_SUMS = 64  # tokens up to which the products of experts are held as float32 until they are added


class TritonExperts:
    """Implements `Experts` over weights in the compute dtype or quantized ones; gate and up rows alternate."""

    def __init__(
        self,
        kernels: TritonKernels,
        router: TritonLinear,
        shape: ExpertsShape,
        reduce: Reduce | None,
    ) -> None:
        routing, num_experts, scheme = shape.routing, shape.routing.num_experts, shape.scheme
        if scheme is not None and not held_on_gpu(scheme, experts=True):
            scheme = None
        grouped = routing.num_groups > 1
        if grouped and (num_experts & (num_experts - 1) or num_experts % routing.num_groups):
            raise ConfigError(
                f"the router has {num_experts} experts in {routing.num_groups} groups: on a GPU, groups need a power "
                "of two"
            )
        self._kernels, self._routing, self._reduce = kernels, routing, reduce
        self._held = held = shape.experts
        clamped = shape.activation == CLAMPED_SILU
        self._gate = Gate(CLAMPED if clamped else ACTIVATIONS[shape.activation], shape.limit)
        self._router = router
        self.router: Linear = router
        dtype, device = kernels.compute_dtype, kernels.device
        self.correction = torch.zeros(num_experts, device=device) if routing.has_correction else None
        self.scales = torch.ones(num_experts, device=device) if routing.has_scales else None
        count, hidden, inner = len(held), shape.hidden, shape.inner
        gate_up_bias = torch.zeros(count, 2 * inner, dtype=dtype, device=device) if shape.bias else None
        down_bias = torch.zeros(count, hidden, dtype=dtype, device=device) if shape.bias else None
        self._inner, self._scheme = inner, scheme
        self.gate_up = _allocate(kernels, count, 2 * inner, hidden, gate_up_bias, scheme)
        self.down = _allocate(kernels, count, hidden, inner, down_bias, scheme)
        self._counts = torch.zeros(count, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(MAX_ROUTED, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(num_experts, dtype=torch.int64, device=device)

    # ---- loading ----

    def load(self, part: str, expert: int, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        matrices, index, rows, shape = self._part(part, expert)
        check_fits(weight, first_row, first_column, *shape)
        num_rows, num_columns = weight.shape
        codes = matrices.weight[index, rows][first_row : first_row + num_rows]
        if self._scheme is None:
            codes[:, first_column : first_column + num_columns] = plain(weight)
            return
        matrix = taken_as(self._scheme, weight, first_row, first_column, shape)
        assert isinstance(matrix, GroupedMatrix)
        assert matrices.scales is not None
        scales = matrices.scales[index, :, rows][:, first_row : first_row + num_rows]
        if matrices.kind == MXFP4:
            codes.copy_(pack_codes(unpack_nibbles(matrix.codes.to(codes.device))))
            scales.copy_(pack_scales(matrix.scales).T)
            return
        if matrices.kind == INT4:
            codes.copy_(pack_int4(unpack_nibbles(matrix.codes.to(codes.device)), matrices.group))
            scales.copy_(pack_int4_scales(matrix.scales, matrix.zeros, len(scales)))
            return
        codes.view(torch.uint8).copy_(matrix.codes.view(torch.uint8))
        scales.copy_(matrix.scales.T)
        if matrices.zeros is not None and matrix.zeros is not None:
            zeros = matrices.zeros[index, :, rows][:, first_row : first_row + num_rows]
            zeros.copy_(matrix.zeros.T)

    def load_bias(self, part: str, expert: int, bias: Tensor, first_row: int = 0) -> None:
        matrices, index, rows, _ = self._part(part, expert)
        if matrices.bias is None:
            raise ConfigError("cannot load a bias into experts that were created without one")
        to = matrices.bias[index, rows]
        check_bias_fits(bias, first_row, len(to))
        to[first_row : first_row + len(bias)] = bias

    def _part(self, part: str, expert: int) -> tuple[ExpertWeights, int, slice, tuple[int, int]]:
        """Return where a part is: the matrices, the expert's index and the rows of them, and the part's shape."""
        check_expert(self._held, expert, part)
        index, hidden = expert - self._held.start, self._router.in_features
        if part == "down":
            return self.down, index, slice(None), (hidden, self._inner)
        return self.gate_up, index, slice(int(part == "up"), None, 2), (self._inner, hidden)

    # ---- the operation of models ----

    def add_to(
        self,
        residual: Residual,
        eps: float,
        next_norm: Tensor | None,
        live: Tensor | None = None,
        partial: Tensor | None = None,
    ) -> Residual:
        """In place: the residual becomes the sum."""
        kernels, hidden = self._kernels, residual.x
        half_normed = None
        logits: Tensor | RouterProduct
        if residual.scaled is None:
            norm = residual.norm
            x = hidden if norm is None else kernels.rms_norm(hidden, norm, eps)
            logits = self._router.wide(Residual(x, None), eps)
        else:
            x, half_normed = residual.scaled, HalfNormed(residual.squares, hidden.shape[1], eps)
            logits = self._logits(residual, eps)
        chosen = self._choose(logits, live, half_normed)
        if self._reduce is not None or partial is not None:
            y = self._sum(x, chosen, partial, None)
            kernels.add(hidden, y if self._reduce is None else self._reduce.sum(y))
            return Residual(hidden, next_norm)
        left = self._router.left_for(next_norm, hidden, hidden)
        self._sum(x, chosen, hidden, left)
        if left is None:
            return Residual(hidden, next_norm)
        return Residual(hidden, next_norm, left.scaled, left.squares)

    def sum(self, x: Tensor, routed: Tensor, live: Tensor | None = None) -> Tensor:
        chosen = self._choose(self._router.wide(Residual(routed, None), 0.0), live, None)
        y = self._sum(x, chosen, None, None)
        return y if self._reduce is None else self._reduce.sum(y)

    def _logits(self, residual: Residual, eps: float) -> Tensor | RouterProduct:
        """Return the logits of a residual that is half normed."""
        weight = self._router.weight
        assert residual.scaled is not None
        if len(residual.x) > MAX_ROUTED or self._router.in_features > MAX_ROUTED_FEATURES:
            return self._router.wide(residual, eps)
        assert isinstance(weight, Tensor)  # routers are never quantized
        return RouterProduct(residual.scaled, weight, self._router.bias, self._arrived)

    def _choose(
        self, logits: Tensor | RouterProduct, live: Tensor | None, half_normed: HalfNormed | None
    ) -> Chosen:
        num_tokens = len(logits if isinstance(logits, Tensor) else logits.x)
        return choose_experts(
            logits,
            self._routing,
            self.tokens,
            correction=self.correction,
            scales=self.scales,
            live=live,
            held=self._held,
            counts=None if num_tokens <= self._max_paired() else self._counts,
            half_normed=half_normed,
            pdl=self._kernels.pdl,
        )

    def _max_paired(self) -> int:
        """Return the most tokens whose experts are computed pair by pair."""
        return {PLAIN: MAX_PAIRED, MXFP4: MAX_PAIRED_MXFP4, INT4: 0}.get(self.down.kind, MAX_PAIRED_BYTES)

    def _sum(self, x: Tensor, chosen: Chosen, residual: Tensor | None, left: NextNorm | None) -> Tensor:
        """Return the weighted sum of each token's experts, added to the residual in place if there is one."""
        pdl, num_tokens, top_k = self._kernels.pdl, *chosen.ids.shape
        gate_up, down = self.gate_up, self.down
        num_experts, hidden, inner = len(down.weight), self._router.in_features, self._inner
        itemsize = x.itemsize
        if chosen.groups is None:
            if down.kind == PLAIN:
                pair_tiles = choose_pairs(top_k, hidden, inner, itemsize)
            else:
                fp8 = down.kind == FP8 and down.zeros is None and down.group % 128 == 0
                pair_tiles = choose_pairs_quantized(top_k, hidden, inner, down.kind == MXFP4, fp8)
            y = pair_gate_up(x, gate_up, chosen, self._gate, pair_tiles[0], pdl)
            return pair_down(y, down, chosen, pair_tiles[1], residual, left, pdl)
        if down.kind == PLAIN:
            tiles = choose_grouped(num_tokens * top_k, num_experts, itemsize)
        else:
            converted = down.kind not in PRODUCTS
            step = down.group if down.kind == INT4 else 128
            num_pairs, mxfp4 = num_tokens * top_k, down.kind == MXFP4
            tiles = choose_grouped_quantized(num_pairs, num_experts, converted, step, mxfp4)
        block_m, gate_up_tile, down_tile = tiles
        y, blocks = grouped_gate_up(x, gate_up, chosen, block_m, self._gate, gate_up_tile, pdl)
        dtype = torch.float32 if num_tokens <= _FLOAT32_SUMS else y.dtype
        y = grouped_down(y, down, chosen, blocks, block_m, down_tile, dtype, pdl)
        return combine(y, chosen, x.dtype, residual, left, pdl)


def _allocate(
    kernels: TritonKernels,
    count: int,
    num_rows: int,
    num_columns: int,
    bias: Tensor | None,
    scheme: Scheme | None,
) -> ExpertWeights:
    """Return empty matrices [count, num_rows, num_columns], held as the scheme says."""
    device = kernels.device
    if scheme is None:
        shape = count, num_rows, num_columns
        return ExpertWeights(torch.empty(shape, dtype=kernels.compute_dtype, device=device), bias)
    assert isinstance(scheme, GroupScheme)
    if scheme.bits[scheme.codes] == 4:
        words = empty_words(scheme, num_rows, num_columns, device, count)
        kind, group = (MXFP4, GROUP) if scheme.codes == "fp4" else (INT4, words.group)
        return ExpertWeights(words.codes, bias, kind, group, words.scales)
    kind, dtype = kernels.byte_codes(scheme, num_columns)
    shape = count, scheme.num_groups(num_columns), num_rows
    return ExpertWeights(
        torch.empty(count, num_rows, num_columns, dtype=dtype, device=device),
        bias,
        kind,
        scheme.group,
        torch.zeros(shape, device=device),
        torch.zeros(shape, dtype=torch.int8, device=device) if scheme.zeros else None,
    )
