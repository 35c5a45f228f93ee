"""The part of a decoder that one rank holds, as data, and the bytes it takes.

Tensor parallel ranks of one pipeline stage have the same layers, but different attention heads, MLP features and parts
of the vocabulary. Pipeline stages have different layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.models.decoders.spec import DecoderSpec, QKNorm


class Collective(Protocol):
    """Collective operations of the ranks of one stage. All ranks make the same calls in the same order."""

    @property
    def capturable(self) -> bool:
        """Whether a step that uses it can be captured in a CUDA graph."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, added in rank order: bit-identical on each rank. May overwrite x."""


@runtime_checkable
class GatheringCollective(Collective, Protocol):
    """A collective that also gathers, on GPUs. CPU ranks never hold all columns."""

    def gather(self, x: Tensor, widths: Sequence[int], wanted: Tensor | None = None) -> Tensor:
        """Return the columns of all ranks side by side, [n, sum of widths]. `wanted` [n] int32, equal on all ranks,
        limits how many columns of each rank a row needs; the others are undefined."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the `whole` decoder that a rank holds, as ranges of the whole."""

    whole: DecoderSpec
    rank: int
    size: int
    layers: range
    query: range  # features of the query projection
    kv: range  # of keys, and of values
    inner: range  # of the MLP
    vocab: range
    collective: Collective | None = None  # None: the stage has one rank

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds token ids."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage turns hidden states into tokens or vectors."""
        return self.layers.stop == self.whole.num_layers

    @property
    def spec(self) -> DecoderSpec:
        """The decoder that this rank computes; only its vocabulary is that of the whole."""
        whole, layers = self.whole, slice(self.layers.start, self.layers.stop)
        return replace(
            whole,
            num_layers=len(self.layers),
            num_heads=len(self.query) // whole.head_dim,
            num_kv_heads=len(self.kv) // whole.head_dim,
            intermediate_size=len(self.inner),
            windows=whole.windows[layers],
            layer_ropes=whole.layer_ropes[layers],
        )

    @property
    def kv_copies(self) -> int:
        """The number of ranks that have the same key and value heads."""
        return max(1, self.size // self.whole.num_kv_heads)

    @property
    def vocab_sizes(self) -> list[int]:
        """The number of tokens of each rank."""
        return [len(_part(self.whole.vocab_size, rank, self.size)) for rank in range(self.size)]


def check_tensor_parallel(spec: DecoderSpec, size: int) -> None:
    """Raise if the model cannot be split across `size` ranks."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        fitting = [
            n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        ]
        raise ConfigError(
            f"tensor_parallel_size is {size}: the model has {heads} attention heads and {kv_heads} key/value heads, "
            f"which can be split across {', '.join(map(str, fitting))} ranks"
        )
    if min(spec.intermediate_size, spec.vocab_size) < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}: the model has {spec.intermediate_size} inner features and "
            f"{spec.vocab_size} tokens, and every rank needs at least one of each"
        )


def cut_layers(
    spec: DecoderSpec, num_stages: int, context: int, itemsize: int, kv_itemsize: int
) -> list[range]:
    """Return the layers of each stage, balanced so that the largest stage holds as few bytes as possible: weights, the
    embedding or LM head at the ends, and KV memory for `context` tokens."""
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {num_stages}: the model has {spec.num_layers} layers, and every stage needs at "
            "least one"
        )
    table = spec.vocab_size * spec.hidden_size * itemsize
    ends = {0: table, num_stages - 1: table} if num_stages > 1 else {}
    layer = layer_weights(spec) * itemsize + 2 * spec.kv_size * context * kv_itemsize
    counts = [1] * num_stages
    for _ in range(spec.num_layers - num_stages):
        sizes = [ends.get(stage, 0) + (count + 1) * layer for stage, count in enumerate(counts)]
        counts[sizes.index(min(sizes))] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def layer_weights(spec: DecoderSpec) -> int:
    """Return the number of parameters in the matrices of one layer."""
    hidden, query, kv = spec.hidden_size, spec.query_size, spec.kv_size
    return hidden * (2 * query + 2 * kv + 3 * spec.intermediate_size)


def whole_shard(spec: DecoderSpec) -> Shard:
    """Return the shard that holds the whole decoder."""
    return shard_of(spec, 0, 1)


def shard_of(
    spec: DecoderSpec,
    rank: int,
    size: int,
    layers: range | None = None,
    collective: Collective | None = None,
) -> Shard:
    """Return the shard of rank `rank` of `size` in the stage that has `layers`, by default all."""
    check_tensor_parallel(spec, size)
    dim, kv_heads = spec.head_dim, spec.num_kv_heads
    query = _part(spec.num_heads, rank, size)
    # With fewer key/value heads than ranks, neighbouring ranks have the same one.
    kv = (
        _part(kv_heads, rank, size)
        if kv_heads % size == 0
        else _part(kv_heads, rank * kv_heads // size, kv_heads)
    )
    return Shard(
        spec,
        rank,
        size,
        range(spec.num_layers) if layers is None else layers,
        range(query.start * dim, query.stop * dim),
        range(kv.start * dim, kv.stop * dim),
        _part(spec.intermediate_size, rank, size),
        _part(spec.vocab_size, rank, size),
        collective,
    )


def _part(count: int, rank: int, size: int) -> range:
    """Return an even share of `count`; the first ranks get one more where it does not divide."""
    base, more = divmod(count, size)
    first = rank * base + min(rank, more)
    return range(first, first + base + (rank < more))


FLOAT = 4  # bytes of a norm's weight, of a bias on a CPU, of an angle


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes per number in matrices, in the embedding table and in the KV cache of a device."""

    matrix: int
    table: int
    kv: int
    panel: int = 1  # outputs of a matrix are rounded up to a multiple of this


@dataclass(frozen=True, slots=True)
class RankShare:
    """The memory that one rank needs."""

    rank: int
    layers: range
    weights: int  # bytes
    kv_per_token: int  # bytes

    def kv(self, num_tokens: int) -> int:
        return num_tokens * self.kv_per_token


def cpu_storage(dtype: torch.dtype, panel: int | None) -> Storage:
    """Return the CPU's storage. Compiled kernels store panels and keep bfloat16; without them (panel None) matrices are
    float32."""
    narrow = dtype == torch.bfloat16 and panel is not None
    return Storage(2 if narrow else FLOAT, dtype.itemsize, FLOAT, panel or 1)


def gpu_storage(dtype: torch.dtype) -> Storage:
    return Storage(dtype.itemsize, dtype.itemsize, dtype.itemsize)


def weight_bytes(shard: Shard, context: int, storage: Storage) -> int:
    """Return the bytes of matrices, embeddings, norms and rotary tables for `context` positions."""
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
    """Return the share of every rank, in rank order."""
    stages = cut_layers(spec, pipeline, context, storage.matrix, storage.kv)
    shares = []
    for stage, layers in enumerate(stages):
        for rank in range(tensor):
            shard = shard_of(spec, rank, tensor, layers)
            weights = weight_bytes(shard, context, storage)
            shares.append(
                RankShare(stage * tensor + rank, layers, weights, kv_bytes_per_token(shard, storage))
            )
    return shares


def _norms(spec: DecoderSpec) -> int:
    """Return the number of parameters in the norms of a layer."""
    count = 2 * (spec.norm_placement.before + spec.norm_placement.after) * spec.hidden_size
    if spec.qk_norm is QKNorm.WHOLE:
        return count + spec.query_size + spec.kv_size
    return count + (2 * spec.head_dim if spec.qk_norm is QKNorm.HEAD else 0)
