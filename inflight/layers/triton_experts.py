"""Mixtures of experts on a GPU: the kernels of `triton/routing.py`, and those for few or for many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats.schemes import Weight
from inflight.layers.kernels import CLAMPED_SILU, ExpertsShape, Linear, LoadedExperts, Reduce, Residual
from inflight.layers.triton.elementwise import ACTIVATIONS
from inflight.layers.triton.expert_parts import CLAMPED, Gate
from inflight.layers.triton.grouped_experts import combine, grouped_down, grouped_gate_up
from inflight.layers.triton.linear_parts import NextNorm
from inflight.layers.triton.pair_experts import pair_down, pair_gate_up
from inflight.layers.triton.routing import Chosen, HalfNormed, RouterProduct, choose_experts
from inflight.layers.triton.tuning import MAX_ROUTED, MAX_ROUTED_FEATURES

if TYPE_CHECKING:
    from inflight.layers.triton_kernels import TritonKernels, TritonLinear

_FLOAT32_SUMS = 64  # tokens up to which the products of experts are held as float32 until they are added


class TritonExperts(LoadedExperts):
    """Implements `Experts` over weights in the compute dtype or quantized ones."""

    alternating = True

    def __init__(
        self, kernels: TritonKernels, router: TritonLinear, shape: ExpertsShape, reduce: Reduce | None
    ) -> None:
        routing, num_experts = shape.routing, shape.routing.num_experts
        grouped = routing.num_groups > 1
        if grouped and (num_experts & (num_experts - 1) or num_experts % routing.num_groups):
            raise ConfigError(
                f"the router has {num_experts} experts in {routing.num_groups} groups: on a GPU, groups need a power "
                "of two"
            )
        dtype, device = kernels.compute_dtype, kernels.device
        super().__init__(shape, reduce, dtype, device)
        self._kernels = kernels
        clamped = shape.activation == CLAMPED_SILU
        self._gate = Gate(CLAMPED.value if clamped else ACTIVATIONS[shape.activation], shape.limit)
        self._router = router
        self.router: Linear = router
        count, hidden, inner = len(shape.experts), shape.hidden, shape.inner
        self.gate_up = kernels.allocate((count, 2 * inner, hidden), shape.scheme, True, self._gate_up_bias)
        self.down = kernels.allocate((count, hidden, inner), shape.scheme, True, self._down_bias)
        self._counts = torch.zeros(count, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(MAX_ROUTED, dtype=torch.int32, device=device)

    def _load(self, down: bool, index: int, rows: slice, weight: Weight, first_column: int) -> None:
        (self.down if down else self.gate_up).load(index, rows, weight, first_column)

    # ---- the operation of models ----

    def add_to(
        self,
        residual: Residual,
        eps: float,
        next_norm: Tensor | None,
        padding_mask: Tensor | None = None,
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
        chosen = self._choose(logits, padding_mask, half_normed)
        if self._reduce is not None or partial is not None:
            y = self._sum(x, chosen, partial, None)
            kernels.add(hidden, y if self._reduce is None else self._reduce.sum(y))
            return Residual(hidden, next_norm)
        buffers = self._router.next_norm_buffers(next_norm, hidden, hidden)
        self._sum(x, chosen, hidden, buffers)
        if buffers is None:
            return Residual(hidden, next_norm)
        return Residual(hidden, next_norm, buffers.scaled, buffers.squares)

    def sum(self, x: Tensor, routed: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        chosen = self._choose(self._router.wide(Residual(routed, None), 0.0), padding_mask, None)
        y = self._sum(x, chosen, None, None)
        return y if self._reduce is None else self._reduce.sum(y)

    def _logits(self, residual: Residual, eps: float) -> Tensor | RouterProduct:
        """Return the logits of a residual that is half normed."""
        assert residual.scaled is not None
        if len(residual.x) > MAX_ROUTED or self._router.in_features > MAX_ROUTED_FEATURES:
            return self._router.wide(residual, eps)
        weight = self._router.weights.codes[0]  # routers are never quantized
        return RouterProduct(residual.scaled, weight, self._router.bias, self._arrived)

    def _choose(
        self, logits: Tensor | RouterProduct, padding_mask: Tensor | None, half_normed: HalfNormed | None
    ) -> Chosen:
        num_tokens = len(logits if isinstance(logits, Tensor) else logits.x)
        return choose_experts(
            logits,
            self._shape.routing,
            self.tokens,
            correction=self.correction,
            scales=self.scales,
            padding_mask=padding_mask,
            local_experts=self._shape.experts,
            counts=None if num_tokens <= self.down.max_paired else self._counts,
            half_normed=half_normed,
            pdl=self._kernels.pdl,
        )

    def _sum(self, x: Tensor, chosen: Chosen, residual: Tensor | None, next_norm: NextNorm | None) -> Tensor:
        """Return the weighted sum of each token's experts, added to the residual in place if there is one."""
        pdl, num_tokens, top_k = self._kernels.pdl, *chosen.ids.shape
        gate_up, down = self.gate_up, self.down
        if chosen.groups is None:
            gate_up_pairs, down_pairs = down.pair_tiles(top_k)
            y = pair_gate_up(x, gate_up, chosen, self._gate, gate_up_pairs, pdl)
            return pair_down(y, down, chosen, down_pairs, residual, next_norm, pdl)
        block_m, gate_up_tile, down_tile = down.grouped_tiles(num_tokens * top_k)
        y, blocks = grouped_gate_up(x, gate_up, chosen, block_m, self._gate, gate_up_tile, pdl)
        dtype = torch.float32 if num_tokens <= _FLOAT32_SUMS else y.dtype
        y = grouped_down(y, down, chosen, blocks, block_m, down_tile, dtype, pdl)
        return combine(y, chosen, x.dtype, residual, next_norm, pdl)
