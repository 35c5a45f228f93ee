"""Plan whether, and with which tensor and pipeline parallel sizes, a model fits on given devices before loading it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from inflight.config import MAX_RANKS, EngineConfig
from inflight.errors import ConfigError
from inflight.execution.platforms import KV_CACHE_DTYPES, MEMORY_SHARE
from inflight.kv import KVLayout
from inflight.kv.budget import CONTEXT_MEMORY, most_blocks
from inflight.layers.kernels import TorchKernels
from inflight.loading import open_model
from inflight.loading.checkpoint import (
    check_kv_cache_dtype,
    quantized_kv_spec,
    quantized_spec,
    resolve_context,
    resolve_dtype,
)
from inflight.models.decoders.footprint import (
    MAX_STATES,
    META,
    RankShare,
    common_layout,
    meta_decoder,
    meta_kernels,
    rank_shares,
)
from inflight.models.decoders.heads import plan_decoder
from inflight.models.decoders.spec import DecoderSpec, shard_of, whole_shard
from inflight.models.decoders.weights import placements
from inflight.models.encoders.families import encoder_architecture

# The platforms' defaults, which cannot be queried without a device.
GPU_ROWS, GPU_TOKENS, CPU_ROWS, CPU_TOKENS = 1024, 8192, 256, 512
GPU_GRAPHS = 256 << 20


@dataclass(frozen=True, slots=True)
class Devices:
    """`count` GPUs with `memory` bytes each, or the memory of one machine shared by any number of CPU ranks."""

    kind: str  # "cuda" or "cpu"
    count: int
    memory: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A model on `tensor` * `pipeline` ranks."""

    tensor: int
    pipeline: int
    shares: list[RankShare]
    num_blocks: int  # of the KV cache; 0: the model does not fit
    layout: KVLayout
    context: int
    chunk: int  # the most tokens that a step computes

    @property
    def num_tokens(self) -> int:
        """The number of tokens that requests of full length can have in all."""
        return self.num_blocks * self.context // self.layout.blocks_for(self.context, 1)

    @property
    def num_requests(self) -> int:
        """The number of concurrent requests of full length."""
        return self.layout.max_requests(self.num_blocks, self.context, self.chunk)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The fits for every combination of sizes that the devices allow."""

    dtype: torch.dtype
    context: int
    parameters: int
    fits: list[Fit]


def plan_model(config: EngineConfig, devices: Devices) -> ModelPlan:
    """Return how the model fits for each way to split it across the devices."""
    check_kv_cache_dtype(config.cache.kv_cache_dtype, KV_CACHE_DTYPES[devices.kind], devices.kind)
    checkpoint, name = open_model(config)
    if encoder_architecture(checkpoint.config) is not None:
        raise ConfigError(
            f"{name} is an encoder: it runs on one rank without a KV cache, so there is nothing to plan"
        )
    expert_parallel = config.parallel.enable_expert_parallel
    spec = plan_decoder(name, checkpoint, lambda _: [0], expert_parallel).spec
    spec = quantized_kv_spec(quantized_spec(spec, config.model), config.cache)
    dtype = resolve_dtype(config.model.dtype, checkpoint.config)
    context = resolve_context(spec, config.model.max_model_len)
    fits = [_fit(config, spec, context, dtype, devices, *sizes) for sizes in _sizes(spec, devices.count)]
    whole = meta_decoder(whole_shard(spec), TorchKernels(device=META), dtype)
    parameters = sum(prod(placement.shape) for placement in placements(whole, dummy=True))
    return ModelPlan(dtype, context, parameters, fits)


def _sizes(spec: DecoderSpec, count: int) -> Iterator[tuple[int, int]]:
    """Yield the tensor and pipeline parallel sizes that the model supports."""
    for tensor in range(1, min(count, MAX_RANKS) + 1):
        try:
            shard_of(spec, 0, tensor)
        except ConfigError:
            continue
        for pipeline in range(1, min(count // tensor, spec.num_layers) + 1):
            yield tensor, pipeline


def _fit(
    config: EngineConfig,
    spec: DecoderSpec,
    context: int,
    dtype: torch.dtype,
    devices: Devices,
    tensor: int,
    pipeline: int,
) -> Fit:
    block = config.cache.block_size
    kernels = meta_kernels(devices.kind, dtype)
    shares = rank_shares(spec, tensor, pipeline, context, block, kernels, dtype)
    if devices.kind == "cuda":
        utilization = config.cache.gpu_memory_utilization
        overhead = CONTEXT_MEMORY + _gpu_step(config, spec, context, dtype, tensor)
        rows = config.scheduler.max_num_seqs or min(GPU_ROWS, MAX_STATES)
        available = [
            int(devices.memory * utilization) - overhead - share.weights - rows * share.state
            for share in shares
        ]
    else:
        left = devices.memory - sum(share.weights for share in shares)
        total = sum(share.kv(1) for share in shares)
        available = [int(left * MEMORY_SHARE) * share.kv(1) // total for share in shares]
    kv_memory = config.cache.kv_cache_memory
    if kv_memory is not None:
        available = [kv_memory if kv_memory <= bytes_left else -1 for bytes_left in available]
    num_blocks = min(bytes_left // share.kv(1) for bytes_left, share in zip(available, shares, strict=True))
    layout = common_layout(shares)
    default = CPU_TOKENS if devices.kind == "cpu" else GPU_TOKENS
    chunk = config.scheduler.max_num_batched_tokens or default
    if devices.kind == "cpu":
        rows = config.scheduler.max_num_seqs or CPU_ROWS
        num_blocks = min(num_blocks, most_blocks(layout, rows, context, chunk))
    return Fit(tensor, pipeline, shares, max(0, num_blocks), layout, context, chunk)


def _gpu_step(config: EngineConfig, spec: DecoderSpec, context: int, dtype: torch.dtype, tensor: int) -> int:
    """Estimate the bytes of request rows, sampling buffers and the largest step."""
    rows = config.scheduler.max_num_seqs or GPU_ROWS
    tokens = config.scheduler.max_num_batched_tokens or GPU_TOKENS
    # Raw and adjusted logits in float32, token counts in 16 bits, and two bit masks.
    sampling = rows * spec.vocab_size * (4 + 4 + 2) + rows * spec.vocab_size // 4
    inner = max(mlp.step_features(spec.hidden_size) for mlp in spec.mlps)
    wide = inner + max(mixer.step_features for mixer in spec.mixers)
    activations = tokens * (4 * spec.hidden_size + wide // tensor) * dtype.itemsize
    return sampling + activations + rows * context * 4 + GPU_GRAPHS
