"""Load a decoder's weights: map the checkpoint's tensor names to the decoder's parts, check the files, copy."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from inflight.checkpoint.checkpoint import Checkpoint
from inflight.errors import WeightsError
from inflight.layers.attention.backend import AttentionBackend
from inflight.layers.formats.weight_format import PLAIN_FORMAT
from inflight.layers.kernels import Kernels
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.decoders.assistant import Assistant
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.draft_model import DraftModel
from inflight.models.decoders.eagle import Eagle
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.footprint import META, meta_decoder
from inflight.models.decoders.layer import Layer
from inflight.models.decoders.layer_inputs import LayerInputs
from inflight.models.decoders.predictor import Mtp
from inflight.models.decoders.spec import DecoderSpec, Shard, WeightNames, whole_shard
from inflight.models.tensors import (
    ExpertMatrix,
    LinearRows,
    NormWeight,
    Placement,
    Progress,
    RowRun,
    StoredTensor,
    check_tensors,
    fill,
    fill_random,
    into_tensor,
    layers_hint,
    open_tensors,
    read_headers,
    whole_rows,
)

# Random layers soon make all tokens of a context alike, and routers would send them to the same experts. With large
# dummy embeddings, tokens stay different.
_EXPERTS_EMBEDDING_SCALE = 500.0


# Modules that are never quantized, whatever a checkpoint's config says: tiny, and everything depends on them.
_NEVER_QUANTIZED = ("mlp.router", "mlp.shared_gate")


def placements(
    decoder: Decoder, variant: int = 0, layout: int = 0, predictor_layout: int = 0, dummy: bool = False
) -> Iterator[Placement]:
    """Yield every tensor that the decoder needs, each row of each weight once. `variant` selects one of the spec's name
    prefixes, `layout` one of its layouts of experts, `predictor_layout` one of its predictor's. `dummy` weights are
    plain, and quantized where the checkpoint's would be."""
    shard, spec, names = decoder.shard, decoder.spec, decoder.spec.names
    prefix = names.prefixes[variant]
    table_shape = (spec.vocab_size, spec.hidden_size)
    if decoder.embedding is not None:
        store = into_tensor(decoder.embedding, first=shard.vocab.start)
        scale = _EXPERTS_EMBEDDING_SCALE if decoder.expert_tokens else 1.0
        yield Placement(prefix + names.embedding, table_shape, store, dummy_scale=scale)
    if decoder.layer_inputs is not None:
        yield from _layer_inputs(decoder.layer_inputs, decoder, prefix, dummy)
    if decoder.head is not None:  # tied embeddings are read from it, too
        name = prefix + names.embedding if spec.tied_embeddings else names.heads[variant]
        rows = RowRun(shard.vocab.start, len(shard.vocab), 0)
        head = LinearRows(decoder.head, *table_shape, (rows,), 0, False, False)
        weights = spec.head_format.quantizing() if dummy else spec.head_format
        yield from head.placements(name.removesuffix(".weight"), weights)
    if decoder.classifier is not None:
        yield Placement(names.classifier, (spec.num_labels, spec.hidden_size), decoder.classifier.load)
    for index, layer in zip(shard.layers, decoder.layers, strict=True):
        yield from _layer(layer, spec, index, prefix, layout, dummy)
    if shard.is_last:
        norm = NormWeight(decoder.final_norm, spec.hidden_size, offset=spec.norm_offset)
        yield from norm.placements(prefix + names.final_norm)
    predictor = decoder.predictor
    if isinstance(predictor, Mtp) or (dummy and isinstance(predictor, Eagle)):
        yield from _predictor(predictor, decoder, predictor_layout, dummy)
    elif dummy and isinstance(predictor, DraftModel | Assistant):
        yield from placements(predictor.decoder, dummy=True)
        yield from _beside(predictor)


def _layer(
    layer: Layer, spec: DecoderSpec, index: int, prefix: str, layout: int, dummy: bool
) -> Iterator[Placement]:
    names, targets = spec.names, layer.targets()
    for module, target in {**names.layer, **names.experts[layout]}.items():
        if target in targets:
            name = f"{names.layer_name(index)}.{module}"
            weights = PLAIN_FORMAT if target in _NEVER_QUANTIZED else spec.format_of(name)
            to = targets[target]
            if isinstance(to, ExpertMatrix):
                to = replace(to, unquantized=spec.unquantized_experts(name))
            yield from to.placements(prefix + name, weights.quantizing() if dummy else weights)


def _predictor(predictor: Mtp | Eagle, decoder: Decoder, layout: int, dummy: bool) -> Iterator[Placement]:
    assert decoder.shard.predictor is not None
    spec = decoder.shard.predictor.whole
    prefix = spec.names.prefixes[0]
    yield from _layer(predictor.layer, spec, 0, prefix, layout, dummy)
    for module, target in predictor.targets():
        weights = spec.format_of(module)
        yield from target.placements(prefix + module, weights.quantizing() if dummy else weights)


def _beside(predictor: DraftModel | Assistant) -> Iterator[Placement]:
    if isinstance(predictor, Assistant):
        for module, target in predictor.targets():
            yield from target.placements(module)


