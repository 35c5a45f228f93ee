"""Load a decoder's weights: map the checkpoint's tensor names to the decoder's parts, check the files, copy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from inflight.attention.backend import AttentionBackend
from inflight.errors import WeightsError
from inflight.layers.kernels import Kernels
from inflight.models.checkpoint import Checkpoint
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.layer import LinearRows, NormWeight, RowRun, Target
from inflight.models.decoders.shard import Shard
from inflight.models.decoders.spec import DecoderSpec
from inflight.models.tensors import (
    Placement,
    Progress,
    StoredTensor,
    check_dtypes,
    check_shapes,
    check_surplus,
    fill,
    fill_random,
    into_tensor,
    layers_hint,
    open_tensors,
    read_headers,
)


def placements(decoder: Decoder, variant: int = 0) -> Iterator[Placement]:
    """Yield every tensor that the decoder needs, each row of each weight once. `variant` selects one of the spec's name
    prefixes."""
    shard, spec, names = decoder.shard, decoder.spec, decoder.spec.names
    prefix = names.prefixes[variant]
    table_shape = (spec.vocab_size, spec.hidden_size)
    if decoder.embedding is not None:
        store = into_tensor(decoder.embedding, first=shard.vocab.start)
        yield Placement(prefix + names.embedding, table_shape, store)
    if decoder.head is not None:  # tied embeddings are read from it, too
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
    """Yield the weight and the bias, if any, of one module of a layer."""
    if isinstance(target, NormWeight):
        yield _norm(f"{name}.weight", target, spec)
        return
    yield Placement(f"{name}.weight", (target.count, target.num_columns), target.load)
    if target.bias:
        yield Placement(f"{name}.bias", (target.count,), target.load_bias)


def _norm(name: str, target: NormWeight, spec: DecoderSpec) -> Placement:
    store = into_tensor(target.weight, spec.norm_offset, target.first)
    return Placement(name, (target.count,), store, dummy=1.0 - spec.norm_offset)


def load_decoder(
    checkpoint: Checkpoint,
    kernels: Kernels,
    attention: AttentionBackend[Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_position: int | None = None,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    spec: DecoderSpec | None = None,
    shard: Shard | None = None,
) -> Decoder:
    """Return the checkpoint's decoder with its weights loaded. `spec` defaults to the one that config.json describes,
    `shard` to the whole decoder."""
    spec = spec or decoder_spec(checkpoint.config)
    if load_format != "dummy":
        _check_sizes(spec, read_headers(checkpoint.weight_files))
    decoder = Decoder(spec, kernels, attention, dtype, device, max_position, shard)
    if load_format == "dummy":
        fill_random(placements(decoder), dtype, device, seed)
    else:
        load_weights(decoder, checkpoint, progress)
    return decoder


def load_weights(decoder: Decoder, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Fill the decoder from the checkpoint's files after checking that they hold exactly what it needs."""
    stored = read_headers(checkpoint.weight_files)
    variant = _variant(decoder.spec, stored)
    placed = {placement.name: placement for placement in placements(decoder, variant)}
    _check_tensors(decoder.shard, variant, placed, stored)
    fill(placed, stored, progress)


def _check_sizes(spec: DecoderSpec, stored: dict[str, StoredTensor]) -> None:
    """Raise unless every matrix that the config describes is stored in its size.

    This runs before any memory is allocated: a config may claim anything, but the headers show what is there. The rest
    (norms, biases) is small and checked later.
    """
    query, kv, hidden, inner = spec.query_size, spec.kv_size, spec.hidden_size, spec.intermediate_size
    shapes = {
        "attention.qkv": (query + 2 * kv, hidden),
        "attention.qkv.q": (query, hidden),
        "attention.qkv.k": (kv, hidden),
        "attention.qkv.v": (kv, hidden),
        "attention.output": (hidden, query),
        "mlp.gate_up": (2 * inner, hidden),
        "mlp.gate_up.gate": (inner, hidden),
        "mlp.gate_up.up": (inner, hidden),
        "mlp.down": (hidden, inner),
    }
    prefix = spec.names.prefixes[_variant(spec, stored)]
    modules = [(module, shapes[target]) for module, target in spec.names.layer.items() if target in shapes]
    matrices = {prefix + spec.names.embedding: (spec.vocab_size, hidden)}
    if spec.num_labels:
        matrices[spec.names.classifier] = spec.num_labels, hidden
    for index in range(spec.num_layers):
        matrices |= {f"{prefix}layers.{index}.{module}.weight": shape for module, shape in modules}
    check_shapes(matrices, stored, layers_hint(spec.num_layers, stored))


def _variant(spec: DecoderSpec, stored: dict[str, StoredTensor]) -> int:
    names = spec.names
    present = (i for i, prefix in enumerate(names.prefixes) if prefix + names.embedding in stored)
    return next(present, 0)


def _check_tensors(
    shard: Shard, variant: int, placed: dict[str, Placement], stored: dict[str, StoredTensor]
) -> None:
    """Raise unless every needed tensor is stored in its shape, and nothing else is stored."""
    spec = shard.whole
    hint = layers_hint(spec.num_layers, stored)
    check_shapes({name: placement.shape for name, placement in placed.items()}, stored, hint)
    check_dtypes(placed, stored)
    copies = set(spec.names.heads) if spec.tied_embeddings and spec.has_lm_head else set()
    ignored = re.compile("|".join((*spec.names.ignored, *_elsewhere(shard, variant))))
    surplus = [
        name for name in stored if name not in placed and name not in copies and not ignored.search(name)
    ]
    check_surplus(surplus, hint)
    for name in copies & stored.keys() if shard.is_last else ():
        _check_copy(spec.names.prefixes[variant] + spec.names.embedding, name, stored)


def _elsewhere(shard: Shard, variant: int) -> Iterator[str]:
    """Yield patterns of the tensors that other stages need."""
    names = shard.whole.names
    prefix = names.prefixes[variant]
    others = [index for index in range(shard.whole.num_layers) if index not in shard.layers]
    if others:
        yield rf"^{re.escape(prefix)}layers\.({'|'.join(map(str, others))})\."
    if not shard.is_first:
        yield f"^{re.escape(prefix + names.embedding)}$"
    if not shard.is_last:
        yield from (
            f"^{re.escape(name)}$" for name in (*names.heads, names.classifier, prefix + names.final_norm)
        )


def _check_copy(embedding: str, head: str, stored: dict[str, StoredTensor]) -> None:
    """Raise unless the two copies of a tied embedding are equal."""
    with open_tensors(stored[embedding].file) as first, open_tensors(stored[head].file) as second:
        alike = stored[embedding].dtype == stored[head].dtype
        if not alike or not torch.equal(first.get_tensor(embedding), second.get_tensor(head)):
            raise WeightsError(
                f"config.json ties {head} to {embedding}, but the weights contain both and they differ: "
                'set "tie_word_embeddings" to false'
            )
