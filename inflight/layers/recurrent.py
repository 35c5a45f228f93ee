"""The interface of layers that keep a state of fixed size for each request, instead of keys and values of its tokens.

The states of all requests are rows of one tensor per layer, [max_rows, state_size] float32, which the backend that
computes the layer lays out as it likes. The row of an entry that starts at position 0 may hold anything: the entry
starts from zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

InputsT = TypeVar("InputsT", contravariant=True)


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """The sizes of a gated delta net: `num_value_heads // num_key_heads` value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # features of a key head, and of a query head
    value_dim: int  # features of a value head
    kernel: int  # tokens that the convolution sees, the current one included

    @property
    def conv_size(self) -> int:
        """The number of convolved features: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def projected_size(self) -> int:
        """The number of features that a token is projected to: see `RecurrentBackend.delta_net`."""
        return self.conv_size + self.value_size + 2 * self.num_value_heads

    @property
    def state_size(self) -> int:
        """The number of values of a state: the last inputs of the convolution, and a matrix per value head."""
        return (self.kernel - 1) * self.conv_size + self.num_value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaNetLayer:
    """The parameters of one gated delta net, without its projections."""

    shape: DeltaNetShape
    conv_weight: Tensor  # [conv_size, kernel] float32, the oldest token first
    a_log: Tensor  # [num_value_heads] float32: a state decays by exp(-exp(a_log) * softplus(a + dt_bias)) per token
    dt_bias: Tensor  # [num_value_heads] float32
    norm: Tensor  # [value_dim] float32
    eps: float


class RecurrentBackend(Protocol[InputsT]):
    """Computes recurrent layers, and defines the inputs that it reads a step from."""

    def delta_net(self, projected: Tensor, layer: DeltaNetLayer, states: Tensor, inputs: InputsT) -> Tensor:
        """Convolve, apply the gated delta rule, normalise and gate. Updates the states of the step's rows.

        projected [T, projected_size]: queries, keys and values, then the gate z [value_size], then b and a
        [num_value_heads each]. Returns [T, value_size].

        For every token, with queries and keys of unit length and queries divided by the root of key_dim:

            state = state * decay                                      [key_dim, value_dim] per value head
            state += outer(key, sigmoid(b) * (value - key @ state))
            output = rms_norm(query @ state) * norm * silu(z)
        """
