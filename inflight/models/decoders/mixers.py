"""The mixers of decoder layers, in which a token learns of those before it: attention, and gated delta nets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, AttentionLayer, LayerCache, PlainLayer
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.layers.recurrent import DeltaNetLayer, LayerStates
from inflight.models.decoders.mlps import DenseMlp, SchemeOf, empty_norm, norm_targets, unquantized
from inflight.models.decoders.spec import AttentionSpec, DeltaNetSpec, QKNorm, Shard
from inflight.models.tensors import (
    LinearRows,
    NormWeight,
    RowRun,
    Target,
    TensorRows,
    packed_rows,
    summed_columns,
)


class Mixer(Protocol):
    """The part of a layer that reads what earlier tokens left in its memory."""

    in_norm: Tensor | None  # applied to the residual it reads
    is_recurrent: bool  # whether its memory are states, not keys and values

    def __call__(
        self,
        residual: Residual,
        memory: Any,
        inputs: Any,
        next_norm: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Residual:
        """Return the residual plus the mixer's output, to be read through `next_norm`.

        With `output_tokens` [W], token indices, only their rows are returned: other tokens only change the memory.
        """

    def targets(self) -> Mapping[str, Target]:
        """Return all load targets by name."""


class SelfAttention:
    """Implements `Mixer`: norm, queries, keys, values and gates in one product, attention over the KV cache, output
    projection."""

    is_recurrent = False

    def __init__(
        self,
        shard: Shard,
        whole: AttentionSpec,
        kernels: Kernels,
        backend: AttentionBackend[Any],
        dtype: torch.dtype,
        device: torch.device,
        cos_sin: Tensor | None,
        table: int,
        scheme_of: SchemeOf = unquantized,
    ) -> None:
        spec, own = shard.whole, shard.attention(whole)
        hidden = spec.hidden_size
        self._spec = spec
        self._shard = shard
        self._whole, self._own = whole, own
        self._kernels = kernels
        self._backend = backend
        self._qkv_size = own.query_size + 2 * own.kv_size * own.has_kv
        num_rows = self._qkv_size + own.query_size * own.has_gate
        scheme = scheme_of("attention.qkv")
        self.qkv: Linear = kernels.linear(hidden, num_rows, dtype, own.qkv_bias, scheme=scheme)
        has_bias = own.output_bias and shard.rank == 0
        scheme = scheme_of("attention.output")
        self.output: Linear = kernels.linear(
            own.query_size, hidden, dtype, has_bias, shard.collective, scheme
        )
        self.in_norm = empty_norm(spec.norm_placement.before, hidden, device)
        self.out_norm = empty_norm(spec.norm_placement.after, hidden, device)
        of_all, any_norm = own.qk_norm is QKNorm.WHOLE, own.qk_norm is not QKNorm.NONE
        self.q_norm = empty_norm(any_norm, own.query_size if of_all else own.head_dim, device)
        self.k_norm = empty_norm(any_norm and own.has_kv, own.kv_size if of_all else own.head_dim, device)
        self.sinks = empty_norm(own.has_sinks, own.num_heads, device)
        self._heads = AttentionLayer(
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            # Norms of the whole projection are applied in _normalise_whole.
            q_norm=None if of_all else self.q_norm,
            k_norm=None if of_all else self.k_norm,
            eps=spec.norm_eps,
            cos_sin=cos_sin,
            scale=own.scale,
            window=own.window,
            table=table,
            sinks=self.sinks,
            softcap=own.softcap,
            v_norm=torch.ones(own.head_dim, device=device) if own.value_norm and own.has_kv else None,
            has_kv=own.has_kv,
        )

    def __call__(
        self,
        residual: Residual,
        memory: LayerCache,
        inputs: Any,
        next_norm: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Residual:
        spec, own = self._spec, self._own
        projected = self.qkv.normed(residual, spec.norm_eps)  # gates come last
        qkv = projected[:, : self._qkv_size] if own.has_gate else projected
        if own.qk_norm is QKNorm.WHOLE:
            qkv = self._normalise_whole(qkv)
        attended = self._backend.attend(qkv, self._heads, memory, inputs)
        if own.has_gate:
            attended = self._kernels.sigmoid_gate(attended, projected[:, self._qkv_size :])
        if spec.attention_output_scale != 1.0:
            attended = attended * spec.attention_output_scale
        if output_tokens is not None:
            residual, attended = Residual(residual.x[output_tokens], None), attended[output_tokens]
            if not len(output_tokens):
                return residual
        return self.output.add_to(residual, attended, self.out_norm, spec.norm_eps, next_norm)

    def plain(self, mlp: DenseMlp) -> PlainLayer | None:
        """Return this and an MLP as a layer that is nothing but the two, or None if there is more to do."""
        spec, own = self._spec, self._own
        if (
            own.has_gate
            or not own.has_kv
            or own.qk_norm is QKNorm.WHOLE
            or spec.attention_output_scale != 1.0
            or self.out_norm is not None
            or mlp.out_norm is not None
        ):
            return None
        return PlainLayer(
            self.in_norm,
            self.qkv,
            self._heads,
            self.output,
            mlp.in_norm,
            mlp.gate_up,
            mlp.down,
            mlp.activation,
            spec.norm_eps,
        )

    def targets(self) -> Mapping[str, Target]:
        shard, whole = self._shard, self._whole
        query = features_of(shard.query_heads(whole), whole.head_dim), whole.query_size
        kv = features_of(shard.kv_heads(whole), whole.head_dim), whole.kv_size
        targets: dict[str, Target] = {
            **self._projections(query, kv),
            "output": summed_columns(self.output, *query, whole.output_bias, shard.rank == 0),
        }
        norms = norm_targets(
            self._spec, in_norm=self.in_norm, out_norm=self.out_norm, q_norm=self.q_norm, k_norm=self.k_norm
        )
        if whole.qk_norm is QKNorm.WHOLE:
            norms["q_norm"] = replace(norms["q_norm"], count=query[1], first=query[0].start)
            norms["k_norm"] = replace(norms["k_norm"], count=kv[1], first=kv[0].start)
        if self.sinks is not None:
            heads = shard.query_heads(whole)
            runs = (RowRun(heads.start, len(heads), 0),)
            targets["sinks"] = TensorRows(self.sinks, (whole.num_heads,), runs, dummy=0.0)
        return targets | norms

    def _projections(self, query: tuple[range, int], kv: tuple[range, int]) -> dict[str, LinearRows]:
        """Return the targets of queries, keys and values."""
        whole = self._whole
        if not whole.has_kv:
            return packed_rows(self.qkv, "qkv", {"q": query}, whole.qkv_bias)
        targets = packed_rows(self.qkv, "qkv", {"q": query, "k": kv, "v": kv}, whole.qkv_bias)
        # As llama.cpp rotates them: the two halves of a head alternate.
        for part in ("q", "k"):
            targets[f"qkv.{part}.interleaved"] = replace(targets[f"qkv.{part}"], head_dim=whole.head_dim)
        if whole.has_gate:  # the checkpoint has the queries of a head, then its gates
            dim, heads = whole.head_dim, self._shard.query_heads(whole)
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
        shares = query.square().sum(1), key.square().sum(1) / self._shard.kv_copies(whole)
        squares = collective.sum(torch.stack(shares, dim=1))  # [T, 2]
        eps = self._spec.norm_eps
        query = query * (squares[:, :1] / whole.query_size + eps).rsqrt() * self.q_norm
        key = key * (squares[:, 1:] / whole.kv_size + eps).rsqrt() * self.k_norm
        return torch.cat((query.to(qkv.dtype), key.to(qkv.dtype), value), dim=1)


class DeltaNet:
    """Implements `Mixer`: norm, all projections in one product, the gated delta net, output projection."""

    is_recurrent = True

    def __init__(
        self,
        shard: Shard,
        whole: DeltaNetSpec,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        scheme_of: SchemeOf = unquantized,
    ) -> None:
        spec, shape = shard.whole, shard.delta_net(whole).shape
        hidden, num_heads = spec.hidden_size, shape.num_value_heads
        self._spec = spec
        self._shard = shard
        self._whole = whole.shape
        self._kernels = kernels
        scheme = scheme_of("attention.net.in")
        self.projections: Linear = kernels.linear(hidden, shape.projected_size, dtype, False, scheme=scheme)
        scheme = scheme_of("attention.net.output")
        self.output: Linear = kernels.linear(shape.value_size, hidden, dtype, False, shard.collective, scheme)
        self.in_norm = empty_norm(spec.norm_placement.before, hidden, device)
        self.out_norm = empty_norm(spec.norm_placement.after, hidden, device)
        self.layer = DeltaNetLayer(
            shape,
            conv_weight=torch.empty(shape.conv_size, shape.kernel, device=device),
            a_log=torch.empty(num_heads, device=device),
            dt_bias=torch.empty(num_heads, device=device),
            norm=torch.empty(shape.value_dim, device=device),
            eps=spec.norm_eps,
        )

    def __call__(
        self,
        residual: Residual,
        memory: LayerStates,
        inputs: Any,
        next_norm: Tensor | None,
        output_tokens: Tensor | None = None,
    ) -> Residual:
        eps = self._spec.norm_eps
        projected = self.projections.normed(residual, eps)
        mixed = self._kernels.recurrent.delta_net(projected, self.layer, memory, inputs)
        if output_tokens is not None:
            residual, mixed = Residual(residual.x[output_tokens], None), mixed[output_tokens]
            if not len(output_tokens):
                return residual
        return self.output.add_to(residual, mixed, self.out_norm, eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        layer, whole = self.layer, self._whole
        values = features_of(self._value_heads(), whole.value_dim)
        convolved = self._convolved_rows()
        heads = (RowRun(self._value_heads().start, layer.shape.num_value_heads, 0),)
        return {
            **norm_targets(self._spec, in_norm=self.in_norm, out_norm=self.out_norm),
            **self._separate_projections(convolved),
            **self._grouped_projections(),
            "net.conv": TensorRows(
                layer.conv_weight, (whole.conv_size, 1, whole.kernel), convolved, dummy=1 / whole.kernel
            ),
            "net.a_log": TensorRows(layer.a_log, (whole.num_value_heads,), heads, dummy=0.0),
            "net.dt_bias": TensorRows(layer.dt_bias, (whole.num_value_heads,), heads, dummy=0.0),
            "net.norm": NormWeight(layer.norm, whole.value_dim),
            "net.output": summed_columns(self.output, values, whole.value_size, False, False),
        }

    def _key_heads(self) -> range:
        return self._shard.part(self._whole.num_key_heads)

    def _value_heads(self) -> range:
        return self._shard.part(self._whole.num_value_heads)

    def _convolved_rows(self) -> tuple[RowRun, ...]:
        """Return the rows of queries, keys and values, which checkpoints hold in this order."""
        whole = self._whole
        keys = features_of(self._key_heads(), whole.key_dim)
        values = features_of(self._value_heads(), whole.value_dim)
        size = whole.num_key_heads * whole.key_dim
        return (
            RowRun(keys.start, len(keys), 0),
            RowRun(size + keys.start, len(keys), len(keys)),
            RowRun(2 * size + values.start, len(values), 2 * len(keys)),
        )

    def _separate_projections(self, convolved: tuple[RowRun, ...]) -> dict[str, Target]:
        """Return the targets of checkpoints that hold z, b and a apart."""
        own, whole = self.layer.shape, self._whole
        heads = self._value_heads()
        values = features_of(heads, whole.value_dim)
        z_row, b_row = own.conv_size, own.conv_size + own.value_size
        a_row = b_row + own.num_value_heads
        return {
            "net.in.qkv": self._rows(whole.conv_size, *convolved),
            "net.in.z": self._rows(whole.value_size, RowRun(values.start, len(values), z_row)),
            "net.in.b": self._rows(whole.num_value_heads, RowRun(heads.start, len(heads), b_row)),
            "net.in.a": self._rows(whole.num_value_heads, RowRun(heads.start, len(heads), a_row)),
        }

    def _grouped_projections(self) -> dict[str, Target]:
        """Return the targets of checkpoints in which all rows of a key head, and of its value heads, are together."""
        own, whole = self.layer.shape, self._whole
        ratio = whole.num_value_heads // whole.num_key_heads
        keys, values = whole.key_dim, ratio * whole.value_dim
        b_row = own.conv_size + own.value_size
        # In the order of the checkpoint: (rows of a group, where those of the first group go)
        qkvz = (
            (keys, 0),
            (keys, own.num_key_heads * keys),
            (values, 2 * own.num_key_heads * keys),
            (values, own.conv_size),
        )
        ba = ((ratio, b_row), (ratio, b_row + own.num_value_heads))
        targets: dict[str, Target] = {}
        for name, parts in (("net.in.qkvz", qkvz), ("net.in.ba", ba)):
            size = sum(count for count, _ in parts)
            runs = []
            for index, group in enumerate(self._key_heads()):
                row = group * size
                for count, to in parts:
                    runs.append(RowRun(row, count, to + index * count))
                    row += count
            targets[name] = self._rows(size * whole.num_key_heads, *runs)
        return targets

    def _rows(self, count: int, *runs: RowRun) -> LinearRows:
        return LinearRows(self.projections, count, self.projections.in_features, runs, 0, False, False)


def features_of(heads: range, head_dim: int) -> range:
    """Return the features of consecutive heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)
