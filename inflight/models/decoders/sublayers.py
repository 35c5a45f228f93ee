"""The common parts of mixers and MLPs: their interfaces, and how their empty weights are created and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.layers.attention.backend import AttentionBackend, AttentionLayer, LayerCache
from inflight.layers.formats.schemes import Scheme
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.layers.recurrent import LayerStates
from inflight.layers.rotary import Rope
from inflight.models.decoders.spec import DecoderSpec, Shard
from inflight.models.tensors import NormWeight, Target


@dataclass(frozen=True, slots=True)
class MixerStep:
    """A step as mixers read it."""

    inputs: Any  # as the attention backend reads it
    caches: Sequence[LayerCache]  # of the stage's layers that keep keys and values
    states: Sequence[LayerStates]  # of its recurrent layers


class Mixer(Protocol):
    """The part of a layer that reads what earlier tokens left in its memory."""

    in_norm: Tensor | None  # applied to the residual it reads

    @property
    def heads(self) -> AttentionLayer | None:
        """The parameters of its attention; None: it does not attend."""

    def __call__(
        self,
        residual: Residual,
        step: MixerStep,
        next_norm: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Residual:
        """Return the residual plus the mixer's output, to be read through `next_norm`.

        With `output_tokens` [W], token indices, only their rows are returned: other tokens only change the memory.
        """

    def targets(self) -> Mapping[str, Target]:
        """Return all load targets by name, packed weights both whole and in the parts that checkpoints hold."""


class Mlp(Protocol):
    """The part of a layer that handles each token by itself."""

    in_norm: Tensor | None  # applied to the residual it reads

    def __call__(
        self, residual: Residual, next_norm: Tensor | None, padding_mask: Tensor | None = None
    ) -> Residual:
        """Return the residual plus the MLP's output, to be read through `next_norm`.

        `padding_mask` [T] is negative for padding tokens, whose output is not used.
        """

    def targets(self) -> Mapping[str, Target]:
        """Return all load targets by name, like a mixer."""


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Creates the empty weights of one layer, in the size of the shard's part."""

    shard: Shard
    index: int  # of the layer in the whole decoder
    kernels: Kernels
    attention: AttentionBackend[Any]
    dtype: torch.dtype  # of the weights
    device: torch.device
    max_position: int
    table: int = 0  # the block table that leads to the layer's keys and values
    cache: int = 0  # their number in `MixerStep.caches`
    state: int = 0  # the number of its state in `MixerStep.states`
    rotary_tables: dict[Rope, Tensor] = field(default_factory=dict)  # shared by all layers

    @property
    def spec(self) -> DecoderSpec:
        return self.shard.whole

    def scheme(self, *targets: str) -> Scheme | None:
        """Return the scheme for the weights packed into these targets."""
        return self.spec.scheme(self.index, *targets)

    def linear(self, target: str, in_features: int, out_features: int, bias: bool = False) -> Linear:
        return self.kernels.linear(in_features, out_features, self.dtype, bias, scheme=self.scheme(target))

    def output(self, target: str, in_features: int, bias: bool = False) -> Linear:
        """Return a layer whose product is added to the residual. Ranks hold some of its inputs each, and one of them
        the bias."""
        shard, scheme = self.shard, self.scheme(target)
        has_bias = bias and shard.rank == 0
        return self.kernels.linear(
            in_features, self.spec.hidden_size, self.dtype, has_bias, shard.collective, scheme
        )

    def norm(self, exists: bool, size: int | None = None) -> Tensor | None:
        """Return an empty norm weight [size, or hidden_size] float32, or None if there is no such norm."""
        return self.empty(size or self.spec.hidden_size) if exists else None

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the norms before and after a mixer or an MLP, as far as the model has them."""
        placement = self.spec.norm_placement
        return self.norm(placement.before), self.norm(placement.after)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def rotary_table(self, rope: Rope | None) -> Tensor | None:
        if rope is None:
            return None
        if rope not in self.rotary_tables:
            self.rotary_tables[rope] = rope.table(self.max_position, self.device)
        return self.rotary_tables[rope]


def norm_targets(spec: DecoderSpec, part: str, **norms: Tensor | None) -> dict[str, NormWeight]:
    """Return the targets of the norms that exist, by name after the part of the layer that they belong to."""
    return {
        f"{part}.{name}": NormWeight(norm, len(norm), offset=spec.norm_offset)
        for name, norm in norms.items()
        if norm is not None
    }


def features_of(heads: range, head_dim: int) -> range:
    """Return the features of consecutive heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)
