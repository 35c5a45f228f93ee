"""How many bytes a shard of a decoder takes, before any of them are taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inflight.models.shard import Shard, cut_layers, shard_of
from inflight.models.spec import DecoderSpec, QKNorm

FLOAT = 4  # bytes of a norm's weight, of a bias on a CPU, of an angle


@dataclass(frozen=True, slots=True)
class Storage:
    """How a device holds numbers: bytes of one in a matrix, in the embedding table, in the KV memory."""

    matrix: int
    table: int
    kv: int
    panel: int = 1  # outputs of a matrix are rounded up to a multiple of it


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank holds."""

    rank: int
    layers: range
    weights: int  # bytes
    kv_per_token: int  # bytes

    def kv(self, num_tokens: int) -> int:
        return num_tokens * self.kv_per_token


def cpu_storage(dtype: torch.dtype, panel: int | None) -> Storage:
    """Compiled kernels hold panels, and bfloat16 as it is; without them (None) all is float32."""
    narrow = dtype == torch.bfloat16 and panel is not None
    return Storage(2 if narrow else FLOAT, dtype.itemsize, FLOAT, panel or 1)


def gpu_storage(dtype: torch.dtype) -> Storage:
    return Storage(dtype.itemsize, dtype.itemsize, dtype.itemsize)


def weight_bytes(shard: Shard, context: int, storage: Storage) -> int:
    """Matrices, tables, norms and, for `context` positions, the angles of the rotary embedding."""
    spec = shard.spec
    query, kv, hidden, inner = spec.query_size, spec.kv_size, spec.hidden_size, spec.intermediate_size

    def matrix(outputs: int, inputs: int) -> int:
        return -(-outputs // storage.panel) * storage.panel * inputs * storage.matrix

    layer = (
        matrix(query + 2 * kv, hidden)
        + matrix(hidden, query)
        + matrix(2 * inner, hidden)
        + matrix(hidden, inner)
    )
    biases = (
        (query + 2 * kv) * spec.qkv_bias + hidden * spec.output_bias + (2 * inner + hidden) * spec.mlp_bias
    )
    total = spec.num_layers * (layer + FLOAT * (biases + _norms(spec))) + FLOAT * hidden
    total += sum(FLOAT * context * rope.rotary_dim for rope in spec.ropes)
    has_head = shard.is_last and spec.has_lm_head
    if has_head:
        total += matrix(len(shard.vocab), hidden)
    if shard.is_last and spec.num_labels:
        total += matrix(spec.num_labels, hidden)
    if shard.is_first and not (has_head and spec.tied_embeddings):
        total += len(shard.vocab) * hidden * storage.table
    return total


def kv_bytes_per_token(shard: Shard, storage: Storage) -> int:
    return shard.spec.num_layers * 2 * shard.spec.kv_size * storage.kv


def rank_shares(
    spec: DecoderSpec, tensor: int, pipeline: int, context: int, storage: Storage
) -> list[RankShare]:
    """In the order of the ranks."""
    stages = cut_layers(spec, pipeline, context, storage.matrix, storage.kv)
    shares = []
    for stage, layers in enumerate(stages):
        for place in range(tensor):
            shard = shard_of(spec, place, tensor, layers)
            weights = weight_bytes(shard, context, storage)
            shares.append(
                RankShare(stage * tensor + place, layers, weights, kv_bytes_per_token(shard, storage))
            )
    return shares


def _norms(spec: DecoderSpec) -> int:
    """Numbers in the norms of a layer."""
    count = 2 * (spec.norm_placement.before + spec.norm_placement.after) * spec.hidden_size
    if spec.qk_norm is QKNorm.WHOLE:
        return count + spec.query_size + spec.kv_size
    return count + (2 * spec.head_dim if spec.qk_norm is QKNorm.HEAD else 0)
