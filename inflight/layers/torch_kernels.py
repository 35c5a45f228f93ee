"""Layers in plain torch: the reference of other kernels, and the fallback of devices without any."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.layers.cpu_recurrent import TorchRecurrent
from inflight.layers.formats.schemes import Scheme, Weight, to_tensor
from inflight.layers.kernels import (
    CLAMPED_SILU,
    CLAMPED_SILU_SLOPE,
    ExpertRouting,
    Experts,
    ExpertsShape,
    FusableLayer,
    Kernels,
    Linear,
    LoadedExperts,
    Reduce,
    Residual,
    as_scheme,
    check_activation,
    check_gate,
    check_weight,
    copy_bias,
)


def choose_experts(
    logits: Tensor, routing: ExpertRouting, correction: Tensor | None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ids [T, top_k] int64 and weights [T, top_k] float32 of each token's experts, best first."""
    logits = logits.float()
    if routing.scores == "chosen":
        values, ids = logits.topk(routing.top_k, dim=-1)
        weights = values.softmax(dim=-1)
    else:
        scores = logits.softmax(dim=-1) if routing.scores == "softmax" else logits.sigmoid()
        ranking = scores if correction is None else scores + correction
        if routing.top_groups < routing.num_groups:
            ranking = _only_best_groups(ranking, routing)
        ids = ranking.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # all sigmoids may be 0
    weights = weights * routing.scale
    return ids, weights if scales is None else weights * scales[ids]


