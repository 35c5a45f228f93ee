"""Mixtures of experts on a GPU: the kernels of `triton/routing.py`, and those for few or for many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats import Weight, plain
from inflight.layers.kernels import (
    CLAMPED_SILU,
    ExpertRouting,
    Linear,
    Reduce,
    Residual,
    check_bias_fits,
    check_expert,
    check_fits,
    check_gate,
)
from inflight.layers.triton.elementwise import ACTIVATIONS
from inflight.layers.triton.expert_parts import CLAMPED, ExpertWeights, Gate
from inflight.layers.triton.grouped_experts import combine, grouped_down, grouped_gate_up
from inflight.layers.triton.linear_parts import NextNorm
from inflight.layers.triton.pair_experts import pair_down, pair_gate_up
from inflight.layers.triton.routing import Chosen, HalfNormed, choose_experts
from inflight.layers.triton.tuning import MAX_PAIRED, choose_grouped, choose_pairs

if TYPE_CHECKING:
    from inflight.layers.triton_kernels import TritonKernels, TritonLinear

_FLOAT32_SUMS = 1024  # tokens up to which the products of experts are held as float32 until they are added


class TritonExperts:
    """Implements `Experts` over weights in the compute dtype; gate and up rows alternate."""

    def __init__(
        self,
        kernels: TritonKernels,
        router: TritonLinear,
        inner: int,
        routing: ExpertRouting,
        activation: str,
        bias: bool,
        limit: float,
        reduce: Reduce | None,
        held: range | None,
    ) -> None:
        if activation != CLAMPED_SILU:
            check_gate(activation)
        num_experts = routing.num_experts
        grouped = routing.num_groups > 1
        if grouped and (num_experts & (num_experts - 1) or num_experts % routing.num_groups):
            raise ConfigError(
                f"the router has {num_experts} experts in {routing.num_groups} groups: on a GPU, groups need a power "
                "of two"
            )
        self._kernels, self._routing, self._reduce = kernels, routing, reduce
        self._held = held = range(num_experts) if held is None else held
        self._gate = Gate(CLAMPED if activation == CLAMPED_SILU else ACTIVATIONS[activation], limit)
        self._router = router
        self.router: Linear = router
        dtype, device = kernels.compute_dtype, kernels.device
        self.correction = torch.zeros(num_experts, device=device) if routing.has_correction else None
        count, hidden = len(held), router.in_features
        self.gate_up = torch.empty(count, 2 * inner, hidden, dtype=dtype, device=device)
        self.down = torch.empty(count, hidden, inner, dtype=dtype, device=device)
        self.gate_up_bias = torch.zeros(count, 2 * inner, dtype=dtype, device=device) if bias else None
        self.down_bias = torch.zeros(count, hidden, dtype=dtype, device=device) if bias else None
        self._counts = torch.zeros(count, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(num_experts, dtype=torch.int64, device=device)

    # ---- loading ----

    def load(self, part: str, expert: int, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        to = self._part(part, expert, self.gate_up, self.down)
        check_fits(weight, first_row, first_column, *to.shape)
        num_rows, num_columns = weight.shape
        to[first_row : first_row + num_rows, first_column : first_column + num_columns] = plain(weight)

    def load_bias(self, part: str, expert: int, bias: Tensor, first_row: int = 0) -> None:
        if self.gate_up_bias is None or self.down_bias is None:
            raise ConfigError("cannot load a bias into experts that were created without one")
        to = self._part(part, expert, self.gate_up_bias, self.down_bias)
        check_bias_fits(bias, first_row, len(to))
        to[first_row : first_row + len(bias)] = bias

    def _part(self, part: str, expert: int, gate_up: Tensor, down: Tensor) -> Tensor:
        check_expert(self._held, expert, part)
        index = expert - self._held.start
        return down[index] if part == "down" else gate_up[index][int(part == "up") :: 2]

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
        if residual.scaled is None:
            norm = residual.norm
            x = hidden if norm is None else kernels.rms_norm(hidden, norm, eps)
            logits = self._router.wide(Residual(x, None), eps)
        else:
            x, half_normed = residual.scaled, HalfNormed(residual.squares, hidden.shape[1], eps)
            logits = self._router.wide(residual, eps)
        chosen = choose_experts(
            logits,
            self._routing,
            self.tokens,
            correction=self.correction,
            live=live,
            held=self._held,
            counts=None if len(x) <= MAX_PAIRED else self._counts,
            half_normed=half_normed,
            pdl=kernels.pdl,
        )
        if self._reduce is not None or partial is not None:
            y = self._sum(x, chosen, partial, None)
            kernels.add(hidden, y if self._reduce is None else self._reduce.sum(y))
            return Residual(hidden, next_norm)
        left = self._router.left_for(next_norm, hidden, hidden)
        self._sum(x, chosen, hidden, left)
        if left is None:
            return Residual(hidden, next_norm)
        return Residual(hidden, next_norm, left.scaled, left.squares)

    def _sum(self, x: Tensor, chosen: Chosen, residual: Tensor | None, left: NextNorm | None) -> Tensor:
        """Return the weighted sum of each token's experts, added to the residual in place if there is one."""
        pdl, num_tokens, top_k = self._kernels.pdl, *chosen.ids.shape
        gate_up = ExpertWeights(self.gate_up, self.gate_up_bias)
        down = ExpertWeights(self.down, self.down_bias)
        num_experts, hidden, inner = self.down.shape
        itemsize = self.down.itemsize
        if chosen.groups is None:
            pair_tiles = choose_pairs(top_k, hidden, inner, itemsize)
            y = pair_gate_up(x, gate_up, chosen, self._gate, pair_tiles[0], pdl)
            return pair_down(y, down, chosen, pair_tiles[1], residual, left, pdl)
        block_m, gate_up_tile, down_tile = choose_grouped(num_tokens * top_k, num_experts, itemsize)
        y, blocks = grouped_gate_up(x, gate_up, chosen, block_m, self._gate, gate_up_tile, pdl)
        dtype = torch.float32 if num_tokens <= _FLOAT32_SUMS else y.dtype
        y = grouped_down(y, down, chosen, blocks, block_m, down_tile, dtype, pdl)
        return combine(y, chosen, x.dtype, residual, left, pdl)
