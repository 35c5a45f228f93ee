"""Shared parts of `pair_experts` and `grouped_experts`."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from inflight.layers.triton.elementwise import activate

CLAMPED = 6  # the activation of gpt-oss, beside those of `elementwise.ACTIVATIONS`


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix of each expert. Gate and up are one matrix in which row 2i is the gate of output i, and row 2i + 1 its
    up."""

    weight: Tensor  # [E, N, K]
    bias: Tensor | None = None  # [E, N]


@dataclass(frozen=True, slots=True)
class Gate:
    activation: int
    limit: float = 0.0


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    if ACTIVATION == 6:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * activate(1.702 * gate, 1) / 1.702
    return activate(gate, ACTIVATION) * up
