"""Options of an engine with little memory, whatever a model keeps in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.execution.platforms import CpuPlatform
from inflight.models.decoders.families import decoder_spec
from inflight.models.decoders.footprint import META, meta_decoder, meta_kernels
from inflight.models.decoders.spec import whole_shard


def with_room_for(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Replace `num_blocks` by as many blocks as one request needs whose tokens would fill them in a single table."""
    if options.get("num_blocks") is None:
        return options
    block_size = options.get("block_size", 16)
    spec = decoder_spec(open_checkpoint(str(folder)).config)
    kernels = meta_kernels("cpu", torch.float32)
    decoder = meta_decoder(whole_shard(spec), kernels, torch.float32, spec.default_context)
    assert decoder.device == META
    chunk = options.get("max_num_batched_tokens", CpuPlatform.defaults.max_num_batched_tokens)
    layout = decoder.kv_shape(block_size).layout
    return options | {"num_blocks": layout.blocks_for(options["num_blocks"] * block_size, chunk)}
