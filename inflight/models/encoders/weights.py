"""Load the weights of an encoder and its head from safetensors files, or fill them with dummy weights."""

from __future__ import annotations

import torch

from inflight.attention.backend import SequenceAttention
from inflight.layers.kernels import Kernels, TorchKernels
from inflight.models.checkpoint import Checkpoint
from inflight.models.encoders.encoder import Encoder, PoolingEncoder
from inflight.models.encoders.families import EncoderHead
from inflight.models.encoders.spec import EncoderSpec
from inflight.models.heads import LayeredHead, Pooler, module_headers
from inflight.models.tensors import (
    Progress,
    StoredTensor,
    check_tensors,
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

    def make(kernels: Kernels, head_kernels: Kernels, device: torch.device) -> tuple[Encoder, LayeredHead]:
        in_features = spec.hidden_size * len(head.pooling)
        layers = LayeredHead(in_features, head.layers, head_kernels, head_kernels.compute_dtype, device)
        return Encoder(spec, kernels, attention, dtype, device, max_position), layers

    if not dummy:
        meta = TorchKernels(device="meta")
        encoder, layers = make(meta, meta, torch.device("meta"))
        needed = (*encoder.placements(prefix), *layers.placements())
        ignored = (*spec.names.ignored, *head.unused)
        check_tensors(needed, stored, ignored, layers_hint(spec.num_layers, stored))
    encoder, layers = make(kernels, head_kernels, device)
    placed = [*encoder.placements(prefix), *layers.placements()]
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
