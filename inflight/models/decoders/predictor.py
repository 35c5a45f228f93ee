"""Multi-token prediction (MTP): one further layer guesses the token after the next, and others from its own output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from inflight.layers.kernels import Linear, Residual
from inflight.models.decoders.layer import Layer
from inflight.models.decoders.spec import DecoderSpec
from inflight.models.decoders.sublayers import LayerBuilder, MixerStep
from inflight.models.tensors import NormWeight, Target, whole_rows


class Predictor:
    """The layer of a `PredictorSpec`, behind the projection of what it reads, and before its final norm.

    Ranks share the layer as they share the decoder's; each has the whole projection.
    """

    def __init__(self, whole: DecoderSpec, builder: LayerBuilder) -> None:
        predictor, hidden = whole.predictor, whole.hidden_size
        assert predictor is not None
        self.names = predictor.names
        self._kernels = builder.kernels
        self._eps, self._norm_offset = whole.norm_eps, whole.norm_offset
        self.embedding_norm, self.hidden_norm, self.final_norm = (builder.empty(hidden) for _ in range(3))
        scheme = builder.spec.format_of(predictor.names.projection).scheme
        self.projection: Linear = builder.kernels.linear(
            2 * hidden, hidden, builder.dtype, False, scheme=scheme
        )
        self.layer = Layer.build(builder)

    def __call__(
        self, embedded: Tensor, states: Tensor, step: MixerStep, output_tokens: Tensor | None = None
    ) -> Tensor:
        """Return hidden states [T, hidden_size], before the norm, for the embeddings of the next tokens and the states
        of these; with `output_tokens` [W], token indices, only theirs."""
        kernels, eps, layer = self._kernels, self._eps, self.layer
        both = (
            kernels.rms_norm(embedded, self.embedding_norm, eps),
            kernels.rms_norm(states, self.hidden_norm, eps),
        )
        residual = Residual(self.projection(torch.cat(both, dim=1)), layer.in_norm)
        assert layer.mixer is not None
        assert layer.mlp is not None
        residual = layer.mixer(residual, step, layer.mlp.in_norm, output_tokens)
        if output_tokens is None:
            output_tokens = step.inputs.padding_mask
        elif not len(output_tokens):
            return residual.x
        return layer.mlp(residual, None, output_tokens).x

    def normalise(self, hidden: Tensor) -> Tensor:
        """Return the states that the next pass reads."""
        return self._kernels.rms_norm(hidden, self.final_norm, self._eps)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """Yield the modules beside the layer's, and where they are loaded."""
        names = self.names
        yield names.projection, whole_rows(self.projection, bias=False)
        norms = {
            names.embedding_norm: self.embedding_norm,
            names.hidden_norm: self.hidden_norm,
            names.layer.final_norm: self.final_norm,
        }
        for name, norm in norms.items():
            yield name, NormWeight(norm, len(norm), offset=self._norm_offset)
