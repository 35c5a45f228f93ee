"""A backend from separate parts: norm and rotary kernels, then attention over finished heads."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from inflight.attention.backend import AttentionInputs, HeadAttention, KVShape
from inflight.attention.layer import AttentionLayer


class HeadKernels(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension, whatever the leading ones."""

    def rotate(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Rotary embedding of x [T, heads, head_dim]: the first rotary_dim features of each head, in halves
        (feature i turns with feature i + rotary_dim / 2). May work in place."""


class ComposedAttention:
    """Implements `AttentionBackend[AttentionInputs]`."""

    def __init__(self, kernels: HeadKernels, heads: HeadAttention) -> None:
        self._kernels = kernels
        self._heads = heads

    def allocate(self, shape: KVShape, num_blocks: int, device: torch.device) -> list[Tensor]:
        return self._heads.allocate(shape, num_blocks, device)

    def attend(self, qkv: Tensor, layer: AttentionLayer, cache: Tensor, inputs: AttentionInputs) -> Tensor:
        kernels, positions, cos_sin = self._kernels, inputs.positions, layer.cos_sin
        num_heads, num_rotated = layer.num_heads, layer.num_heads + layer.num_kv_heads
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        if layer.q_norm is None or layer.k_norm is None:
            turned = kernels.rotate(heads[:, :num_rotated], positions, cos_sin)
            query, key = turned[:, :num_heads], turned[:, num_heads:]
        else:
            query = kernels.rms_norm(heads[:, :num_heads], layer.q_norm, layer.eps)
            key = kernels.rms_norm(heads[:, num_heads:num_rotated], layer.k_norm, layer.eps)
            query = kernels.rotate(query, positions, cos_sin)
            key = kernels.rotate(key, positions, cos_sin)
        value = heads[:, num_rotated:]
        out = self._heads.attend(query, key, value, cache, inputs, layer.scale, layer.window)
        return out.reshape(len(qkv), -1)
