"""The experts of a layer on a GPU: which kernels of `layers/triton/experts.py` run for a step, and with which tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.kernels import Reduce, Residual, Routing
from inflight.layers.triton.elementwise import ACTIVATIONS
from inflight.layers.triton.experts import (
    CLAMPED,
    Chosen,
    choose_experts,
    combine,
    group_pairs,
    grouped_down,
    grouped_gate_up,
    pair_down,
    pair_gate_up,
)
from inflight.layers.triton.linear_parts import NextNorm
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import MAX_SMALL, choose_grouped, choose_pairs

if TYPE_CHECKING:
    from inflight.layers.triton_kernels import TritonKernels

_FLOAT32_SUMS = (
    1024  # tokens up to which the products of a token's experts are held as float32 until they are added
)


class TritonExperts:
    """Implements `Experts` over weights in the compute dtype; gate and up rows alternate."""

    def __init__(
        self,
        kernels: TritonKernels,
        hidden: int,
        inner: int,
        routing: Routing,
        activation: str,
        bias: bool,
        limit: float,
        reduce: Reduce | None,
    ) -> None:
        num_experts = routing.num_experts
        grouped = routing.num_groups > 1
        if grouped and (num_experts & (num_experts - 1) or num_experts % routing.num_groups):
            raise ConfigError(
                f"the router has {num_experts} experts in {routing.num_groups} groups: on a GPU, groups need a power "
                "of two"
            )
        self._kernels, self._routing, self._reduce = kernels, routing, reduce
        self._activation = CLAMPED if activation == "clamped_silu" else ACTIVATIONS[activation]
        self._limit = limit
        dtype, device = kernels.compute_dtype, kernels.device
        self.router = kernels.linear(hidden, num_experts, dtype, routing.has_bias)
        self.correction: Tensor | None = None
        if routing.has_correction:
            self.correction = torch.empty(num_experts, dtype=torch.float32, device=device)
        self.gate_up = torch.empty(num_experts, 2 * inner, hidden, dtype=dtype, device=device)
        self.down = torch.empty(num_experts, hidden, inner, dtype=dtype, device=device)
        self.gate_up_bias = torch.zeros(num_experts, 2 * inner, dtype=dtype, device=device) if bias else None
        self.down_bias = torch.zeros(num_experts, hidden, dtype=dtype, device=device) if bias else None

    # ---- loading ----

    def load(self, part: str, expert: int, weight: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        rows, columns = weight.shape
        matrix = self.down[expert] if part == "down" else self.gate_up[expert][part == "up" :: 2]
        matrix[first_row : first_row + rows, first_column : first_column + columns] = weight

    def load_bias(self, part: str, expert: int, bias: Tensor, first_row: int = 0) -> None:
        assert self.gate_up_bias is not None
        assert self.down_bias is not None
        vector = self.down_bias[expert] if part == "down" else self.gate_up_bias[expert][part == "up" :: 2]
        vector[first_row : first_row + len(bias)] = bias

    # ---- the operation of models ----

    def add_to(
        self, residual: Residual, eps: float, next_norm: Tensor | None, live: Tensor | None = None
    ) -> Residual:
        """In place: the residual becomes the sum."""
        kernels, hidden = self._kernels, residual.x
        x = hidden if residual.norm is None else kernels.rms_norm(hidden, residual.norm, eps)
        chosen = self._choose(x, live)
        if self._reduce is not None:
            kernels.add(hidden, self._reduce.sum(self._sum(x, chosen, None, None)))
            return Residual(hidden, next_norm)
        # Half of the next norm is done here, unless hidden states are float16: see `TritonLinear._left_for`.
        left = None if next_norm is None or hidden.dtype == torch.float16 else NextNorm(next_norm)
        self._sum(x, chosen, hidden, left)
        return (
            Residual(hidden, next_norm)
            if left is None
            else Residual(hidden, next_norm, left.scaled, left.squares)
        )

    def _choose(self, x: Tensor, live: Tensor | None) -> Chosen:
        routing, kernels = self._routing, self._kernels
        return choose_experts(
            self._logits(x),
            routing.top_k,
            scores=routing.scores,
            normalise=routing.normalise,
            scale=routing.scale,
            correction=self.correction,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            live=live,
            pdl=kernels.pdl,
        )

    def _logits(self, x: Tensor) -> Tensor:
        """Return the router's logits in float32."""
        kernels, weight, bias = self._kernels, self.router.weight, self.router.bias
        if 0 < len(x) <= MAX_SMALL:
            out = torch.empty(len(x), len(weight), dtype=torch.float32, device=x.device)
            return small_linear(x, weight, kernels.workspace, bias=bias, out=out, pdl=kernels.pdl)
        if bias is None and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, weight.T, out_dtype=torch.float32)
        return F.linear(x, weight, bias).float()

    def _sum(self, x: Tensor, chosen: Chosen, residual: Tensor | None, left: NextNorm | None) -> Tensor:
        """Return the weighted sum of each token's experts, added to the residual in place if there is one."""
        pdl, num_tokens, top_k = self._kernels.pdl, *chosen.ids.shape
        up, down = (self.gate_up, self.gate_up_bias), (self.down, self.down_bias)
        num_experts, hidden, inner = self.down.shape
        itemsize = self.down.itemsize
        if (pairs := choose_pairs(num_tokens, hidden, inner, itemsize)) is not None:
            y = pair_gate_up(x, *up, chosen, self._activation, pairs[0], self._limit, pdl)
            return pair_down(y, *down, chosen, pairs[1], residual, left, pdl)
        block_m, up_tile, down_tile = choose_grouped(num_tokens * top_k, num_experts, itemsize)
        blocks = group_pairs(chosen, num_experts, block_m, pdl)
        y = grouped_gate_up(x, *up, chosen, blocks, self._activation, up_tile, self._limit, pdl)
        dtype = torch.float32 if num_tokens <= _FLOAT32_SUMS else x.dtype
        y = grouped_down(y, *down, chosen, blocks, down_tile, dtype, pdl)
        return combine(y, chosen, num_experts, x.dtype, residual, left, pdl)