def _only_best_groups(ranking: Tensor, routing: ExpertRouting) -> Tensor:
    """Return the ranking with -inf in all but the best groups."""
    groups = ranking.view(len(ranking), routing.num_groups, -1)  # [T, num_groups, experts of a group]
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(routing.top_groups, dim=-1).indices
    outside = torch.ones(groups.shape[:2], dtype=torch.bool, device=ranking.device).scatter_(1, best, False)
    return groups.masked_fill(outside[:, :, None], -torch.inf).flatten(1)


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class ComposedLinear(ABC):
    """`Linear` built from single operations, for devices where fusing gains nothing.

    Subclasses add the storage: loading, embedding lookup and the product itself.
    """

    def __init__(
        self,
        kernels: Kernels,
        in_features: int,
        out_features: int,
        bias: Tensor | None,  # [out_features]
        reduce: Reduce | None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self._kernels = kernels
        self._bias = bias
        self._reduce = reduce

    @abstractmethod
    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None: ...

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor: ...

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        copy_bias(self, self._bias, bias, first_row)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        check_activation(activation)
        return _ACTIVATIONS[activation](self(x))

    def normed(self, residual: Residual, eps: float) -> Tensor:
        x, norm = residual.x, residual.norm
        return self(x if norm is None else self._kernels.rms_norm(x, norm, eps))

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        return self._kernels.gate(self.normed(residual, eps), activation)

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        y = self(x)
        if self._reduce is not None:
            y = self._reduce.sum(y)
        if norm is not None:
            y = self._kernels.rms_norm(y, norm, eps)
        return Residual(self._kernels.add(residual.x, y), next_norm)

    def logits(self, x: Tensor, norm: Tensor, eps: float, count: int | None = None) -> Tensor:
        return self(self._kernels.rms_norm(x, norm, eps))[:, :count].float()


class TorchLinear(ComposedLinear):
    """A linear layer over row-major weights, plain or in any scheme. Quantized ones are dequantized for every product:
    the reference of other kernels, and a layer of the right size on the meta device."""

    def __init__(
        self,
        kernels: Kernels,
        in_features: int,
        out_features: int,
        stored: torch.dtype | Scheme,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        dtype = self._compute_dtype = kernels.compute_dtype
        own_bias = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        super().__init__(kernels, in_features, out_features, own_bias, reduce)
        self._weight = _empty_weight(out_features, in_features, stored, device)

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_weight(self, weight, first_row, first_column)
        _copy(self._weight, weight, first_row, first_column)

    def embed(self, ids: Tensor) -> Tensor:
        rows = self._weight[ids] if isinstance(self._weight, Tensor) else self._dense()[ids]
        return rows.to(self._compute_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._dense(), self._bias)

    def _dense(self) -> Tensor:
        weight, dtype = self._weight, self._compute_dtype
        return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def _empty_weight(
    num_rows: int, num_columns: int, stored: torch.dtype | Scheme, device: torch.device
) -> Weight:
    if isinstance(stored, torch.dtype):
        return torch.empty(num_rows, num_columns, dtype=stored, device=device)
    return stored.empty(num_rows, num_columns, device)


def _copy(to: Weight, weight: Weight, first_row: int, first_column: int) -> None:
    """Copy a rectangle of plain weights, or whole rows of quantized ones."""
    if isinstance(to, Tensor):
        num_rows, num_columns = weight.shape
        to[first_row : first_row + num_rows, first_column : first_column + num_columns] = to_tensor(weight)
    else:
        to.copy_rows(as_scheme(to.scheme, weight, first_row, first_column, to.shape), first_row)


class TorchExperts(LoadedExperts):
    """Implements `Experts` expert by expert, over row-major weights."""

    def __init__(
        self,
        kernels: TorchKernels,
        shape: ExpertsShape,
        reduce: Reduce | None,
        device: torch.device,
        scheme: Scheme | None = None,
    ) -> None:
        routing, hidden, compute = shape.routing, shape.hidden, kernels.compute_dtype
        self.router: Linear = kernels.linear(hidden, routing.num_experts, shape.dtype, routing.has_bias)
        super().__init__(shape, reduce, compute, device)
        self._kernels = kernels
        count, stored = len(shape.experts), scheme or torch.promote_types(shape.dtype, compute)
        # The matrices of all experts one below the other.
        self._gate_up = _empty_weight(count * 2 * shape.inner, hidden, stored, device)
        self._down = _empty_weight(count * hidden, shape.inner, stored, device)

    def _load(self, down: bool, index: int, rows: slice, weight: Weight, first_column: int) -> None:
        to, num_rows = (self._down, self._shape.hidden) if down else (self._gate_up, 2 * self._shape.inner)
        _copy(to, weight, index * num_rows + rows.start, first_column)

    def add_to(
        self,
        residual: Residual,
        eps: float,
        next_norm: Tensor | None,
        padding_mask: Tensor | None = None,
        partial: Tensor | None = None,
    ) -> Residual:
        x = residual.x
        if residual.norm is not None:
            x = self._kernels.rms_norm(x, residual.norm, eps)
        y = self._sum(x, self.router(x), padding_mask)
        if partial is not None:
            y = y + partial
        if self._reduce is not None:
            y = self._reduce.sum(y.contiguous())
        return Residual(self._kernels.add(residual.x, y), next_norm)

    def sum(self, x: Tensor, routed: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        y = self._sum(x, self.router(routed), padding_mask)
        return y if self._reduce is None else self._reduce.sum(y.contiguous())

    def _sum(self, x: Tensor, logits: Tensor, padding_mask: Tensor | None) -> Tensor:
        ids, weights = choose_experts(logits, self._shape.routing, self.correction, self.scales)
        if padding_mask is not None:
            ids = ids.masked_fill(padding_mask[:, None] < 0, -1)
        self.tokens += torch.bincount(ids.flatten() + 1, minlength=len(self.tokens) + 1)[1:]
        # One row per token and expert, added below in the order of a token's experts.
        products = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
        for expert in self._shape.experts:
            tokens, ranks = torch.nonzero(ids == expert, as_tuple=True)
            y = self._product(expert - self._shape.experts.start, x[tokens])
            products[tokens, ranks] = y * weights[tokens, ranks, None].to(y.dtype)
        y = products[:, 0]
        for rank in range(1, self._shape.routing.top_k):
            y = y + products[:, rank]
        return y

    def _product(self, index: int, x: Tensor) -> Tensor:
        gate_up_bias = None if self._gate_up_bias is None else self._gate_up_bias[index]
        down_bias = None if self._down_bias is None else self._down_bias[index]
        gate_up = F.linear(x, self._matrix(self._gate_up, index), gate_up_bias)
        if self._shape.activation == CLAMPED_SILU:
            limit, (gate, up) = self._shape.limit, gate_up.chunk(2, dim=-1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(CLAMPED_SILU_SLOPE * gate)
        else:
            inner = self._kernels.gate(gate_up, self._shape.activation)
        return F.linear(inner, self._matrix(self._down, index), down_bias)

    def _matrix(self, weight: Weight, index: int) -> Tensor:
        """Return one expert's rows in the compute dtype."""
        count = len(weight) // len(self._shape.experts)
        return to_tensor(weight[index * count : (index + 1) * count]).to(self._kernels.compute_dtype)


class TorchKernels:
    """Implements `Kernels`. With `quantized`, layers hold quantized weights, which saves memory but no time: as they
    are, or in the scheme that it returns, given theirs and whether the layer is one of experts; None: plain ones."""

    def __init__(
        self,
        compute_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        quantized: bool | Callable[[Scheme, bool], Scheme | None] = False,
    ) -> None:
        self.compute_dtype = compute_dtype
        self.recurrent = TorchRecurrent()
        self._device = torch.device(device)
        self._quantized = quantized

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return x.div(cap).tanh_().mul_(cap)

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None = None,
        scheme: Scheme | None = None,
    ) -> Linear:
        scheme = self._held_as(scheme, experts=False)
        # Widen once here rather than on every call; this is never less precise than `dtype`.
        stored = scheme or torch.promote_types(dtype, self.compute_dtype)
        return TorchLinear(self, in_features, out_features, stored, bias, reduce, self._device)

    def experts(self, shape: ExpertsShape, reduce: Reduce | None = None) -> Experts:
        scheme = self._held_as(shape.scheme, experts=True)
        return TorchExperts(self, shape, reduce, self._device, scheme)

    def _held_as(self, scheme: Scheme | None, experts: bool) -> Scheme | None:
        if scheme is None or isinstance(self._quantized, bool):
            return scheme if self._quantized else None
        return self._quantized(scheme, experts)

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return table[ids].to(self.compute_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + x

    def fuse(self, layers: Sequence[FusableLayer], attention: Any) -> None:  # noqa: ARG002
        return None

    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        rotary_dim = cos_sin.shape[-1]
        half = rotary_dim // 2
        angles = cos_sin[positions].float().unsqueeze(1)  # [T, 1, rotary_dim]
        cos, sin = angles[..., :half], angles[..., half:]
        left, right = x[..., :half].float(), x[..., half:rotary_dim].float()
        rotated = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        check_gate(activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate) * up

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)

    def add_layer_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        total = residual.float() + x.float()
        return F.layer_norm(total, weight.shape, weight, bias, eps).to(residual.dtype)
