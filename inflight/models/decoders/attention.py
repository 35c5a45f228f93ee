"""Attention over the keys and values of earlier tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.kv.layout import LayerKV
from inflight.layers.attention.backend import AttentionLayer
from inflight.layers.kernels import FusableLayer, Linear, Residual
from inflight.layers.rotary import Rope
from inflight.models.decoders.mlps import DenseMlp
from inflight.models.decoders.spec import Shard
from inflight.models.decoders.sublayers import (
    LayerBuilder,
    MixerStep,
    features_of,
    norm_targets,
)
from inflight.models.tensors import LinearRows, RowRun, Target, TensorRows, packed_rows, summed_columns


class QKNorm(Enum):
    """How queries and keys are normalised: not at all, each head, or the whole projection at once."""

    NONE = "none"
    HEAD = "head"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Implements `MixerSpec`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies the scores
    rope: Rope | None  # None: queries and keys are not rotated
    window: int | None = None  # tokens that a token sees, itself included; None: all before it
    qk_norm: QKNorm = QKNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False  # whether each head has a learned term in the denominator of the softmax
    softcap: float | None = None  # the largest size of a score, approached smoothly; None: there is no limit
    has_gate: bool = False  # whether the query projection also yields gates of the heads' outputs
    value_norm: bool = False  # whether values are normalised, without a weight
    values_are_keys: bool = False  # whether values are the projected keys, before norm and rotation
    output_scale: float = 1.0  # multiplies what is projected and added to the residual
    quantized_kv: str | None = None  # how the KV cache holds it, "fp8" or "int8"; None: as computed
    # The layer whose keys and values it reads, with heads and window like its own; None: it has its own.
    kv_source: int | None = None
    input_size: int | None = None  # features of its input; None: those of the residual, which is its input

    state_size = kept_values = 0

    @property
    def kv(self) -> LayerKV | None:
        if self.kv_source is not None:
            return None
        dim = self.head_dim
        return LayerKV(self.num_kv_heads, dim, dim, self.window, self.quantized_kv)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def with_quantized_kv(self, dtype: str) -> AttentionSpec:
        return replace(self, quantized_kv=dtype)

    def step_values(self, num_tokens: int, num_pieces: int) -> int:  # noqa: ARG002
        own_kv = 2 * self.kv_size * (self.kv_source is None)
        return num_tokens * ((2 + self.has_gate) * self.query_size + own_kv)

    def decode_values(self, num_processors: int) -> int:
        """Return the partial results of split decodes, and of each part that a shared prefix is split into."""
        return (2 + max(1, num_processors // self.num_kv_heads)) * self.query_size

    def check_split(self, size: int) -> None:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            fitting = [
                n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
            ]
            raise ConfigError(
                f"tensor_parallel_size is {size}: the model has {heads} attention heads and {kv_heads} key/value "
                f"heads, which can be split across {', '.join(map(str, fitting))} ranks"
            )

    def shard(self, shard: Shard) -> AttentionSpec:
        num_kv_heads = len(self.kv_heads(shard))
        return replace(self, num_heads=len(self.query_heads(shard)), num_kv_heads=num_kv_heads)

    def query_heads(self, shard: Shard) -> range:
        return shard.part(self.num_heads)

    def kv_heads(self, shard: Shard) -> range:
        """Return a rank's key and value heads. With fewer heads than ranks, neighbouring ranks have the same one."""
        count = self.num_kv_heads
        if count % shard.size == 0:
            return shard.part(count)
        head = shard.rank * count // shard.size
        return range(head, head + 1)

    def kv_copies(self, shard: Shard) -> int:
        """Return the number of ranks that have the same key and value heads."""
        return max(1, shard.size // self.num_kv_heads)

    def build(self, layer: LayerBuilder) -> SelfAttention:
        return SelfAttention(self, layer)


class SelfAttention:
    """Implements `Mixer`: norm, queries, keys, values and gates in one product, attention over the KV cache, output
    projection."""

    def __init__(self, whole: AttentionSpec, layer: LayerBuilder) -> None:
        spec, shard, heads_here = layer.spec, layer.shard, whole.shard(layer.shard)
        has_kv = heads_here.kv_source is None
        self._spec = spec
        self._shard = shard
        self._whole, self._own = whole, heads_here
        self._kernels = layer.kernels
        self._backend = layer.attention
        self._cache = layer.cache
        self._qkv_size = heads_here.query_size + 2 * heads_here.kv_size * has_kv
        num_rows = self._qkv_size + heads_here.query_size * heads_here.has_gate
        num_inputs = whole.input_size or spec.hidden_size
        self.qkv = layer.linear("attention.qkv", num_inputs, num_rows, heads_here.qkv_bias)
        self.output = layer.output("attention.output", heads_here.query_size, heads_here.output_bias)
        self.in_norm, self.out_norm = layer.norms()
        of_all, any_norm = heads_here.qk_norm is QKNorm.WHOLE, heads_here.qk_norm is not QKNorm.NONE
        self.q_norm = layer.norm(any_norm, heads_here.query_size if of_all else heads_here.head_dim)
        self.k_norm = layer.norm(any_norm and has_kv, heads_here.kv_size if of_all else heads_here.head_dim)
        self.sinks = layer.norm(heads_here.has_sinks, heads_here.num_heads)
        self.heads = AttentionLayer(
            num_heads=heads_here.num_heads,
            num_kv_heads=heads_here.num_kv_heads,
            head_dim=heads_here.head_dim,
            # Norms of the whole projection are applied in _normalise_whole.
            q_norm=None if of_all else self.q_norm,
            k_norm=None if of_all else self.k_norm,
            eps=spec.norm_eps,
            cos_sin=layer.rotary_table(heads_here.rope),
            scale=heads_here.scale,
            window=heads_here.window,
            table=layer.table,
            sinks=self.sinks,
            softcap=heads_here.softcap,
            v_norm=torch.ones(heads_here.head_dim, device=layer.device)
            if heads_here.value_norm and has_kv
            else None,
            has_kv=has_kv,
        )

    def __call__(
        self,
        residual: Residual,
        step: MixerStep,
        next_norm: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Residual:
        return self.attend(residual, residual, step, next_norm, output_tokens)

    def attend(
        self,
        inputs: Residual,
        residual: Residual,
        step: MixerStep,
        next_norm: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Residual:
        """Return the residual plus the output for `inputs`, which are usually the residual itself."""
        spec, local = self._spec, self._own
        projected = self.qkv.normed(inputs, spec.norm_eps)  # gates come last
        qkv = projected[:, : self._qkv_size] if local.has_gate else projected
        if local.qk_norm is QKNorm.WHOLE:
            qkv = self._normalise_whole(qkv)
        attended = self._backend.attend(qkv, self.heads, step.caches[self._cache], step.inputs)
        if local.has_gate:
            attended = self._kernels.sigmoid_gate(attended, projected[:, self._qkv_size :])
        if local.output_scale != 1.0:
            attended = attended * local.output_scale
        eps = spec.norm_eps
        return add_output(self.output, residual, attended, self.out_norm, eps, next_norm, output_tokens)

    def fusable(self, mlp: DenseMlp) -> FusableLayer | None:
        """Return this and an MLP as a layer that is nothing but the two, or None if there is more to do."""
        spec, local = self._spec, self._own
        if (
            local.has_gate
            or local.input_size is not None
            or local.kv_source is not None
            or local.qk_norm is QKNorm.WHOLE
            or local.output_scale != 1.0
            or self.out_norm is not None
            or mlp.out_norm is not None
        ):
            return None
        return FusableLayer(
            self.in_norm,
            self.qkv,
            self.heads,
            self.output,
            mlp.in_norm,
            mlp.gate_up,
            mlp.down,
            mlp.activation,
            spec.norm_eps,
        )

    def targets(self) -> Mapping[str, Target]:
        shard, whole, spec = self._shard, self._whole, self._spec
        query = features_of(whole.query_heads(shard), whole.head_dim), whole.query_size
        kv = features_of(whole.kv_heads(shard), whole.head_dim), whole.kv_size
        norms = norm_targets(spec, "attention", q_norm=self.q_norm, k_norm=self.k_norm)
        if whole.qk_norm is QKNorm.WHOLE:
            for name, (features, count) in (("attention.q_norm", query), ("attention.k_norm", kv)):
                norms[name] = replace(norms[name], count=count, first=features.start)
        targets: dict[str, Target] = {
            **{f"attention.{name}": target for name, target in self._projections(query, kv).items()},
            "attention.output": summed_columns(self.output, *query, whole.output_bias, shard.rank == 0),
            **norms,
            **norm_targets(spec, "mixer", in_norm=self.in_norm, out_norm=self.out_norm),
        }
        if self.sinks is not None:
            heads = whole.query_heads(shard)
            runs = (RowRun(heads.start, len(heads), 0),)
            targets["attention.sinks"] = TensorRows(self.sinks, (whole.num_heads,), runs, dummy=0.0)
        return targets

    def _projections(self, query: tuple[range, int], kv: tuple[range, int]) -> dict[str, LinearRows]:
        """Return the targets of queries, keys and values."""
        whole = self._whole
        if whole.kv_source is not None:
            return packed_rows(self.qkv, "qkv", {"q": query}, whole.qkv_bias)
        targets = packed_rows(self.qkv, "qkv", {"q": query, "k": kv, "v": kv}, whole.qkv_bias)
        # As llama.cpp rotates them: the two halves of a head alternate.
        for part in ("q", "k"):
            targets[f"qkv.{part}.interleaved"] = replace(targets[f"qkv.{part}"], head_dim=whole.head_dim)
        if whole.has_gate:  # the checkpoint has the queries of a head, then its gates
            dim, heads = whole.head_dim, whole.query_heads(self._shard)
            runs = [
                RowRun((2 * head + part) * dim, dim, part * self._qkv_size + index * dim)
                for index, head in enumerate(heads)
                for part in (0, 1)
            ]
            targets["qkv.q"] = replace(targets["qkv.q"], count=2 * whole.query_size, runs=tuple(runs))
            del targets["qkv"]
        if whole.values_are_keys:
            runs_of_both = targets["qkv.k"].runs + targets.pop("qkv.v").runs
            targets["qkv.k"] = replace(targets["qkv.k"], runs=runs_of_both)
            del targets["qkv"]
        return targets

    def _normalise_whole(self, qkv: Tensor) -> Tensor:
        """Normalise all query heads together and all key heads together."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        sizes = [len(self.q_norm), len(self.k_norm), self._own.kv_size]
        query, key, value = torch.split(qkv, sizes, dim=1)
        collective = self._shard.collective
        if collective is None:
            query = self._kernels.rms_norm(query, self.q_norm, self._spec.norm_eps)
            key = self._kernels.rms_norm(key, self.k_norm, self._spec.norm_eps)
            return torch.cat((query, key, value), dim=1)
        # The mean square is over all ranks' features; keys that several ranks hold count once.
        whole, query, key = self._whole, query.float(), key.float()
        shares = query.square().sum(1), key.square().sum(1) / whole.kv_copies(self._shard)
        squares = collective.sum(torch.stack(shares, dim=1))  # [T, 2]
        eps = self._spec.norm_eps
        query = query * (squares[:, :1] / whole.query_size + eps).rsqrt() * self.q_norm
        key = key * (squares[:, 1:] / whole.kv_size + eps).rsqrt() * self.k_norm
        return torch.cat((query.to(qkv.dtype), key.to(qkv.dtype), value), dim=1)


def add_output(
    output: Linear,
    residual: Residual,
    mixed: Tensor,
    norm: Tensor | None,
    eps: float,
    next_norm: Tensor | None,
    output_tokens: Tensor | None,
) -> Residual:
    """Return the residual plus a mixer's output projection, of `output_tokens` alone if given."""
    if output_tokens is not None:
        residual, mixed = Residual(residual.x[output_tokens], None), mixed[output_tokens]
        if not len(output_tokens):
            return residual
    return output.add_to(residual, mixed, norm, eps, next_norm)
