"""The interface between models and the arithmetic of one device, and its implementation in plain torch.

Decoders and encoders are written once, in terms of these operations; each is as large as some device can do in one
kernel. Everything that reads a weight matrix is a method of a `Linear` or of a layer's `Experts`, which own how their
matrices are stored, multiplied and loaded: another `Scheme` of quantized weights is another `Linear`. `Kernels` creates
them and does what needs no matrix. `TorchKernels` runs anywhere and is the reference and the fallback of devices
without kernels. `NativeKernels` is for CPUs, `TritonKernels` for GPUs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.cpu_recurrent import TorchRecurrent
from inflight.layers.formats import QuantizedMatrix, Scheme, Weight, plain
from inflight.layers.recurrent import RecurrentBackend

GATES = ("silu", "gelu_tanh", "gelu")  # "gelu" is the exact one, with erf
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
# The gate of gpt-oss: gate = min(gate, limit), up = clamp(up, -limit, limit), (up + 1) * gate * sigmoid(1.702 * gate).
CLAMPED_SILU = "clamped_silu"
CLAMPED_SILU_SLOPE = 1.702


class Reduce(Protocol):
    """Adds the partial products of layers that each hold some columns of one matrix."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum [M, out_features]. May overwrite x."""


@dataclass(frozen=True, slots=True)
class Residual:
    """Hidden states between two layers, and the norm through which the next layer reads them.

    The layer that writes the hidden states may precompute part of that norm; the reader may ignore it.
    """

    x: Tensor  # [T, hidden]
    norm: Tensor | None  # [hidden] float32; None: x is read as it is
    scaled: Tensor | None = None  # x * norm
    squares: Tensor | None = None  # [n, T]: sums of squares over n parts of the features


class Linear(Protocol):
    """y = x @ W.T + b, with W [out_features, in_features] held in the layout that suits the device best."""

    in_features: int
    out_features: int

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        """Copy `weight` [n, m] into rows [first_row, first_row + n) and columns [first_column, first_column + m). A
        layer that holds quantized weights takes them as its scheme has them, in whole rows; others take any."""

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        """Copy `bias` [n] into outputs [first_row, first_row + n)."""

    def embed(self, ids: Tensor) -> Tensor:
        """Return weight rows [len(ids), in_features] in the compute dtype: the lookup of a tied embedding."""

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in_features] -> [M, out_features]."""

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Return activation(product of x). The activation is one of ACTIVATIONS."""

    def normed(self, residual: Residual, eps: float) -> Tensor:
        """Return the product of rms_norm(x), or of x without a norm."""

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        """[T, hidden] -> [T, inner]: activation(first half) * second half of `normed`. One of GATES."""

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        """Return the residual plus rms_norm(y), or plus y without a norm, to be read through `next_norm`. y is the
        product of x, reduced first if the layer has a `Reduce`. May overwrite the residual."""

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Return the product of rms_norm(x) in float32."""


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """How a router chooses a token's experts and weighs them."""

    num_experts: int
    top_k: int
    # Softmax over all experts, a sigmoid of each logit, or a softmax over the logits of the chosen experts.
    scores: Literal["softmax", "sigmoid", "chosen"]
    normalise: bool = False  # divide the chosen weights by their sum
    scale: float = 1.0  # multiplies the weights
    # Experts are chosen from the `top_groups` groups whose two best have the highest sum.
    num_groups: int = 1
    top_groups: int = 1
    has_bias: bool = False  # whether the router has one
    has_correction: bool = False  # whether the scores have a bias that affects only which experts are chosen
    has_scales: bool = False  # whether each expert has a factor of its weight


