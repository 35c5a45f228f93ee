"""Load the weights of an encoder and its head from safetensors files, or fill them with dummy weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from inflight.attention.backend import SequenceAttention
from inflight.layers.kernels import Kernels
from inflight.models.checkpoint import Checkpoint
from inflight.models.encoders.encoder import Encoder, PoolingEncoder
from inflight.models.encoders.families import EncoderHead
from inflight.models.encoders.spec import EncoderSpec
from inflight.models.pooling_head import LayeredHead, Pooler, module_headers
from inflight.models.tensors import (
    Placement,
    Progress,
    StoredTensor,
    check_dtypes,
    check_shapes,
    check_surplus,
    fill,
    fill_random,
    layers_hint,
    read_headers,
)


def load_encoder(
    checkpoint: Checkpoint,
    spec: EncoderSpec,
    head: EncoderHead,
    kernels: Kernels,
    attention: SequenceAttention,
    head_kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_position: int,
    load_format: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> PoolingEncoder:
    """Return the checkpoint's encoder and head with their weights loaded. Nothing is allocated before the headers are
    known to hold exactly the tensors that are needed."""
    dummy = load_format == "dummy"
    stored = {} if dummy else _read_headers(checkpoint, head)
    prefix = _prefix(spec, stored)
    if not dummy:
        _check_tensors(spec, head, prefix, stored)
    encoder = Encoder(spec, kernels, attention, dtype, device, max_position)
    in_features = spec.hidden_size * len(head.pooling)
    layers = LayeredHead(in_features, head.layers, head_kernels, head_kernels.compute_dtype, device)
    placed = [*_placements(encoder, prefix), *layers.placements()]
    if dummy:
        fill_random(placed, dtype, device, seed)
    else:
        fill({placement.name: placement for placement in placed}, stored, progress)
    return PoolingEncoder(encoder, Pooler(head.pooling), layers)


def _read_headers(checkpoint: Checkpoint, head: EncoderHead) -> dict[str, StoredTensor]:
    """Read the headers of the encoder's files and of the head layers' folders, whose names begin with the folder's."""
    stored = read_headers(checkpoint.weight_files, _known_as)
    folders = (layer.module.partition("/")[0] for layer in head.layers if "/" in layer.module)
    return stored | module_headers(checkpoint, folders)


def _known_as(name: str) -> str:
    """Translate the norms of early checkpoints, which are named gamma and beta."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _prefix(spec: EncoderSpec, stored: dict[str, StoredTensor]) -> str:
    names = spec.names
    present = (prefix for prefix in names.prefixes if f"{prefix}{names.tokens}.weight" in stored)
    return next(present, names.prefixes[0])


def _check_tensors(
    spec: EncoderSpec, head: EncoderHead, prefix: str, stored: dict[str, StoredTensor]
) -> None:
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors(prefix)}
    shapes |= {name: shape for layer in head.layers for name, shape in layer.shapes()}
    hint = layers_hint(spec.num_layers, stored)
    check_shapes(shapes, stored, hint)
    check_dtypes(shapes, stored)
    unused = re.compile("|".join((*spec.names.ignored, *head.unused)))
    check_surplus([name for name in stored if name not in shapes and not unused.search(name)], hint)


def _placements(encoder: Encoder, prefix: str) -> Iterator[Placement]:
    stores = encoder.stores()
    for name, target, shape in encoder.spec.tensors(prefix):
        dummy = None
        if len(shape) == 1:
            dummy = 1.0 if target.endswith("norm.weight") else 0.0
        yield Placement(name, shape, stores[target], dummy)
