"""Rotary position tables: the angle by which each position rotates each pair of features.

The arithmetic is in float32, as in training: at a distant position, a more precise angle would be a different one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Scaling(Protocol):
    """A way to extend the context beyond the trained length."""

    @property
    def magnitude(self) -> float:
        """The factor of cos and sin."""

    def stretch(self, inv_freq: Tensor, rope: Rope, max_position: int) -> Tensor:
        """[rotary_dim / 2] plain inverse frequencies -> scaled ones."""


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding: the first `rotary_dim` features of a head, rotated in halves."""

    theta: float
    rotary_dim: int
    scaling: Scaling | None = None

    def table(self, max_position: int, device: torch.device) -> Tensor:
        """[max_position, rotary_dim] float32: cos in the first half, sin in the second."""
        if device.type == "meta":  # where only the shape counts, and arithmetic would import half of torch
            return torch.empty(max_position, self.rotary_dim, device=device)
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device=device) / self.rotary_dim
        inv_freq = 1.0 / (self.theta**exponents)
        magnitude = 1.0
        if self.scaling is not None:
            inv_freq = self.scaling.stretch(inv_freq, self, max_position)
            magnitude = self.scaling.magnitude
        positions = torch.arange(max_position, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inv_freq)
        return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(magnitude)


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All positions compressed by one factor."""

    factor: float
    magnitude: float = 1.0

    def stretch(self, inv_freq: Tensor, rope: Rope, max_position: int) -> Tensor:  # noqa: ARG002
        return inv_freq / self.factor


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only a share of the features rotates: those with the highest of the whole head's frequencies."""

    share: float
    factor: float = 1.0
    magnitude: float = 1.0

    def stretch(self, inv_freq: Tensor, rope: Rope, max_position: int) -> Tensor:  # noqa: ARG002
        num_rotated = int(self.share * rope.rotary_dim // 2)
        stretched = inv_freq / self.factor
        stretched[num_rotated:] = 0.0
        return stretched


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies compressed by `factor`, high ones unchanged, with a smooth transition in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    magnitude: float = 1.0

    def stretch(self, inv_freq: Tensor, rope: Rope, max_position: int) -> Tensor:  # noqa: ARG002
        # The number of full rotations of a feature within the trained context.
        rotations = self.original_max_position * inv_freq / (2 * math.pi)
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(inv_freq / self.factor, inv_freq, share.clamp_(0, 1))


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Like Llama 3, with a transition that is linear in the feature index, and attention sharpened by `magnitude`."""

    factor: float
    original_max_position: int
    magnitude: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def stretch(self, inv_freq: Tensor, rope: Rope, max_position: int) -> Tensor:  # noqa: ARG002
        low, high = self._bound(self.beta_fast, rope), self._bound(self.beta_slow, rope)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.rotary_dim - 1)
        if low == high:
            high += 0.001  # a step instead of a ramp, without dividing by zero
        index = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device=inv_freq.device)
        share = ((index - low) / (high - low)).clamp_(0, 1)
        return torch.lerp(inv_freq, inv_freq / self.factor, share)

    def _bound(self, rotations: float, rope: Rope) -> float:
        """Return the (fractional) feature index with `rotations` full rotations within the trained context."""
        span = math.log(self.original_max_position / (rotations * 2 * math.pi))
        return rope.rotary_dim * span / (2 * math.log(rope.theta))


@dataclass(frozen=True, slots=True)
class LongScaling:
    """A factor for each feature: one list for contexts as trained, another for longer ones.

    The list is chosen once, by the longest context served, not by the length of each request: cached keys must stay
    valid while a request grows, and its output must not depend on the rest of the batch.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    magnitude: float

    def stretch(self, inv_freq: Tensor, rope: Rope, max_position: int) -> Tensor:  # noqa: ARG002
        factors = self.long_factors if max_position > self.original_max_position else self.short_factors
        return inv_freq / torch.tensor(factors, dtype=torch.float32, device=inv_freq.device)