class Experts(Protocol):
    """The router and the gated experts of one layer. A rank may hold only some of the experts."""

    router: Linear  # [num_experts, hidden]
    correction: Tensor | None  # [num_experts] float32
    scales: Tensor | None  # [num_experts] float32
    tokens: Tensor  # [num_experts] int64: how many have chosen each expert so far, held here or not

    def load(self, part: str, expert: int, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        """Copy rows and columns of the "gate" or "up" matrix [inner, hidden], or of the "down" matrix [hidden, inner],
        of one expert that is held here."""

    def load_bias(self, part: str, expert: int, bias: Tensor, first_row: int = 0) -> None:
        """Copy part of a bias of one expert. Biases are 0 until they are loaded."""

    def add_to(
        self,
        residual: Residual,
        eps: float,
        next_norm: Tensor | None,
        live: Tensor | None = None,
        partial: Tensor | None = None,
    ) -> Residual:
        """Return the residual plus the weighted sum of each token's experts, which read it through its norm. The sum,
        together with `partial` [T, hidden] if there is one, is reduced first if the layer has a `Reduce`.

        `live` [T] is negative for padding tokens, which have no experts. May overwrite the residual and `partial`.
        """

    def sum(self, x: Tensor, routed: Tensor, live: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts of x [T, hidden], chosen by the router from `routed`
        [T, hidden], and reduced if the layer has a `Reduce`. `live` is as above."""


class Kernels(Protocol):
    """The operations of one device. Activations are 2-D, [tokens, features], contiguous, in `compute_dtype`. Norm
    weights and biases are float32."""

    compute_dtype: torch.dtype

    @property
    def recurrent(self) -> RecurrentBackend[Any]:
        """Layers that keep a state."""

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None = None,
        scheme: Scheme | None = None,
    ) -> Linear:
        """Return an empty linear layer whose weights are stored as `dtype`, or in a type that is no less precise. With
        a scheme that the device has kernels for, they are stored as it says.

        `reduce` is for a layer that holds only some columns of its matrix (a sharded output or down projection); it is
        applied between the product and the residual. Only one of these layers has the bias.
        """

    def experts(
        self,
        hidden: int,
        inner: int,
        routing: ExpertRouting,
        dtype: torch.dtype,
        activation: str,
        bias: bool = False,
        limit: float = 0.0,
        reduce: Reduce | None = None,
        held: range | None = None,
        gate_up_scheme: Scheme | None = None,
        down_scheme: Scheme | None = None,
    ) -> Experts:
        """Return an empty router with empty experts. The activation is one of GATES, or CLAMPED_SILU with its `limit`.
        The schemes are those of the experts' matrices; routers are never quantized.

        `reduce` is for experts of which each rank holds some inner features, or only those in `held`.
        """

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """Return rows [len(ids), n] of an embedding table [N, n] in the compute dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension of a tensor of any rank; statistics in float32."""

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2n] -> [T, n]: activation(first half) * second half. One of GATES."""

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x [T, n] * sigmoid(gate), with a gate for each feature [T, n], or one for each token [T, 1]. May
        overwrite x."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """Return cap * tanh(x / cap), for float32 x. May overwrite x."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Normalise each token's features [T, n]; statistics in float32."""

    def add_layer_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Return layer_norm(residual + x). May overwrite the residual."""

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + x. May overwrite the residual."""


def check_fits(weight: Weight, first_row: int, first_column: int, num_rows: int, num_columns: int) -> None:
    """Raise unless the weight fits at this row and column of a matrix [num_rows, num_columns]."""
    fits = len(weight.shape) == 2 and first_row >= 0 and first_column >= 0
    if fits:
        fits = first_row + weight.shape[0] <= num_rows and first_column + weight.shape[1] <= num_columns
    if not fits:
        raise ConfigError(
            f"a weight of shape {list(weight.shape)} does not fit at row {first_row}, column {first_column}: "
            f"the layer is [{num_rows}, {num_columns}]"
        )


def check_bias_fits(bias: Tensor, first_row: int, num_rows: int) -> None:
    if bias.dim() != 1 or not 0 <= first_row <= first_row + len(bias) <= num_rows:
        raise ConfigError(
            f"a bias of shape {list(bias.shape)} does not fit at row {first_row}: "
            f"the layer has {num_rows} outputs"
        )


def check_weight(linear: Linear, weight: Weight, first_row: int, first_column: int) -> None:
    """Raise unless the weight fits into `linear` at this row and column."""
    check_fits(weight, first_row, first_column, linear.out_features, linear.in_features)


def copy_weight(linear: Linear, to: Tensor, weight: Weight, first_row: int, first_column: int) -> None:
    """Copy a rectangle of `linear`'s weight into `to`, its row-major matrix."""
    check_weight(linear, weight, first_row, first_column)
    num_rows, num_columns = weight.shape
    to[first_row : first_row + num_rows, first_column : first_column + num_columns] = plain(weight)


def copy_quantized(to: QuantizedMatrix, weight: Weight, first_row: int, first_column: int) -> None:
    """Copy whole rows of a quantized matrix into `to`."""
    to.copy_rows(taken_as(to.scheme, weight, first_row, first_column, to.shape), first_row)


def taken_as(
    scheme: Scheme, weight: Weight, first_row: int, first_column: int, shape: tuple[int, int]
) -> QuantizedMatrix:
    """Return whole rows of a matrix of this shape in a scheme; plain ones are quantized."""
    check_fits(weight, first_row, first_column, *shape)
    if isinstance(weight, Tensor):
        weight = scheme.quantize(weight)
    if weight.scheme != scheme or weight.shape[1] != shape[1]:
        raise ConfigError(
            f"a weight of shape {list(weight.shape)} held as {weight.scheme.name} cannot be loaded into a layer "
            f"of {shape[1]} columns held as {scheme.name}"
        )
    return weight


def copy_bias(linear: Linear, to: Tensor | None, bias: Tensor, first_row: int) -> None:
    """Copy part of a bias into `to`, the bias of `linear`."""
    if to is None:
        raise ConfigError("cannot load a bias into a linear layer that was created without one")
    check_bias_fits(bias, first_row, linear.out_features)
    to[first_row : first_row + len(bias)].copy_(bias)


def check_gate(activation: str) -> None:
    if activation not in GATES:
        raise ConfigError(f"a gate's activation is {activation!r}: it must be one of {', '.join(GATES)}")


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation is {activation!r}: it must be one of {', '.join(ACTIVATIONS)}")


def check_expert(experts: range, expert: int, part: str) -> None:
    """Raise unless the expert is one of those held, and the part is one of its matrices."""
    if expert not in experts:
        raise ConfigError(
            f"cannot load expert {expert}: experts {experts.start} to {experts.stop - 1} are held here"
        )
    if part not in ("gate", "up", "down"):
        raise ConfigError(f"cannot load {part!r} of an expert: it must be gate, up or down")


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


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
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

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        return self(self._kernels.rms_norm(x, norm, eps)).float()


class TorchLinear(ComposedLinear):
    """A linear layer over a row-major weight."""

    def __init__(
        self,
        kernels: Kernels,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        self._compute_dtype = kernels.compute_dtype
        own_bias = torch.zeros(out_features, dtype=self._compute_dtype, device=device) if bias else None
        super().__init__(kernels, in_features, out_features, own_bias, reduce)
        # Widen once here rather than on every call; this is never less precise than `dtype`.
        stored = torch.promote_types(dtype, self._compute_dtype)
        self._weight = torch.empty(out_features, in_features, dtype=stored, device=device)

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        copy_weight(self, self._weight, weight, first_row, first_column)

    def embed(self, ids: Tensor) -> Tensor:
        return self._weight[ids].to(self._compute_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.to(self._compute_dtype), self._bias)


class QuantizedTorchLinear(ComposedLinear):
    """A linear layer that holds its weights in any scheme, and dequantizes them for every product: the reference of
    other kernels, and a layer of the right size on the meta device."""

    def __init__(
        self,
        kernels: Kernels,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        bias: bool,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        self._compute_dtype = kernels.compute_dtype
        own_bias = torch.zeros(out_features, dtype=self._compute_dtype, device=device) if bias else None
        super().__init__(kernels, in_features, out_features, own_bias, reduce)
        self._matrix = scheme.empty(out_features, in_features, device)

    def load(self, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        copy_quantized(self._matrix, weight, first_row, first_column)

    def embed(self, ids: Tensor) -> Tensor:
        return self._matrix.dequantize(self._compute_dtype)[ids]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._matrix.dequantize(self._compute_dtype), self._bias)


def _empty_weight(
    num_rows: int, num_columns: int, stored: torch.dtype | Scheme, device: torch.device
) -> Weight:
    if isinstance(stored, torch.dtype):
        return torch.empty(num_rows, num_columns, dtype=stored, device=device)
    return stored.empty(num_rows, num_columns, device)


class TorchExperts:
    """Implements `Experts` expert by expert, over row-major weights."""

    def __init__(
        self,
        kernels: TorchKernels,
        hidden: int,
        inner: int,
        routing: ExpertRouting,
        dtype: torch.dtype,
        activation: str,
        bias: bool,
        limit: float,
        reduce: Reduce | None,
        held: range | None,
        device: torch.device,
        scheme: Scheme | None = None,
    ) -> None:
        if activation != CLAMPED_SILU:
            check_gate(activation)
        self.router: Linear = kernels.linear(hidden, routing.num_experts, dtype, routing.has_bias)
        self.correction = torch.zeros(routing.num_experts, device=device) if routing.has_correction else None
        self.scales = torch.ones(routing.num_experts, device=device) if routing.has_scales else None
        self.tokens = torch.zeros(routing.num_experts, dtype=torch.int64, device=device)
        self._kernels = kernels
        self._inner = inner
        self._routing = routing
        self._activation = activation
        self._limit = limit
        self._reduce = reduce
        self._held = range(routing.num_experts) if held is None else held
        count = len(self._held)
        stored, compute = torch.promote_types(dtype, kernels.compute_dtype), kernels.compute_dtype
        # The rows of all experts one after the other: of each the rows of gate, then those of up.
        self._gate_up = _empty_weight(count * 2 * inner, hidden, scheme or stored, device)
        self._down = _empty_weight(count * hidden, inner, scheme or stored, device)
        self._gate_up_bias = torch.zeros(count, 2 * inner, dtype=compute, device=device) if bias else None
        self._down_bias = torch.zeros(count, hidden, dtype=compute, device=device) if bias else None

    def load(self, part: str, expert: int, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        check_expert(self._held, expert, part)
        to, index = self._down if part == "down" else self._gate_up, expert - self._held.start
        hidden = self._gate_up.shape[1]
        num_rows = hidden if part == "down" else self._inner
        check_fits(weight, first_row, first_column, num_rows, to.shape[1])
        first_row += index * hidden if part == "down" else (2 * index + (part == "up")) * self._inner
        if isinstance(to, Tensor):
            rows, columns = weight.shape
            to[first_row : first_row + rows, first_column : first_column + columns] = plain(weight)
        else:
            copy_quantized(to, weight, first_row, first_column)

    def load_bias(self, part: str, expert: int, bias: Tensor, first_row: int = 0) -> None:
        check_expert(self._held, expert, part)
        if self._gate_up_bias is None or self._down_bias is None:
            raise ConfigError("cannot load a bias into experts that were created without one")
        to = self._part(part, self._gate_up_bias, self._down_bias)[expert - self._held.start]
        check_bias_fits(bias, first_row, len(to))
        to[first_row : first_row + len(bias)].copy_(bias)

    def add_to(
        self,
        residual: Residual,
        eps: float,
        next_norm: Tensor | None,
        live: Tensor | None = None,
        partial: Tensor | None = None,
    ) -> Residual:
        x = residual.x
        if residual.norm is not None:
            x = self._kernels.rms_norm(x, residual.norm, eps)
        y = self._sum(x, self.router(x), live)
        if partial is not None:
            y = y + partial
        if self._reduce is not None:
            y = self._reduce.sum(y.contiguous())
        return Residual(self._kernels.add(residual.x, y), next_norm)

    def sum(self, x: Tensor, routed: Tensor, live: Tensor | None = None) -> Tensor:
        y = self._sum(x, self.router(routed), live)
        return y if self._reduce is None else self._reduce.sum(y.contiguous())

    def _sum(self, x: Tensor, logits: Tensor, live: Tensor | None) -> Tensor:
        ids, weights = choose_experts(logits, self._routing, self.correction, self.scales)
        if live is not None:
            ids = ids.masked_fill(live[:, None] < 0, -1)
        self.tokens += torch.bincount(ids.flatten() + 1, minlength=len(self.tokens) + 1)[1:]
        # One row per token and expert, added below in the order of a token's experts.
        products = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
        for expert in self._held:
            tokens, ranks = torch.nonzero(ids == expert, as_tuple=True)
            y = self._product(expert - self._held.start, x[tokens])
            products[tokens, ranks] = y * weights[tokens, ranks, None].to(y.dtype)
        y = products[:, 0]
        for rank in range(1, self._routing.top_k):
            y = y + products[:, rank]
        return y

    def _product(self, index: int, x: Tensor) -> Tensor:
        gate_up_bias = None if self._gate_up_bias is None else self._gate_up_bias[index]
        down_bias = None if self._down_bias is None else self._down_bias[index]
        gate_up = F.linear(x, self._rows(self._gate_up, index), gate_up_bias)
        if self._activation == CLAMPED_SILU:
            gate, up = gate_up.chunk(2, dim=-1)
            gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
            inner = (up + 1) * gate * torch.sigmoid(CLAMPED_SILU_SLOPE * gate)
        else:
            inner = self._kernels.gate(gate_up, self._activation)
        return F.linear(inner, self._rows(self._down, index), down_bias)

    def _rows(self, weight: Weight, index: int) -> Tensor:
        """Return one expert's rows in the compute dtype."""
        count = len(weight) // len(self._held)
        return plain(weight[index * count : (index + 1) * count]).to(self._kernels.compute_dtype)

    def _part(self, part: str, gate_up: Tensor, down: Tensor) -> Tensor:
        """Return the rows of a part, of all experts, in the packed biases."""
        if part == "down":
            return down
        return gate_up[:, : self._inner] if part == "gate" else gate_up[:, self._inner :]


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
        if scheme is not None:
            return QuantizedTorchLinear(self, in_features, out_features, scheme, bias, reduce, self._device)
        return TorchLinear(self, in_features, out_features, dtype, bias, reduce, self._device)

    def experts(
        self,
        hidden: int,
        inner: int,
        routing: ExpertRouting,
        dtype: torch.dtype,
        activation: str,
        bias: bool = False,
        limit: float = 0.0,
        reduce: Reduce | None = None,
        held: range | None = None,
        gate_up_scheme: Scheme | None = None,
        down_scheme: Scheme | None = None,
    ) -> Experts:
        scheme = self._held_as(gate_up_scheme if gate_up_scheme == down_scheme else None, experts=True)
        return TorchExperts(
            self, hidden, inner, routing, dtype, activation, bias, limit, reduce, held, self._device, scheme
        )

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
