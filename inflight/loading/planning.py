"""Plan whether, and with which tensor and pipeline parallel sizes, a model fits on given devices before loading it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from inflight.config import MAX_RANKS, EngineConfig
from inflight.errors import ConfigError
from inflight.execution.gpu.shapes import Buckets
from inflight.execution.platforms import DEFAULTS, MEMORY_SHARE, max_samples
from inflight.kv.budget import CONTEXT_MEMORY, GRAPH_MEMORY, most_blocks
from inflight.kv.layout import KVLayout
from inflight.kv.snapshots import PROMPT_INTERVAL
from inflight.layers.formats.schemes import GroupScheme, Scheme
from inflight.layers.gpu_weights import has_gpu_kernels
from inflight.layers.recurrent import max_captures, max_pieces
from inflight.layers.torch_kernels import TorchKernels
from inflight.loading.checkpoint import (
    ModelPlan,
    check_kv_cache_dtype,
    model_name,
    open_configured,
    plan_model,
)
from inflight.models.decoders.footprint import (
    META,
    RankShare,
    common_layout,
    default_rows,
    meta_decoder,
    meta_kernels,
    rank_shares,
)
from inflight.models.decoders.mlps import DenseMlpSpec
from inflight.models.decoders.spec import DecoderSpec, Shard, shard_of, whole_shard
from inflight.models.decoders.weights import placements
from inflight.models.encoders.families import encoder_architecture

PROCESSORS = 132  # multiprocessors of a GPU: memory for attention grows with them
LINEAR_WORKSPACE = 32 << 20  # of the linear layers on a GPU


@dataclass(frozen=True, slots=True)
class Devices:
    """`count` GPUs with `memory` bytes each, or the memory of one machine shared by any number of CPU ranks."""

    device_type: str  # "cuda" or "cpu"
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
class DevicePlan:
    """The fits for every combination of sizes that the devices allow."""

    model: ModelPlan
    parameters: int
    fits: list[Fit]


def plan_devices(config: EngineConfig, devices: Devices) -> DevicePlan:
    """Return how the model fits for each way to split it across the devices."""
    check_kv_cache_dtype(
        config.cache.kv_cache_dtype, DEFAULTS[devices.device_type].kv_cache_dtypes, devices.device_type
    )
    checkpoint = open_configured(config, "dummy")
    if encoder_architecture(checkpoint.config) is not None:
        raise ConfigError(
            f"{model_name(config)} is an encoder: it runs on one rank without a KV cache, so there is nothing to plan"
        )
    plan = plan_model(config, checkpoint, lambda _: [0])
    fits = [_fit(config, plan, devices, *sizes) for sizes in _sizes(plan.spec, devices.count)]
    whole = meta_decoder(whole_shard(plan.spec), TorchKernels(device=META), plan.dtype)
    parameters = sum(prod(placement.shape) for placement in placements(whole, dummy=True))
    return DevicePlan(plan, parameters, fits)


def _sizes(spec: DecoderSpec, count: int) -> Iterator[tuple[int, int]]:
    """Yield the tensor and pipeline parallel sizes that the model supports."""
    for tensor in range(1, min(count, MAX_RANKS) + 1):
        try:
            shard_of(spec, 0, tensor)
        except ConfigError:
            continue
        most = spec.num_layers if spec.predictor is None else 1
        for pipeline in range(1, min(count // tensor, most) + 1):
            yield tensor, pipeline


def _fit(config: EngineConfig, plan: ModelPlan, devices: Devices, tensor: int, pipeline: int) -> Fit:
    spec, context, dtype, block = plan.spec, plan.context, plan.dtype, config.cache.block_size
    kernels = meta_kernels(devices.device_type, dtype)
    shares = rank_shares(spec, tensor, pipeline, context, block, kernels, dtype)
    layout, defaults, options = common_layout(shares), DEFAULTS[devices.device_type], config.scheduler
    rows = options.max_num_seqs or default_rows(spec, defaults.max_num_seqs)
    chunk = options.max_num_batched_tokens or defaults.max_num_batched_tokens
    if devices.device_type == "cuda":
        shard, most = shard_of(spec, 0, tensor), int(devices.memory * config.cache.gpu_memory_utilization)
        samples = max_samples(options, defaults)
        step = _buffers(shard, rows, samples, context, layout, dtype)
        step += _largest_step(shard, rows, samples, chunk, block, dtype)
        overhead = CONTEXT_MEMORY + GRAPH_MEMORY + step
        available = [most - overhead - share.weights - rows * share.state for share in shares]
    else:
        unused = devices.memory - sum(share.weights for share in shares)
        total = sum(share.kv(1) for share in shares)
        available = [int(unused * MEMORY_SHARE) * share.kv(1) // total for share in shares]
    kv_memory = config.cache.kv_cache_memory
    if kv_memory is not None:
        available = [kv_memory if kv_memory <= bytes_left else -1 for bytes_left in available]
    num_blocks = min(bytes_left // share.kv(1) for bytes_left, share in zip(available, shares, strict=True))
    if devices.device_type == "cpu":
        num_blocks = min(num_blocks, most_blocks(layout, rows, context, chunk))
    return Fit(tensor, pipeline, shares, max(0, num_blocks), layout, context, chunk)


def _buffers(
    shard: Shard, rows: int, samples: int | None, context: int, layout: KVLayout, dtype: torch.dtype
) -> int:
    """Return about as many bytes as a GPU's runner keeps for requests, besides KV blocks and recurrent states."""
    tokens = 4 * rows * (context + len(layout.windows) * context // layout.block_size)
    # For each token of the vocabulary, a row has a count in 16 bits and two bits of masks, and a sample the adjusted
    # logit in float32 and a 64th of four numbers. A sample that may follow a draft has a mask.
    most = samples or rows
    sampling = int(
        shard.whole.vocab_size * (rows * (2 + 1 / 4) + (samples or 0) / 8 + most * (4 + 4 * 4 / 64))
    )
    mixers = [mixer for mixer in shard.spec.mixers if mixer]
    decoding = max((mixer.decode_values(PROCESSORS) for mixer in mixers), default=0)
    kept = dtype.itemsize * (samples or 0) * sum(mixer.kept_values for mixer in mixers)
    return LINEAR_WORKSPACE + tokens + sampling + 4 * most * decoding + kept


def _largest_step(
    shard: Shard, rows: int, samples: int | None, chunk: int, block_size: int, dtype: torch.dtype
) -> int:
    """Return about as many bytes as a GPU's largest step allocates: for its logits, or in the largest layer."""
    spec, width = shard.spec, dtype.itemsize
    shape = Buckets(rows, chunk, max_samples=samples).largest()[0]
    captures = max_captures(shape.num_tokens, shape.num_chunks, PROMPT_INTERVAL * block_size)
    pieces = max_pieces(shape.num_tokens, shape.num_chunks, captures)
    parts = [4 * (samples or rows) * spec.vocab_size]
    for index, (mixer, mlp) in enumerate(zip(spec.mixers, spec.mlps, strict=True)):
        hidden = 2 * shape.num_tokens * spec.hidden_size
        if mixer is not None:
            parts.append(width * (hidden + mixer.step_values(shape.num_tokens, pieces)))
        if mlp is not None:
            features = mlp.step_values(spec.hidden_size) // shard.size
            parts.append(width * (hidden + shape.num_tokens * features))
        scheme = spec.scheme(index, "mlp.gate_up")
        if isinstance(mlp, DenseMlpSpec) and _is_converted(scheme):
            # Its weights are dequantized for the product, before the result is gated.
            gate_up = 2 * mlp.inner // shard.size
            tokens = shape.num_tokens * (2 * spec.hidden_size + gate_up)
            parts.append(width * (tokens + gate_up * spec.hidden_size))
    return max(parts)


def _is_converted(scheme: Scheme | None) -> bool:
    """Return whether a GPU holds weights in a scheme, but multiplies plain ones with many tokens."""
    return isinstance(scheme, GroupScheme) and has_gpu_kernels(scheme) and scheme.inputs is None
