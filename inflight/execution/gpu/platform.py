"""The CUDA platform: Triton kernels, CUDA graphs, two steps in flight."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from inflight.config import EngineConfig
from inflight.constraints.compiler import GrammarCompiler
from inflight.errors import ConfigError
from inflight.execution.gpu.device import StepGraphs
from inflight.execution.gpu.encoder_runner import GpuEncoderRunner
from inflight.execution.gpu.runner import GpuRunner
from inflight.execution.gpu.shapes import token_sizes
from inflight.execution.platforms import DEFAULTS, EncoderKernels, max_guesses, max_samples
from inflight.execution.runner import StageLinks
from inflight.kv.budget import (
    CONTEXT_MEMORY,
    GRAPH_MEMORY,
    PEER_MEMORY,
    GpuMemory,
    blocks_for_memory,
    gpu_kv_memory,
)
from inflight.layers.attention.backend import AttentionBackend
from inflight.layers.attention.triton.backend import TritonAttention
from inflight.layers.attention.triton.sequences import TritonSequenceAttention
from inflight.layers.attention.triton.tuning import choose_sequences
from inflight.layers.kernels import Kernels
from inflight.layers.torch_kernels import TorchKernels
from inflight.layers.triton_kernels import TritonKernels
from inflight.models.decoders.decoder import Decoder
from inflight.models.encoders.encoder import PoolingEncoder
from inflight.models.encoders.spec import EncoderSpec
from inflight.scheduling.request_pool import Limits

logger = logging.getLogger(__name__)

OLDEST = (8, 0)  # Ampere, the first with bfloat16 and asynchronous copies
PROBE_BLOCKS = 2  # enough for steps whose memory is only measured


class CudaPlatform:
    """Implements `Platform`."""

    defaults = DEFAULTS["cuda"]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capability = torch.cuda.get_device_capability(device)
        if self.capability < OLDEST:
            name = torch.cuda.get_device_name(device)
            raise ConfigError(
                f"device is {name}, compute capability {_version(self.capability)}: "
                f"{_version(OLDEST)} (Ampere) or later is required"
            )
        torch.cuda.set_device(device)

    def kernels_and_attention(self, dtype: torch.dtype) -> tuple[Kernels, AttentionBackend[Any]]:
        return TritonKernels(dtype, self.device), TritonAttention(dtype, self.device)

    def num_blocks(self, config: EngineConfig, decoder: Decoder, context: int) -> int:
        cache = config.cache
        bytes_per_block = decoder.kv_shape(cache.block_size).bytes_per_block
        step = step_memory(lambda: self.runner(config, decoder, PROBE_BLOCKS, context, graphs=False))
        memory = self._memory(exchanges=decoder.shard.collective is not None)
        logger.info(
            "%s: %.2f GiB in total, %.2f used by this process, %.2f by others; the largest step takes %.2f",
            *(
                self.device,
                *(size / (1 << 30) for size in (memory.total, memory.used_here, memory.others, step)),
            ),
        )
        return blocks_for_memory(
            memory=gpu_kv_memory(memory, cache, step, bytes_per_block),
            bytes_per_block=bytes_per_block,
            block_size=cache.block_size,
        )

    def _memory(self, exchanges: bool) -> GpuMemory:
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        outside = CONTEXT_MEMORY + (PEER_MEMORY if exchanges else 0)
        return GpuMemory(str(self.device), total, free, reserved, outside)

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
        graphs: bool = True,
    ) -> GpuRunner:
        options, collective = config.scheduler, decoder.shard.collective
        capturable = collective is None or collective.capturable
        runner = GpuRunner(
            decoder,
            num_blocks,
            config.cache.block_size,
            max_rows=options.max_num_seqs or self.defaults.max_num_seqs,
            max_len=max_len,
            max_tokens=options.max_num_batched_tokens or self.defaults.max_num_batched_tokens,
            graphs=graphs and capturable and not config.model.enforce_eager,
            grammars=grammars,
            links=links,
            max_samples=max_samples(options, self.defaults),
            max_guesses=max_guesses(options),
        )
        if isinstance(runner.steps, StepGraphs):
            shapes = runner.buckets.usual()
            with _capturing(len(shapes)):
                runner.prepare(shapes)
        return runner

    def encoder_kernels(self, spec: EncoderSpec, dtype: torch.dtype) -> EncoderKernels:
        attention = TritonSequenceAttention(choose_sequences(dtype, spec.head_dim, self.device))
        # The kernels for few tokens were tuned for decoders and have not been measured here.
        layers = TritonKernels(dtype, self.device, few_tokens=0)
        return EncoderKernels(layers, attention, TorchKernels(torch.float32, self.device))

    def encoder_runner(
        self, config: EngineConfig, encoder: PoolingEncoder, limits: Limits
    ) -> GpuEncoderRunner:
        graphs = not config.model.enforce_eager
        runner = GpuEncoderRunner(encoder, limits.max_num_seqs, limits.max_num_batched_tokens, graphs)
        if graphs:
            shapes = runner.buckets.usual()
            with _capturing(len(shapes)):
                runner.prepare(shapes)
        return runner

    def describe(self) -> str:
        name = torch.cuda.get_device_name(self.device)
        pdl = ", programmatic launch" if self.capability >= (9, 0) else ""
        return f"{name} (compute capability {_version(self.capability)}), Triton kernels{pdl}"


@contextmanager
def _capturing(num_shapes: int) -> Iterator[None]:
    start = time.perf_counter()
    yield
    logger.info("captured %d CUDA graphs in %.1f s", num_shapes, time.perf_counter() - start)


def step_memory(make_runner: Callable[[], GpuRunner]) -> int:
    """Return the bytes that a runner needs besides weights and KV blocks: its rows and its largest steps.

    `make_runner` makes a runner without graphs and with almost no blocks. The warm-up steps are all padding.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner = make_runner()
    runner.prepare(runner.buckets.largest())
    runner.warm_up_scoring()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    runner.close()
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return peak - before + GRAPH_MEMORY


def _version(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)
