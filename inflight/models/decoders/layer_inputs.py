"""Inputs of each layer, as the small models of Gemma 4 have them: embeddings of the token that only one layer reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.models.decoders.spec import LayerInputsSpec, Shard
from inflight.models.decoders.sublayers import LayerBuilder, norm_targets
from inflight.models.tensors import Target, whole_rows


class LayerInputs:
    """Computes the inputs of all layers: the mean of an embedding and of a projection of the usual embedding.

    Ranks hold the embeddings of their part of the vocabulary, and the whole projection.
    """

    def __init__(
        self,
        shard: Shard,
        inputs: LayerInputsSpec,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        spec = shard.whole
        width = spec.num_layers * inputs.size
        self.table = torch.empty(len(shard.vocab), width, dtype=dtype, device=device)
        self.projection: Linear = kernels.linear(spec.hidden_size, width, dtype, False)
        self.norm = torch.empty(inputs.size, dtype=torch.float32, device=device)
        self._kernels = kernels
        self._shape = spec.num_layers, inputs.size
        self._eps = spec.norm_eps
        self._projection_scale: float = spec.hidden_size**-0.5
        # As of the usual embedding, the factor has the precision of the weights.
        self._embedding_scale = torch.tensor(inputs.embedding_scale, dtype=dtype).item()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, num_layers * size], not scaled yet"""
        return self._kernels.embed(self.table, token_ids)

    def __call__(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Return [T, num_layers, size] for the embeddings x [T, hidden_size] and the rows that `embed` returned."""
        projected = (self.projection(x) * self._projection_scale).view(len(x), *self._shape)
        projected = self._kernels.rms_norm(projected, self.norm, self._eps)
        return (projected + embedded.view(projected.shape) * self._embedding_scale) * 2**-0.5


class InputGate:
    """The part of a layer that reads the layer's input, after the MLP: gated by the residual, and added to it."""

    def __init__(self, inputs: LayerInputsSpec, layer: LayerBuilder) -> None:
        hidden = layer.spec.hidden_size
        self.gate = layer.linear("input.gate", hidden, inputs.size)
        self.projection = layer.linear("input.projection", inputs.size, hidden)
        self.norm = layer.empty(hidden)
        self._kernels = layer.kernels
        self._activation = inputs.activation
        self._spec = layer.spec

    def __call__(self, residual: Residual, own_input: Tensor, next_norm: Tensor | None) -> Residual:
        """Return the residual plus the gated input [T, size], to be read through `next_norm`."""
        gate_and_input = torch.cat((self.gate(residual.x), own_input), dim=1)
        gated = self._kernels.gate(gate_and_input, self._activation)
        return self.projection.add_to(residual, gated, self.norm, self._spec.norm_eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        """Return all load targets by name."""
        return {
            "input.gate": whole_rows(self.gate, bias=False),
            "input.projection": whole_rows(self.projection, bias=False),
            **norm_targets(self._spec, "input", norm=self.norm),
        }
