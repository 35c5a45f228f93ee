"""The GPU path on a CPU: the same runner, its kernels in Triton's interpreter. On a machine with a GPU, the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inflight.config import EngineConfig
from inflight.constraints.compiler import GrammarCompiler
from inflight.execution.gpu.runner import GpuRunner
from inflight.execution.gpu.shapes import token_sizes
from inflight.execution.platforms import DEFAULTS, max_guesses, max_samples
from inflight.execution.runner import StageLinks
from inflight.layers.attention.backend import AttentionBackend
from inflight.layers.attention.triton.backend import TritonAttention
from inflight.layers.kernels import Kernels
from inflight.layers.triton.tuning import MAX_TOKENS
from inflight.layers.triton_kernels import TritonKernels
from inflight.models.decoders.decoder import Decoder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class InterpretedPlatform:
    """Implements `Platform`."""

    device = DEVICE
    defaults = replace(DEFAULTS["cuda"], max_num_seqs=256, max_num_batched_tokens=64)

    def __init__(self) -> None:
        self.runners: list[GpuRunner] = []

    def kernels_and_attention(self, dtype: torch.dtype) -> tuple[Kernels, AttentionBackend[Any]]:
        # Every program takes long in the interpreter: the smallest steps are enough for the fused kernels.
        few_tokens = MAX_TOKENS if DEVICE.type == "cuda" else 1
        return TritonKernels(dtype, DEVICE, few_tokens=few_tokens), TritonAttention(dtype, DEVICE)

    def num_blocks(self, config: EngineConfig, decoder: Decoder, context: int) -> int:  # noqa: ARG002
        return config.cache.num_blocks or 64

    def step_sizes(self, max_tokens: int) -> Sequence[int]:
        return token_sizes(max_tokens)

    def runner(
        self,
        config: EngineConfig,
        decoder: Decoder,
        num_blocks: int,
        max_len: int,
        grammars: GrammarCompiler | None = None,
        links: StageLinks | None = None,
    ) -> GpuRunner:
        options = config.scheduler
        self.runners.append(
            GpuRunner(
                decoder,
                num_blocks,
                config.cache.block_size,
                max_rows=options.max_num_seqs or self.defaults.max_num_seqs,
                max_len=max_len,
                max_tokens=options.max_num_batched_tokens or self.defaults.max_num_batched_tokens,
                graphs=False,
                grammars=grammars,
                links=links,
                max_samples=max_samples(options, self.defaults),
                max_guesses=max_guesses(options),
            )
        )
        return self.runners[-1]

    def describe(self) -> str:
        return "Triton's interpreter"
