"""Layers on a GPU: Triton kernels around cuBLAS, and Triton alone for steps with few tokens."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats import Scheme, Weight, plain
from inflight.layers.kernels import (
    CLAMPED_SILU,
    ExpertRouting,
    Experts,
    Linear,
    Reduce,
    Residual,
    check_activation,
    check_bias_fits,
    check_expert,
    check_fits,
    check_gate,
    copy_bias,
    copy_weight,
)
from inflight.layers.triton.elementwise import (
    ACTIVATIONS,
    activate_in_place,
    add_layer_norm,
    add_normed,
    embed,
    gate,
    layer_norm,
    rms_norm,
)
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
from inflight.layers.triton.linear_parts import NextNorm, SplitKWorkspace
from inflight.layers.triton.medium_linear import medium_linear
from inflight.layers.triton.recurrent import TritonRecurrent
from inflight.layers.triton.small_linear import small_linear
from inflight.layers.triton.tuning import (
    MAX_SMALL,
    MAX_TOKENS,
    choose_grouped,
    choose_pairs,
    pays_medium,
    pays_small,
)
from inflight.triton_utils.pdl import supports_pdl

_FLOAT32_SUMS = 1024  # tokens up to which the products of experts are held as float32 until they are added


@runtime_checkable
class AddingReduce(Reduce, Protocol):
    """A reduction that can add to the residual, and do half of the next norm, in the same pass."""

    def add_sum(
        self, hidden: Tensor, x: Tensor, norm: Tensor | None, eps: float, next_norm: NextNorm | None
    ) -> bool:
        """Add the sum of all x, or its rms_norm, to `hidden`, and fill in `next_norm`. Returns False, having done
        nothing, if it cannot."""


class TritonKernels:
    """Implements `Kernels`. All calls must come from one CUDA stream: the linear layers share a workspace."""

    def __init__(
        self,
        compute_dtype: torch.dtype,
        device: torch.device | str,
        few_tokens: int = MAX_TOKENS,
    ) -> None:
        """Fused kernels are used for up to `few_tokens` tokens where they pay; 0: never."""
        self.compute_dtype = compute_dtype
        self.device = torch.device(device)
        self.few_tokens = few_tokens
        self.pdl = supports_pdl(self.device)
        # Only measured with Hopper's copy engine: older chips use cuBLAS.
        self.medium = self.pdl or self.device.type != "cuda"
        self.workspace = SplitKWorkspace(self.device)
        self.recurrent = TritonRecurrent(self.pdl)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """In place."""
        return x.div_(cap).tanh_().mul_(cap)

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,  # noqa: ARG002
        bias: bool,
        reduce: Reduce | None = None,
        scheme: Scheme | None = None,  # noqa: ARG002
    ) -> Linear:
        return TritonLinear(self, in_features, out_features, bias, reduce)

    def experts(
        self,
        hidden: int,
        inner: int,
        routing: ExpertRouting,
        dtype: torch.dtype,  # noqa: ARG002
        activation: str,
        bias: bool = False,
        limit: float = 0.0,
        reduce: Reduce | None = None,
        held: range | None = None,
        scheme: Scheme | None = None,  # noqa: ARG002
    ) -> Experts:
        return TritonExperts(self, hidden, inner, routing, activation, bias, limit, reduce, held)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return embed(table, ids, self.pdl)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, self.pdl)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        check_gate(activation)
        return gate(gate_up, activation, self.pdl)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return layer_norm(x, weight, bias, eps, self.pdl)

    def add_layer_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        return add_layer_norm(residual, x, weight, bias, eps, self.pdl)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """In place."""
        return residual.add_(x)


class TritonLinear:
    """A linear layer over a row-major weight [out_features, in_features] in the compute dtype.

    Three kernels multiply it: `small_linear` for so few tokens that the time is that of reading the weights,
    `medium_linear` for some more, and cuBLAS with separate kernels around it.
    """

    def __init__(
        self,
        kernels: TritonKernels,
        in_features: int,
        out_features: int,
        bias: bool,
        reduce: Reduce | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._kernels = kernels
        self._reduce = reduce
        self._adding = reduce if isinstance(reduce, AddingReduce) else None
        dtype, device = kernels.compute_dtype, kernels.device
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None

    # ---- loading ----

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        copy_weight(self, self.weight, weight, first_row, first_column)

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        copy_bias(self, self.bias, bias, first_row)

    # ---- the operations of models ----

    def embed(self, ids: Tensor) -> Tensor:
        return self._kernels.embed(self.weight, ids)

    def __call__(self, x: Tensor) -> Tensor:
        return self.normed(Residual(x, None), 0.0)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        check_activation(activation)
        # A fused kernel with its own product takes as long as cuBLAS and a pass over its result.
        return activate_in_place(self(x), activation, self._kernels.pdl)

    def normed(self, residual: Residual, eps: float) -> Tensor:
        if self._is_fused(residual.x):
            return self._fused(residual, eps)
        return F.linear(self._norm(residual, eps), self.weight, self.bias)

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        check_gate(activation)
        if self._is_fused(residual.x, gated=True):
            return self._fused(residual, eps, activation=activation)
        return self._kernels.gate(self.normed(residual, eps), activation)

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        """In place: the residual becomes the sum."""
        hidden = residual.x
        if norm is None and self._reduce is None:
            return self._add_product(hidden, x, eps, next_norm)
        y = self(x)
        if self._adding is not None:
            left = self._left_for(next_norm, x, hidden)
            if self._adding.add_sum(hidden, y, norm, eps, left):
                return _read_through(hidden, next_norm, left)
        if self._reduce is not None:
            y = self._reduce.sum(y)
        if norm is None:
            self._kernels.add(hidden, y)
        else:
            add_normed(hidden, y, norm, eps, self._kernels.pdl)
        return Residual(hidden, next_norm)

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        residual = Residual(x, norm)
        if self._is_fused(x):
            out = torch.empty(len(x), self.out_features, dtype=torch.float32, device=x.device)
            return self._fused(residual, eps, out=out)
        x = self._norm(residual, eps)
        if self.bias is None and x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return F.linear(x, self.weight, self.bias).float()

    # ---- choosing the kernel ----

    def _is_fused(self, x: Tensor, gated: bool = False) -> bool:
        if len(x) > self._kernels.few_tokens:
            return False
        return self._is_small(x) or (self._kernels.medium and self._is_medium(x, gated))

    def _is_small(self, x: Tensor) -> bool:
        medium = self._kernels.medium
        return pays_small(len(x), self.out_features, self.in_features, x.element_size(), medium)

    def _is_medium(self, x: Tensor, gated: bool) -> bool:
        return pays_medium(len(x), self.out_features, self.in_features, x.element_size(), gated)

    def _norm(self, residual: Residual, eps: float) -> Tensor:
        return residual.x if residual.norm is None else self._kernels.rms_norm(residual.x, residual.norm, eps)

    def _add_product(self, hidden: Tensor, x: Tensor, eps: float, next_norm: Tensor | None) -> Residual:
        """Do product and sum in one kernel, and half of the next norm with them where that is safe."""
        if not self._is_fused(x):
            if self.bias is not None:
                hidden.add_(F.linear(x, self.weight, self.bias))
            else:
                hidden.addmm_(x, self.weight.T)
            return Residual(hidden, next_norm)
        left = self._left_for(next_norm, x, hidden)
        self._fused(Residual(x, None), eps, residual=hidden, next_norm=left, out=hidden)
        return _read_through(hidden, next_norm, left)

    def _left_for(self, next_norm: Tensor | None, x: Tensor, hidden: Tensor) -> NextNorm | None:
        """Return what to fill in for the next norm, if half of it is done here: in small steps, unless hidden states
        are float16. This half scales them up before the other half scales them down, which could overflow."""
        if next_norm is None or hidden.dtype == torch.float16 or not self._is_fused(x):
            return None
        return NextNorm(next_norm)

    def _fused(self, read: Residual, eps: float, **after: Any) -> Tensor:
        """Run the small or the medium kernel. `after` is passed on to it."""
        small, kernels = self._is_small(read.x), self._kernels
        if read.scaled is not None:
            x, norm = read.scaled, None
        elif small and read.x.dtype != torch.float16:  # see `_left_for`
            x, norm = read.x, read.norm
        else:
            x, norm = self._norm(read, eps), None
        after |= {"bias": self.bias, "squares": read.squares, "eps": eps, "pdl": kernels.pdl}
        if small:
            return small_linear(x, self.weight, kernels.workspace, norm=norm, **after)
        return medium_linear(x, self.weight, kernels.workspace, **after)


def _read_through(hidden: Tensor, norm: Tensor | None, left: NextNorm | None) -> Residual:
    if left is None:
        return Residual(hidden, norm)
    return Residual(hidden, norm, left.scaled, left.squares)


class TritonExperts:
    """Implements `Experts` over weights in the compute dtype; gate and up rows alternate."""

    def __init__(
        self,
        kernels: TritonKernels,
        hidden: int,
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
        self._activation = CLAMPED if activation == CLAMPED_SILU else ACTIVATIONS[activation]
        self._limit = limit
        dtype, device = kernels.compute_dtype, kernels.device
        self._router = TritonLinear(kernels, hidden, num_experts, routing.has_bias)
        self.router: Linear = self._router
        self.correction = torch.zeros(num_experts, device=device) if routing.has_correction else None
        count = len(held)
        self.gate_up = torch.empty(count, 2 * inner, hidden, dtype=dtype, device=device)
        self.down = torch.empty(count, hidden, inner, dtype=dtype, device=device)
        self.gate_up_bias = torch.zeros(count, 2 * inner, dtype=dtype, device=device) if bias else None
        self.down_bias = torch.zeros(count, hidden, dtype=dtype, device=device) if bias else None

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
            held=self._held,
            pdl=kernels.pdl,
        )

    def _logits(self, x: Tensor) -> Tensor:
        """Return the router's logits in float32."""
        kernels, weight, bias = self._kernels, self._router.weight, self._router.bias
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
