"""The seam between models and the arithmetic of one device.

Decoder and encoder are written once, in terms of these operations, each as large as some device can do in one go. What
reads a weight matrix belongs to a `Linear`, which owns how the matrix is stored, which kernels multiply it and how it
is loaded: another storage format is another `Linear`. `Kernels` makes them, and does what needs no matrix.
`TorchKernels` runs anywhere and is the reference, `NativeKernels` is the compiled CPU path (the Linears of both are
put together from smaller operations: `composed.py`), `TritonKernels` the GPU path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inflight.errors import ConfigError

GATES = ("silu", "gelu_tanh", "gelu")  # "gelu" is the exact one, with erf
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")


class Reduce(Protocol):
    """Adds up the partial products of layers that hold some columns each of one matrix."""

    def sum(self, x: Tensor) -> Tensor:
        """[M, out_features]. May overwrite x."""


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual: hidden states between two layers, and the norm through which the next layer reads them.

    Whoever writes the hidden states may leave part of that norm beside them; who reads them may do without.
    """

    x: Tensor  # [T, hidden]
    norm: Tensor | None  # [hidden] float32; None: x is read as it is
    scaled: Tensor | None = None  # x * norm
    squares: Tensor | None = None  # [n, T]: sums of squares over n parts of the features


class Linear(Protocol):
    """y = x @ W.T + b, with W [out_features, in_features] held in the layout that suits the device best."""

    in_features: int
    out_features: int

    def load(self, weight: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Copy `weight` [n, m] into rows [first_row, first_row + n) and columns [first_column, first_column + m)."""

    def load_bias(self, bias: Tensor, first_row: int = 0) -> None:
        """Copy `bias` [n] into outputs [first_row, first_row + n)."""

    def embed(self, ids: Tensor) -> Tensor:
        """Weight rows [len(ids), in_features] in the compute dtype: the lookup of a tied embedding."""

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in_features] -> [M, out_features]."""

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """activation(the product of x): one of ACTIVATIONS."""

    def normed(self, residual: Residual, eps: float) -> Tensor:
        """The product of rms_norm(x), or of x without a norm."""

    def gated(self, residual: Residual, eps: float, activation: str) -> Tensor:
        """[T, hidden] -> [T, inner]: activation(first half) * second half of `normed`. One of GATES."""

    def add_to(
        self, residual: Residual, x: Tensor, norm: Tensor | None, eps: float, next_norm: Tensor | None
    ) -> Residual:
        """The residual plus rms_norm(y), or plus y without a norm, to be read through `next_norm`. Here y is the
        product of x, reduced first where the layer has a `Reduce`. May overwrite the residual."""

    def logits(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """The product of rms_norm(x), in float32."""


class Kernels(Protocol):
    """Activations are 2-D, [tokens, features], contiguous, in `compute_dtype`. Norm weights and
    biases are float32."""

    compute_dtype: torch.dtype

    def linear(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bias: bool,
        reduce: Reduce | None = None,
    ) -> Linear:
        """An empty linear layer whose weights are stored as `dtype`, or as something no less exact.

        `reduce` is for a layer that holds only some columns of its matrix (a sharded output or down projection), and
        comes between the product and the residual. Of such layers one has the bias.
        """

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        """Rows [len(ids), n] of an embedding table [N, n], in the compute dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension, whatever the leading ones; statistics in float32."""

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[T, 2n] -> [T, n]: activation(first half) * second half. One of GATES."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Normalise each token's features [T, n]; statistics in float32."""

    def add_layer_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """layer_norm(residual + x). May overwrite the residual."""

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + x. May overwrite the residual."""


def check_weight(linear: Linear, weight: Tensor, first_row: int, first_column: int) -> None:
    """Refuse a weight that does not fit `linear` there."""
    fits = weight.dim() == 2 and first_row >= 0 and first_column >= 0
    if fits:
        num_rows, num_columns = weight.shape
        fits = (
            first_row + num_rows <= linear.out_features and first_column + num_columns <= linear.in_features
        )
    if not fits:
        raise ConfigError(
            f"a weight of shape {list(weight.shape)} does not fit at row {first_row}, column {first_column}: "
            f"the layer is [{linear.out_features}, {linear.in_features}]"
        )


def check_bias(linear: Linear, has_bias: bool, bias: Tensor, first_row: int) -> None:
    """Refuse a bias that does not fit `linear` at output `first_row`."""
    if not has_bias:
        raise ConfigError("a bias was given to a linear layer that was made without one")
    if bias.dim() != 1 or not 0 <= first_row <= first_row + len(bias) <= linear.out_features:
        raise ConfigError(
            f"a bias of shape {list(bias.shape)} does not fit at row {first_row}: "
            f"the layer has {linear.out_features} outputs"
        )


def check_gate(activation: str) -> None:
    if activation not in GATES:
        raise ConfigError(f"a gate's activation is {activation!r}: allowed is {', '.join(GATES)}")


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ConfigError(f"activation is {activation!r}: allowed is {', '.join(ACTIVATIONS)}")