def _fill_separate(predictor: Eagle | DraftModel | Assistant, decoder: Decoder, draft: Checkpoint) -> None:
    """Load a predictor from another checkpoint, after checking that it holds exactly its tensors."""
    stored = read_headers(draft.weight_files)
    if isinstance(predictor, Eagle):
        needed = list(_predictor(predictor, decoder, 0, False))
        check_tensors(needed, stored, predictor.names.ignored)
    else:
        names, beside = check_files(predictor.decoder.shard, stored), list(_beside(predictor))
        check_tensors(beside, stored, ("",))
        needed = [*placements(predictor.decoder, *names), *beside]
    fill({placement.name: placement for placement in needed}, stored, None, decoder.device)


def _layer_inputs(inputs: LayerInputs, decoder: Decoder, prefix: str, dummy: bool) -> Iterator[Placement]:
    shard, spec = decoder.shard, decoder.spec
    store = into_tensor(inputs.table, first=shard.vocab.start)
    shape = spec.vocab_size, inputs.table.shape[1]
    yield Placement(f"{prefix}embed_tokens_per_layer.weight", shape, store)
    weights = spec.format_of("per_layer_model_projection")
    yield from whole_rows(inputs.projection, bias=False).placements(
        f"{prefix}per_layer_model_projection", weights.quantizing() if dummy else weights
    )
    norm = NormWeight(inputs.norm, len(inputs.norm), offset=spec.norm_offset)
    yield from norm.placements(f"{prefix}per_layer_projection_norm")


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
    draft: Checkpoint | None = None,
) -> Decoder:
    """Return the checkpoint's decoder with its weights loaded. `spec` defaults to the one that config.json describes,
    `shard` to the whole decoder. `draft` has the tensors of a predictor that is separate."""
    shard = shard or whole_shard(spec or decoder_spec(checkpoint.config))
    stored: dict[str, StoredTensor] = {}
    names = 0, 0, 0
    if load_format != "dummy":
        stored = read_headers(checkpoint.weight_files)
        shard = replace(shard, whole=shard.whole.as_stored(stored))
        names = check_files(shard, stored)
    decoder = Decoder(shard.whole, kernels, attention, dtype, device, max_position, shard)
    if load_format == "dummy":
        fill_random(placements(decoder, dummy=True), dtype, device, seed)
    else:
        needed = placements(decoder, *names)
        fill({placement.name: placement for placement in needed}, stored, progress, device)
        if draft is not None and isinstance(decoder.predictor, Eagle | DraftModel | Assistant):
            _fill_separate(decoder.predictor, decoder, draft)
    return decoder


def _layout(
    names: WeightNames, stored: dict[str, StoredTensor], needed: Callable[[int], Iterator[Placement]]
) -> int:
    """Return the layout of experts with which most of the stored tensors agree. `needed` are those of a layout."""

    def agreement(layout: int) -> tuple[int, int]:
        first = islice(needed(layout), len(stored) + 10_000)
        present = [placement for placement in first if placement.name in stored]
        return sum(stored[p.name].shape == p.shape for p in present), len(present)

    return max(range(len(names.experts)), key=agreement)


def check_files(shard: Shard, stored: dict[str, StoredTensor]) -> tuple[int, int, int]:
    """Raise unless the files hold exactly the tensors of the whole decoder, each in its shape. Return which of its name
    prefixes, layouts of experts, and layouts of its predictor's experts they use.

    This runs before any memory is allocated: a config may claim anything, but the headers show what is there.
    """
    spec = shard.whole
    names = spec.names
    present = (i for i, prefix in enumerate(names.prefixes) if prefix + names.embedding in stored)
    variant = next(present, 0)
    decoder = meta_decoder(whole_shard(spec), TorchKernels(device=META), torch.float32)
    copies = set(names.heads) if spec.tied_embeddings and spec.has_lm_head else set()
    ignored = (*names.ignored, *spec.quantization.ignored, *(f"^{re.escape(name)}$" for name in copies))
    layout = _layout(names, stored, lambda layout: placements(decoder, variant, layout))
    predictor_layout = 0
    predictor = decoder.predictor
    if isinstance(predictor, Mtp):
        predictor_layout = _layout(
            predictor.names, stored, lambda layout: _predictor(predictor, decoder, layout, False)
        )
    found = variant, layout, predictor_layout
    check_tensors(placements(decoder, *found), stored, ignored, layers_hint(spec.num_layers, stored))
    if shard.size > 1:
        # Raises if a rank's columns cannot be cut from the checkpoint's.
        sharded = meta_decoder(shard, TorchKernels(device=META), torch.float32)
        deque(placements(sharded, *found), maxlen=0)
    for name in copies & stored.keys() if shard.is_last else ():
        _check_copy(names.prefixes[variant] + names.embedding, name, stored)
    return found


def _check_copy(embedding: str, head: str, stored: dict[str, StoredTensor]) -> None:
    """Raise unless the two copies of a tied embedding are equal."""
    with open_tensors(stored[embedding].file) as first, open_tensors(stored[head].file) as second:
        alike = stored[embedding].dtype == stored[head].dtype
        if not alike or not torch.equal(first.get_tensor(embedding), second.get_tensor(head)):
            raise WeightsError(
                f"config.json ties {head} to {embedding}, but the weights contain both and they differ: "
                'set "tie_word_embeddings" to false'
            )
