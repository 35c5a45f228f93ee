"""The memory that a decoder takes, known before anything is allocated.

A decoder on torch's meta device has tensors with shapes but without memory. So what a layer holds is stated once, in
the layer itself: size checks, the shares of ranks and plans are derived from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from inflight.errors import ConfigError, ModelError
from inflight.kv.layout import KVLayout
from inflight.layers.attention.backend import KVShape
from inflight.layers.attention.cpu import ComposedAttention, TorchCpuAttention
from inflight.layers.gpu_weights import scheme_on_gpu
from inflight.layers.kernels import Kernels
from inflight.layers.native_kernels import cpu_kernels
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.decoders.decoder import Decoder
from inflight.models.decoders.spec import DecoderSpec, Shard, shard_of, whole_shard
from inflight.models.tensors import tensors_of

META = torch.device("meta")
# Requests that run at once unless configured, if each has recurrent states of some megabytes.
_MAX_STATES = 256


def default_rows(spec: DecoderSpec, max_num_seqs: int) -> int:
    """Return how many requests run at once unless configured, on a device whose default is `max_num_seqs`."""
    return min(max_num_seqs, _MAX_STATES) if spec.has_states else max_num_seqs


@dataclass(frozen=True, slots=True)
class RankShare:
    """The memory that one rank needs."""

    rank: int
    layers: range
    weights: int  # bytes
    kv_shape: KVShape
    state: int  # bytes of the recurrent state of one request

    def kv(self, num_blocks: int) -> int:
        """Return the bytes of this many blocks."""
        return num_blocks * self.kv_shape.bytes_per_block


def common_layout(shares: Sequence[RankShare]) -> KVLayout:
    """Return the layout of a model's memory that all of its ranks can follow."""
    snapshot_blocks = max(share.kv_shape.snapshot_blocks for share in shares)
    return replace(shares[0].kv_shape.layout, snapshot_blocks=snapshot_blocks)


def meta_kernels(device: str, dtype: torch.dtype) -> Kernels:
    """Return kernels that store weights as those of "cpu" or "cuda" do, but without memory."""
    return cpu_kernels(META) if device == "cpu" else TorchKernels(dtype, META, scheme_on_gpu)


def meta_decoder(shard: Shard, kernels: Kernels, dtype: torch.dtype, context: int = 1) -> Decoder:
    """Return a decoder without memory. It cannot compute."""
    attention = ComposedAttention(TorchKernels(), TorchCpuAttention())
    try:
        return Decoder(shard.whole, kernels, attention, dtype, META, context, shard)
    except RuntimeError as error:
        raise ModelError(f"config.json describes a model that is too large: {error}") from error


def num_bytes(model: object) -> int:
    """Return the bytes of all tensors that a model, or a part of one, holds."""
    return sum(tensor.nbytes for tensor in tensors_of(model))


def cut_layers(
    spec: DecoderSpec, num_stages: int, context: int, kernels: Kernels, dtype: torch.dtype
) -> list[range]:
    """Return the layers of each stage, balanced so that the largest stage holds as few bytes as possible: weights, the
    embedding or LM head at the ends, and KV memory for `context` tokens."""
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}: the model has {spec.num_layers} layers, and every stage needs at "
            "least one"
        )
    if num_stages == 1:
        return [range(spec.num_layers)]
    if spec.predictor is not None:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}: speculation runs only without pipeline stages"
        )
    if spec.layer_inputs is not None or any(mixer and mixer.kv_source is not None for mixer in spec.mixers):
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}: layers of {spec.architecture} read inputs, or keys and values, "
            "that only the first stage has"
        )
    decoder = meta_decoder(whole_shard(spec), kernels, dtype)
    kept = {index: mixer.kv for index, mixer in spec.kv_layers.items()}
    sizes: list[int] = []
    for index, layer in enumerate(decoder.layers):
        kv = kept.get(index)
        kv_bytes = 0 if kv is None else kv.block_bytes(context, kernels.compute_dtype.itemsize)
        sizes.append(num_bytes(layer) + kv_bytes)
    return _balanced(sizes, num_stages, spec.vocab_size * spec.hidden_size * dtype.itemsize)


def _balanced(sizes: list[int], num_stages: int, table: int) -> list[range]:
    """Cut layers of these sizes into stages (the first and the last also hold a table), so that the largest
    stage is as small as possible, and the others are as even as that allows."""
    ends = [0, *accumulate(sizes)]
    # (largest stage, sum of squares, first layer of the last stage) for the first `end` layers in some stages
    best: list[dict[int, tuple[int, int, int]]] = [{0: (0, 0, 0)}]
    for stage in range(num_stages):
        extra = table if stage in (0, num_stages - 1) else 0
        cuts: dict[int, tuple[int, int, int]] = {}
        for end in range(stage + 1, len(sizes) - (num_stages - stage - 1) + 1):
            options = (
                (max(largest, size), squares + size * size, start)
                for start, (largest, squares, _) in best[-1].items()
                if start < end
                for size in (ends[end] - ends[start] + extra,)
            )
            cuts[end] = min(options)
        best.append(cuts)
    stages: list[range] = []
    end = len(sizes)
    for cuts in reversed(best[1:]):
        start = cuts[end][2]
        stages.insert(0, range(start, end))
        end = start
    return stages


def rank_shares(
    spec: DecoderSpec,
    tensor: int,
    pipeline: int,
    context: int,
    block_size: int,
    kernels: Kernels,
    dtype: torch.dtype,
) -> list[RankShare]:
    """Return the share of every rank, in rank order."""
    shares: list[RankShare] = []
    for layers in cut_layers(spec, pipeline, context, kernels, dtype):
        # The first rank of a stage holds at least as much as the others.
        decoder = meta_decoder(shard_of(spec, 0, tensor, layers), kernels, dtype, context)
        kv_shape, state = decoder.kv_shape(block_size), 4 * sum(decoder.state_sizes)
        for _ in range(tensor):
            shares.append(RankShare(len(shares), layers, num_bytes(decoder), kv_shape, state))
    return shares
