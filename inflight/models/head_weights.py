"""Weights of a head's layers that lie in folders of their own, as the `Dense` modules of an embedder do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from inflight.errors import WeightsError
from inflight.layers.kernels import Kernels
from inflight.model_files import inside
from inflight.models.checkpoint import SINGLE, Checkpoint
from inflight.models.heads import HeadLayer, LayeredHead
from inflight.models.tensors import (
    StoredTensor,
    check_dtypes,
    check_shapes,
    check_surplus,
    fill,
    fill_random,
    read_headers,
)


def load_head(
    checkpoint: Checkpoint,
    in_features: int,
    layers: Sequence[HeadLayer],
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
) -> LayeredHead:
    """With made-up weights where those of the checkpoint are."""
    if not checkpoint.weight_files:
        head = LayeredHead(in_features, layers, kernels, dtype, device)
        fill_random(head.placements(), dtype, device)
        return head
    stored = module_headers(checkpoint, (layer.module.partition("/")[0] for layer in layers))
    wanted = dict(shape for layer in layers for shape in layer.shapes())
    check_shapes(wanted, stored)
    check_dtypes(wanted, stored)
    check_surplus([name for name in stored if name not in wanted])
    head = LayeredHead(in_features, layers, kernels, dtype, device)
    fill({placement.name: placement for placement in head.placements()}, stored)
    return head


def module_headers(checkpoint: Checkpoint, folders: Iterable[str]) -> dict[str, StoredTensor]:
    """The tensors of these modules, by "folder/name"."""
    assert checkpoint.folder is not None, "there are weights"
    stored: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(folders):
        path = f"{name}/{SINGLE}"
        if not inside(checkpoint.folder, path, WeightsError).is_file():
            raise WeightsError(
                f"{checkpoint.folder / path} is missing or not a file, though modules.json names it"
            )
        headers = read_headers([checkpoint.folder / path])
        stored |= {f"{name}/{tensor}": header for tensor, header in headers.items()}
    return stored
