"""The interface between models and the arithmetic of one device.

Decoders and encoders are written once, in terms of these operations; each is as large as some device can do in one
kernel. Everything that reads a weight matrix is a method of a `Linear` or of a layer's `Experts`, which own how their
matrices are stored, multiplied and loaded: another `Scheme` of quantized weights is another `Linear`. `Kernels` creates
them and does what needs no matrix. `TorchKernels` runs anywhere, `NativeKernels` is for CPUs, `TritonKernels` for GPUs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.layers.formats.schemes import QuantizedMatrix, Scheme, Weight
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
        """Copy `weight` [n, m] into rows [first_row, first_row + n) and columns [first_column, first_column + m).

        Quantized layers accept only whole rows, in their own scheme; unquantized layers accept any rectangle.
        """

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

    def logits(self, x: Tensor, norm: Tensor, eps: float, count: int | None = None) -> Tensor:
        """Return the product of rms_norm(x) in float32; with `count`, its first outputs alone, [M, count]."""


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


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The router and the experts of one layer, as far as one rank holds them. Routers are never quantized."""

    hidden: int
    inner: int
    routing: ExpertRouting
    dtype: torch.dtype
    activation: str  # one of GATES, or CLAMPED_SILU
    bias: bool = False
    limit: float = 0.0  # of CLAMPED_SILU
    local_experts: range | None = None  # None: all experts
    gate_up_scheme: Scheme | None = None
    down_scheme: Scheme | None = None

    def __post_init__(self) -> None:
        if self.activation != CLAMPED_SILU:
            check_gate(self.activation)

    @property
    def experts(self) -> range:
        """The experts that this rank holds."""
        return range(self.routing.num_experts) if self.local_experts is None else self.local_experts

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of all matrices, for kernels that take only one; None: plain weights."""
        return self.gate_up_scheme if self.gate_up_scheme == self.down_scheme else None


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
        padding_mask: Tensor | None = None,
        partial: Tensor | None = None,
    ) -> Residual:
        """Return the residual plus the weighted sum of each token's experts, which read it through its norm. The sum,
        together with `partial` [T, hidden] if there is one, is reduced first if the layer has a `Reduce`.

        `padding_mask` [T] is negative for padding tokens, which have no experts. May overwrite the residual and
        `partial`.
        """

    def sum(self, x: Tensor, routed: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts of x [T, hidden], chosen by the router from `routed`
        [T, hidden], and reduced if the layer has a `Reduce`. `padding_mask` is as above."""


@dataclass(frozen=True, slots=True)
class FusableLayer:
    """A decoder layer that is nothing but attention and a gated MLP. Each reads the residual through a norm and adds to
    it."""

    attention_norm: Tensor | None  # [hidden] float32
    qkv: Linear
    heads: Any  # an AttentionLayer (layers/attention/backend.py)
    output: Linear
    mlp_norm: Tensor | None  # [hidden] float32
    gate_up: Linear
    down: Linear
    activation: str  # one of GATES
    eps: float


class FusedLayers(Protocol):
    """Consecutive decoder layers that run in one call."""

    count: int

    def run(self, x: Tensor, caches: Sequence[Any], inputs: Any, first: int, end: int) -> Tensor:
        """Return the residual after layers [first, end), each of which has its own cache. May overwrite x."""


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

    def experts(self, shape: ExpertsShape, reduce: Reduce | None = None) -> Experts:
        """Return an empty router with empty experts. `reduce` adds up what ranks that hold some inner features of each
        expert, or some experts, computed."""

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

    def fuse(self, layers: Sequence[FusableLayer], attention: Any) -> FusedLayers | None:
        """Return as many of the first layers as these kernels can run in one call together with the attention backend,
        once their weights are loaded; None if they cannot do so."""


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


def as_scheme(
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


class LoadedExperts(ABC):
    """A base for implementations of `Experts`: tensors beside the matrices, and where parts of an expert go.

    Gate and up of an expert are one matrix: rows of gate, then those of up, or both in turns.
    """

    alternating = False  # whether rows of gate and up alternate

    def __init__(
        self, shape: ExpertsShape, reduce: Reduce | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        routing, count = shape.routing, len(shape.experts)
        self.correction = torch.zeros(routing.num_experts, device=device) if routing.has_correction else None
        self.scales = torch.ones(routing.num_experts, device=device) if routing.has_scales else None
        self.tokens = torch.zeros(routing.num_experts, dtype=torch.int64, device=device)
        self._shape = shape
        self._reduce = reduce
        self._gate_up_bias = self._down_bias = None
        if shape.bias:
            self._gate_up_bias = torch.zeros(count, 2 * shape.inner, dtype=dtype, device=device)
            self._down_bias = torch.zeros(count, shape.hidden, dtype=dtype, device=device)

    def load(self, part: str, expert: int, weight: Weight, first_row: int = 0, first_column: int = 0) -> None:
        index, hidden, inner = self._index(part, expert), self._shape.hidden, self._shape.inner
        size = (hidden, inner) if part == "down" else (inner, hidden)
        check_fits(weight, first_row, first_column, *size)
        self._load(part == "down", index, self._rows(part, first_row, len(weight)), weight, first_column)

    def load_bias(self, part: str, expert: int, bias: Tensor, first_row: int = 0) -> None:
        index, biases = self._index(part, expert), self._down_bias if part == "down" else self._gate_up_bias
        if biases is None:
            raise ConfigError("cannot load a bias into experts that were created without one")
        check_bias_fits(bias, first_row, self._shape.hidden if part == "down" else self._shape.inner)
        biases[index, self._rows(part, first_row, len(bias))] = bias

    @abstractmethod
    def _load(self, down: bool, index: int, rows: slice, weight: Weight, first_column: int) -> None:
        """Copy a weight into rows of the down matrix, or of gate and up, of one of the experts held here."""

    def _index(self, part: str, expert: int) -> int:
        experts = self._shape.experts
        if expert not in experts:
            raise ConfigError(
                f"cannot load expert {expert}: experts {experts.start} to {experts.stop - 1} are held here"
            )
        if part not in ("gate", "up", "down"):
            raise ConfigError(f"cannot load {part!r} of an expert: it must be gate, up or down")
        return expert - experts.start

    def _rows(self, part: str, first_row: int, count: int) -> slice:
        """Return where rows of a part are in its matrix."""
        if part != "down" and self.alternating:
            first = 2 * first_row + (part == "up")
            return slice(first, first + 2 * count, 2)
        first = first_row + (self._shape.inner if part == "up" else 0)
        return slice(first, first + count)
