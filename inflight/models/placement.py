"""Where each tensor of a checkpoint goes in a decoder: the spec's names joined to the decoder's parts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from inflight.models.decoder import Decoder
from inflight.models.layer import Target
from inflight.models.spec import DecoderSpec
from inflight.models.tensors import Placement, into_rows, into_tensor


def placements(decoder: Decoder, variant: int = 0) -> Iterator[Placement]:
    """Every tensor that the decoder needs, each row of each weight once. `variant`: which of the spec's
    prefixes the names have."""
    spec, names = decoder.spec, decoder.spec.names
    prefix = names.prefixes[variant]
    table_shape = (spec.vocab_size, spec.hidden_size)
    if decoder.embedding is not None:
        yield Placement(prefix + names.embedding, table_shape, into_tensor(decoder.embedding))
    if decoder.head is not None:  # which a tied table is read from
        name = names.heads[variant] if decoder.embedding is not None else prefix + names.embedding
        yield Placement(name, table_shape, decoder.head.load)
    if decoder.classifier is not None:
        yield Placement(names.classifier, (spec.num_labels, spec.hidden_size), decoder.classifier.load)
    for index, layer in enumerate(decoder.layers):
        targets = layer.targets()
        for module, target in names.layer.items():
            yield from _module(f"{prefix}layers.{index}.{module}", targets[target], spec)
    yield _norm(prefix + names.final_norm, decoder.final_norm, spec)


def _module(name: str, target: Target, spec: DecoderSpec) -> Iterator[Placement]:
    """The weight and the bias, if any, of one module of a layer."""
    if isinstance(target, Tensor):
        yield _norm(f"{name}.weight", target, spec)
        return
    linear, count = target.linear, target.count
    yield Placement(f"{name}.weight", (count, linear.in_features), into_rows(linear.load, target.first))
    if target.bias:
        yield Placement(f"{name}.bias", (count,), into_rows(linear.load_bias, target.first))


def _norm(name: str, target: Tensor, spec: DecoderSpec) -> Placement:
    store = into_tensor(target, spec.norm_offset)
    return Placement(name, tuple(target.shape), store, dummy=1.0 - spec.norm_offset)
