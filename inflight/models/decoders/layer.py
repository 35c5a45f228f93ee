"""One layer of a decoder: a mixer, such as attention, then an MLP, or one of the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.layers.attention.backend import AttentionLayer
from inflight.layers.kernels import FusableLayer
from inflight.models.decoders.attention import SelfAttention
from inflight.models.decoders.layer_inputs import InputGate
from inflight.models.decoders.mlps import DenseMlp
from inflight.models.decoders.sublayers import LayerBuilder, Mixer, Mlp
from inflight.models.tensors import Target, whole_tensor


@dataclass(frozen=True, slots=True)
class Layer:
    mixer: Mixer | None
    mlp: Mlp | None
    scale: Tensor | None = None  # [1], multiplies the residual at the end
    input_gate: InputGate | None = None  # reads the layer's own input

    @classmethod
    def build(cls, layer: LayerBuilder) -> Layer:
        """Return a layer with empty weights."""
        spec, index = layer.spec, layer.index
        mixer, mlp, inputs = spec.mixers[index], spec.mlps[index], spec.layer_inputs
        return cls(
            None if mixer is None else mixer.build(layer),
            None if mlp is None else mlp.build(layer),
            torch.empty(1, dtype=layer.kernels.compute_dtype, device=layer.device)
            if spec.has_layer_scales
            else None,
            None if inputs is None else InputGate(inputs, layer),
        )

    @property
    def in_norm(self) -> Tensor | None:
        """The norm through which the layer reads the residual."""
        first = self.mixer or self.mlp
        return None if first is None else first.in_norm

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """The parameters of attention, if it attends."""
        return [] if self.mixer is None or self.mixer.heads is None else [self.mixer.heads]

    def fusable(self) -> FusableLayer | None:
        """Return the layer as kernels may fuse it, or None if it is not only attention and a dense MLP."""
        mixer, mlp = self.mixer, self.mlp
        if self.scale is not None or self.input_gate is not None:
            return None
        return mixer.fusable(mlp) if isinstance(mixer, SelfAttention) and isinstance(mlp, DenseMlp) else None

    def targets(self) -> Mapping[str, Target]:
        """Return the load targets by the names that `WeightNames.layer` uses."""
        targets: dict[str, Target] = {}
        for part in (self.mixer, self.mlp, self.input_gate):
            if part is not None:
                targets |= part.targets()
        first = "mlp.in_norm" if self.mixer is None else "mixer.in_norm"
        if first in targets:
            targets["in_norm"] = targets[first]
        if self.scale is not None:
            targets["scale"] = whole_tensor(self.scale, dummy=1.0)
        return targets
