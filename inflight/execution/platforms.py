"""The interface between loading a model and the device it runs on, its implementation for CPUs, and sleep.

`gpu/platform.py` implements it for CUDA devices; `platform` chooses one by name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from inflight.config import EngineConfig, SchedulerConfig, SpeculationConfig
from inflight.constraints.compiler import GrammarCompiler
from inflight.engine.runner import Runner
from inflight.errors import ConfigError, KVBudgetError, as_gib
from inflight.execution.encoder_runner import EncoderRunner, TextRunner
from inflight.execution.runner import ModelRunner, StageLinks
from inflight.kv.budget import blocks_for_memory, most_blocks, requested_memory
from inflight.layers.attention.backend import AttentionBackend, SequenceAttention
from inflight.layers.attention.cpu import cpu_backend, cpu_sequence_attention
from inflight.layers.kernels import Kernels
from inflight.layers.native.library import native_library
from inflight.layers.native.memory import available_memory
from inflight.layers.native_kernels import cpu_kernels
from inflight.models.decoders.decoder import Decoder
from inflight.models.encoders.encoder import PoolingEncoder
from inflight.models.encoders.spec import EncoderSpec
from inflight.models.tensors import tensors_of
from inflight.scheduling.request_pool import Limits


class EncoderKernels(NamedTuple):
    layers: Kernels
    attention: SequenceAttention
    head: Kernels  # float32: a head is small, and its output is used at full precision


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Defaults of options on a kind of device, and the types that its KV cache may have: known where there is none."""

    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int
    target_step_ms: float
    max_text_tokens: int  # of a step of an encoder
    max_samples: int | None  # of a step with drafts, unless there are more requests; None: no limit
    kv_cache_dtypes: tuple[str, ...]


DEFAULTS = {
    "cpu": DeviceDefaults(256, 512, 1, 100.0, 1024, None, ("auto", "int8")),
    "cuda": DeviceDefaults(1024, 8192, 2, 14.0, 16384, 512, ("auto", "fp8")),
}


def max_samples(options: SchedulerConfig, defaults: DeviceDefaults) -> int | None:
    """Return how many samples a step with drafts may have; None: there are no drafts, or there is no limit."""
    if options.speculative_config is None or defaults.max_samples is None:
        return None
    max_rows = options.max_num_seqs or defaults.max_num_seqs
    return max(max_rows, min(defaults.max_samples, SAMPLES_OF_ROW * max_rows))


SAMPLES_OF_ROW = 16  # with few rows
MODEL_DRAFTS = 3  # of a request behind a step, unless configured


def max_guesses(options: SchedulerConfig) -> int:
    """Return how many tokens a model's predictor guesses for a request behind a step, if there is one."""
    if options.speculative_config is None:
        return 0
    return SpeculationConfig.from_options(options.speculative_config).num_speculative_tokens or MODEL_DRAFTS


class Platform(Protocol):
    """One device, with the implementations that run best on it."""

    device: torch.device
    defaults: DeviceDefaults

    def kernels_and_attention(self, dtype: torch.dtype) -> tuple[Kernels, AttentionBackend[Any]]:
        """Return kernels and attention for a model whose weights are held as `dtype`."""

    def num_blocks(self, config: EngineConfig, decoder: Decoder, context: int) -> int:
        """Return the number of KV blocks that fit beside the loaded weights and the largest step."""

    def step_sizes(self, max_tokens: int) -> Sequence[int]:
        """Return the sizes, in tokens, that steps with prompts are rounded up to; empty if they are not rounded."""

    def runner(
        self,
        config: EngineConfig,
        decoder: Decoder,
        num_blocks: int,
        max_len: int,
        grammars: GrammarCompiler | None = None,
        links: StageLinks | None = None,
    ) -> Runner[Any]:
        """Return a runner for the decoder; with `links`, for one stage of several."""

    def encoder_kernels(self, spec: EncoderSpec, dtype: torch.dtype) -> EncoderKernels:
        """Return kernels for an encoder whose weights are held as `dtype`."""

    def encoder_runner(self, config: EngineConfig, encoder: PoolingEncoder, limits: Limits) -> TextRunner: ...

    def describe(self) -> str:
        """Describe the device and what was chosen for it, in one line."""


def platform(device: str) -> Platform:
    """Return a platform by name: "cpu", "cuda", "cuda:1", or "auto" for a GPU if there is one."""
    name = device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return CpuPlatform()
    device_type, _, index = name.partition(":")
    if device_type != "cuda" or not (index == "" or index.isdecimal()):
        raise ConfigError(f"device is {device!r}: allowed are 'auto', 'cpu', 'cuda' and 'cuda:<index>'")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {device!r}: torch finds {torch.cuda.device_count()} CUDA devices")
    from inflight.execution.gpu.platform import CudaPlatform

    return CudaPlatform(torch.device("cuda", int(index or 0)))


MEMORY_SHARE = 0.4  # of the available memory, once the weights are loaded


