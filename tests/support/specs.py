"""The layers of a decoder's spec, and what builds one of them."""

from __future__ import annotations

import torch

from inflight.layers.attention.cpu import ComposedAttention, TorchCpuAttention
from inflight.layers.kernels import Kernels
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.decoders.attention import AttentionSpec
from inflight.models.decoders.spec import DecoderSpec, Shard
from inflight.models.decoders.sublayers import LayerBuilder


def attentions(spec: DecoderSpec) -> list[AttentionSpec]:
    """Return the attention of each layer that has any."""
    return [mixer for mixer in spec.mixers if isinstance(mixer, AttentionSpec)]


def builder(shard: Shard, kernels: Kernels, index: int = 0) -> LayerBuilder:
    """Return what builds a layer on the CPU, in float32."""
    attention = ComposedAttention(TorchKernels(), TorchCpuAttention())
    return LayerBuilder(shard, index, kernels, attention, torch.float32, torch.device("cpu"), 64)
