"""Running a decoder without an engine: one request in a paged cache with its blocks out of order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.checkpoint.checkpoint import open_checkpoint
from inflight.layers.attention.backend import AttentionInputs
from inflight.layers.attention.cpu import ComposedAttention, TorchCpuAttention, cpu_backend
from inflight.layers.native_kernels import cpu_kernels
from inflight.layers.recurrent import StateInputs, allocate_states
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.weights import load_decoder

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def load(folder: Path, dtype: torch.dtype = torch.float32, fast: bool = False, **options: Any) -> Decoder:
    """Load a decoder in plain torch, or with the fastest kernels that this machine can compile."""
    kernels = cpu_kernels() if fast else TorchKernels()
    backend = cpu_backend(kernels) if fast else ComposedAttention(kernels, TorchCpuAttention())
    return load_decoder(open_checkpoint(str(folder)), kernels, backend, dtype, CPU, **options)


@torch.inference_mode()
def logprobs(
    decoder: Decoder,
    token_ids: list[int],
    chunks: list[int] | None = None,
    outputs: list[list[int]] | None = None,
) -> Tensor:
    """[len(token_ids), vocab_size] of the whole prompt, computed in `chunks` (all at once unless given).

    With `outputs`, of these tokens alone: indices into each chunk.
    """
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    shape = decoder.kv_shape(BLOCK_SIZE)
    num_tables = len(shape.windows)
    order = torch.randperm(num_tables * num_blocks, generator=torch.Generator().manual_seed(5))
    tables = order.view(num_tables, num_blocks)
    caches = decoder.attention.allocate(shape, num_tables * num_blocks, CPU).layers
    # Snapshots are not needed here: any tensor stands for their memory.
    states = allocate_states(decoder.state_sizes, [torch.zeros(1, 1)], 2)
    for state in states:
        state.rows.fill_(float("nan"))
    ids, out, start = torch.tensor(token_ids), [], 0
    for number, count in enumerate(chunks or [num_tokens]):
        positions = torch.arange(start, start + count)
        inputs = AttentionInputs(
            positions=positions,
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([start + count], dtype=torch.int32),
            rows=torch.zeros(1, dtype=torch.int32),
            block_tables=tables.to(torch.int32)[:, None],
            slot_mapping=tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        )
        inputs.state = StateInputs(
            inputs.query_starts, torch.ones(1, dtype=torch.int64), torch.tensor([start])
        )
        indices = None if outputs is None else torch.tensor(outputs[number], dtype=torch.int64)
        hidden = decoder.forward(ids[start : start + count], caches, inputs, indices, states)
        out.append(decoder.logits(hidden).log_softmax(-1))
        start += count
    assert start == num_tokens
    return torch.cat(out)


@torch.inference_mode()
def transformers_logprobs(model: Any, token_ids: list[int]) -> Tensor:
    """[len(token_ids), vocab_size] as transformers computes them."""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits.float().log_softmax(-1)


def prompt(num_tokens: int = 40, vocab_size: int = 320) -> list[int]:
    ids: list[int] = torch.randint(
        vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    return ids