class CpuPlatform:
    """Implements `Platform`."""

    device = torch.device("cpu")
    defaults = DEFAULTS["cpu"]

    def kernels_and_attention(self, dtype: torch.dtype) -> tuple[Kernels, AttentionBackend[Any]]:  # noqa: ARG002
        kernels = cpu_kernels()
        return kernels, cpu_backend(kernels)

    def num_blocks(self, config: EngineConfig, decoder: Decoder, context: int) -> int:
        # Ranks of one machine share its memory in proportion to their layers.
        cache, shard = config.cache, decoder.shard
        available = available_memory() * len(shard.layers) // (shard.whole.num_layers * shard.size)
        kv_shape, options = decoder.kv_shape(cache.block_size), config.scheduler
        bytes_per_block = kv_shape.bytes_per_block
        requested = cache.kv_cache_memory if cache.num_blocks is None else cache.num_blocks * bytes_per_block
        if requested is not None and requested > available:
            raise KVBudgetError(
                f"{requested_memory(cache)}: that is {as_gib(requested)} of KV memory, but only "
                f"{as_gib(available)} are free"
            )
        if requested is not None:
            return blocks_for_memory(requested, bytes_per_block, cache.block_size)
        max_num_seqs = options.max_num_seqs or self.defaults.max_num_seqs
        chunk = options.max_num_batched_tokens or self.defaults.max_num_batched_tokens
        most = most_blocks(kv_shape.layout, max_num_seqs, context, chunk)
        memory = int(available * MEMORY_SHARE) // (1 + cache.num_neighbours)
        return blocks_for_memory(memory, bytes_per_block, cache.block_size, most)

    def step_sizes(self, max_tokens: int) -> Sequence[int]:  # noqa: ARG002
        return ()

    def runner(
        self,
        config: EngineConfig,
        decoder: Decoder,
        num_blocks: int,
        max_len: int,
        grammars: GrammarCompiler | None = None,
        links: StageLinks | None = None,
    ) -> ModelRunner:
        max_rows = config.scheduler.max_num_seqs or self.defaults.max_num_seqs
        return ModelRunner(decoder, num_blocks, config.cache.block_size, max_rows, max_len, grammars, links)

    def encoder_kernels(self, spec: EncoderSpec, dtype: torch.dtype) -> EncoderKernels:  # noqa: ARG002
        kernels = cpu_kernels()
        return EncoderKernels(kernels, cpu_sequence_attention(kernels), kernels)

    def encoder_runner(self, config: EngineConfig, encoder: PoolingEncoder, limits: Limits) -> EncoderRunner:  # noqa: ARG002
        return EncoderRunner(encoder)

    def describe(self) -> str:
        library = native_library()
        if library is None:
            return "CPU, kernels in plain torch"
        return f"CPU, compiled kernels, {library.threads} threads"


class DecoderExpertCounts:
    """Implements `ExpertCounts` for the layers of this rank. A GPU is never waited for unless it is idle: a copy that
    one call starts is read by the next."""

    @torch.inference_mode()
    def __init__(self, tokens: Sequence[Tensor]) -> None:
        """Read `Decoder.expert_tokens` from now on: the tokens of warm-up steps do not count."""
        self._tokens = list(tokens)
        for counts in tokens:
            counts.zero_()
        self._copy: Tensor | None = None  # in host memory
        self._is_done = torch.cuda.Event() if tokens[0].is_cuda else None  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def read(self, wait: bool) -> list[list[int]] | None:
        tokens = torch.stack(self._tokens)
        if self._is_done is None:
            return _lists(tokens)
        before = self._copy
        if before is not None and not wait and not self._is_done.query():  # type: ignore[no-untyped-call]
            return None
        self._copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._copy.copy_(tokens, non_blocking=True)
        self._is_done.record()
        if wait:
            self._is_done.synchronize()
            before = self._copy
        return None if before is None else _lists(before)


def _lists(counts: Tensor) -> list[list[int]]:
    lists: list[list[int]] = counts.tolist()
    return lists


def expert_counts(decoder: Decoder) -> DecoderExpertCounts | None:
    """Return a reader of the decoder's counts, if it has experts."""
    tokens = decoder.expert_tokens
    return DecoderExpertCounts(tokens) if tokens else None


@dataclass(frozen=True, slots=True)
class ModelSleepSupport:
    """Implements `SleepSupport`. On a CPU the weights stay, and only the KV memory is freed."""

    model: object
    device: torch.device
    make_runner: Callable[[], Runner[Any]]

    def check(self) -> None:
        """Do nothing: a model can always sleep."""

    def sleep(self) -> None:
        if self.device.type != "cpu":
            relocate(self.model, lambda tensor: tensor.to("cpu"))
        gc.collect()  # free what the runner held now, not at the next collection
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> Runner[Any]:
        if self.device.type != "cpu":
            relocate(self.model, lambda tensor: tensor.to(self.device))
        return self.make_runner()


@torch.inference_mode()
def relocate(model: object, move: Callable[[Tensor], Tensor]) -> None:
    """Replace the memory of every tensor of a model by what `move` returns. The tensor objects stay the same, so layers
    that share one keep sharing it. Tensors that are views of each other would be separated: models have none."""
    for tensor in list(tensors_of(model)):
        tensor.data = move(tensor)
