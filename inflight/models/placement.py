"""Where each tensor of a checkpoint goes in a decoder: the spec's names joined to the decoder's parts."""

from __future__ import annotations

from collections.abc import Iterator

from inflight.models.decoder import Decoder
from inflight.models.layer import LinearRows, NormWeight, RowRun, Target
from inflight.models.spec import DecoderSpec
from inflight.models.tensors import Placement, into_tensor


def placements(decoder: Decoder, variant: int = 0) -> Iterator[Placement]:
    """Every tensor that the decoder needs, each row of each weight once. `variant`: which of the spec's
    prefixes the names have."""
    shard, spec, names = decoder.shard, decoder.spec, decoder.spec.names
    prefix = names.prefixes[variant]
    table_shape = (spec.vocab_size, spec.hidden_size)
    if decoder.embedding is not None:
        store = into_tensor(decoder.embedding, first=shard.vocab.start)
        yield Placement(prefix + names.embedding, table_shape, store)
    if decoder.head is not None:  # which a tied table is read from
        name = prefix + names.embedding if spec.tied_embeddings else names.heads[variant]
        rows = RowRun(shard.vocab.start, len(shard.vocab), 0)
        head = LinearRows(decoder.head, *table_shape, (rows,), 0, False, False)
        yield Placement(name, table_shape, head.load)
    if decoder.classifier is not None:
        yield Placement(names.classifier, (spec.num_labels, spec.hidden_size), decoder.classifier.load)
    for index, layer in zip(shard.layers, decoder.layers, strict=True):
        targets = layer.targets()
        for module, target in names.layer.items():
            yield from _module(f"{prefix}layers.{index}.{module}", targets[target], spec)
    if shard.is_last:
        norm = NormWeight(decoder.final_norm, len(decoder.final_norm))
        yield _norm(prefix + names.final_norm, norm, spec)


def _module(name: str, target: Target, spec: DecoderSpec) -> Iterator[Placement]:
    """The weight and the bias, if any, of one module of a layer."""
    if isinstance(target, NormWeight):
        yield _norm(f"{name}.weight", target, spec)
        return
    yield Placement(f"{name}.weight", (target.count, target.num_columns), target.load)
    if target.bias:
        yield Placement(f"{name}.bias", (target.count,), target.load_bias)


def _norm(name: str, target: NormWeight, spec: DecoderSpec) -> Placement:
    store = into_tensor(target.weight, spec.norm_offset, target.first)
    return Placement(name, (target.count,), store, dummy=1.0 - spec.norm_offset)
