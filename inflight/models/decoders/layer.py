"""One layer of the decoder: attention, then an MLP, each of which reads the residual and adds to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, AttentionLayer
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.models.decoders.shard import Shard
from inflight.models.decoders.spec import QKNorm


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows [first, first + count) of a checkpoint's tensor, which are held from row `to` on."""

    first: int
    count: int
    to: int


@dataclass(frozen=True, slots=True)
class LinearRows:
    """Where a weight [count, num_columns] of a checkpoint goes in a linear layer: which of its rows and columns, for a
    rank of several has only some."""

    linear: Linear
    count: int
    num_columns: int
    runs: tuple[RowRun, ...]
    first_column: int  # as many follow as the layer has inputs
    bias: bool  # the checkpoint has one beside the weight
    has_bias: bool  # the layer holds it: of ranks whose products are summed, one does

    def load(self, weight: Tensor, first: int = 0) -> None:
        """Rows [first, first + len(weight)) of the checkpoint's weight."""
        columns = slice(self.first_column, self.first_column + self.linear.in_features)
        for run, part in self._parts(weight, first):
            self.linear.load(part[:, columns], run)

    def load_bias(self, bias: Tensor, first: int = 0) -> None:
        if self.has_bias:
            for run, part in self._parts(bias, first):
                self.linear.load_bias(part, run)

    def _parts(self, tensor: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
        """What of these rows is held, and from which row of the layer on."""
        for run in self.runs:
            start, end = max(run.first, first), min(run.first + run.count, first + len(tensor))
            if start < end:
                yield run.to + start - run.first, tensor[start - first : end - first]


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A norm, and which features of the checkpoint's it has."""

    weight: Tensor
    count: int  # in the checkpoint
    first: int = 0


# What a module of a checkpoint fills.
Target = NormWeight | LinearRows


class Mlp(Protocol):
    """The part of a layer that takes each token by itself."""

    in_norm: Tensor | None  # through which it reads the residual

    def __call__(self, residual: Residual, next_norm: Tensor | None) -> Residual:
        """The residual and what the MLP adds to it, to be read through `next_norm`."""

    def targets(self) -> Mapping[str, Target]:
        """By name: all that is loaded, whole and in the parts that checkpoints hold."""


class DenseMlp:
    """Implements `Mlp`: norm, gate and up in one product, activation, down."""

    def __init__(self, shard: Shard, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        spec = shard.spec
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._spec = spec
        self._shard = shard
        self.gate_up: Linear = kernels.linear(hidden, 2 * inner, dtype, spec.mlp_bias)
        has_bias = spec.mlp_bias and shard.rank == 0
        self.down: Linear = kernels.linear(inner, hidden, dtype, has_bias, shard.collective)
        self.in_norm = _norm(spec.norm_placement.before, hidden, device)
        self.out_norm = _norm(spec.norm_placement.after, hidden, device)

    def __call__(self, residual: Residual, next_norm: Tensor | None) -> Residual:
        eps = self._spec.norm_eps
        inner = self.gate_up.gated(residual, eps, self._spec.activation)
        return self.down.add_to(residual, inner, self.out_norm, eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        shard, bias = self._shard, self._spec.mlp_bias
        inner = shard.inner, shard.whole.intermediate_size
        linears = {
            **_packed(self.gate_up, "gate_up", {"gate": inner, "up": inner}, bias),
            "down": _summed(self.down, *inner, bias, shard),
        }
        return linears | _given(in_norm=self.in_norm, out_norm=self.out_norm)


class SelfAttention:
    """Norm, queries, keys and values in one product, attention over the KV cache, output projection."""

    def __init__(
        self,
        shard: Shard,
        kernels: Kernels,
        backend: AttentionBackend[Any],
        dtype: torch.dtype,
        device: torch.device,
        cos_sin: Tensor,
        window: int | None,
    ) -> None:
        spec = shard.spec
        hidden = spec.hidden_size
        self._spec = spec
        self._shard = shard
        self._kernels = kernels
        self._backend = backend
        self.qkv: Linear = kernels.linear(hidden, spec.query_size + 2 * spec.kv_size, dtype, spec.qkv_bias)
        has_bias = spec.output_bias and shard.rank == 0
        self.output: Linear = kernels.linear(spec.query_size, hidden, dtype, has_bias, shard.collective)
        self.in_norm = _norm(spec.norm_placement.before, hidden, device)
        self.out_norm = _norm(spec.norm_placement.after, hidden, device)
        whole, any_norm = spec.qk_norm is QKNorm.WHOLE, spec.qk_norm is not QKNorm.NONE
        self.q_norm = _norm(any_norm, spec.query_size if whole else spec.head_dim, device)
        self.k_norm = _norm(any_norm, spec.kv_size if whole else spec.head_dim, device)
        self._heads = AttentionLayer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            # Norms of the whole projection are done here, see _normalise_whole.
            q_norm=None if whole else self.q_norm,
            k_norm=None if whole else self.k_norm,
            eps=spec.norm_eps,
            cos_sin=cos_sin,  # shared between layers
            scale=spec.attention_scale,
            window=window,
        )

    def __call__(
        self,
        residual: Residual,
        cache: Tensor,
        inputs: Any,
        next_norm: Tensor | None,
        wanted: Tensor | None = None,
    ) -> Residual:
        """The residual and what attention adds to it, to be read through `next_norm`.

        With `wanted` [W], indices of tokens, it is theirs alone: of the others only keys and values are computed.
        """
        spec = self._spec
        qkv = self.qkv.normed(residual, spec.norm_eps)
        if spec.qk_norm is QKNorm.WHOLE:
            qkv = self._normalise_whole(qkv)
        attended = self._backend.attend(qkv, self._heads, cache, inputs)
        if wanted is not None:
            residual, attended = Residual(residual.x[wanted], None), attended[wanted]
            if not len(wanted):
                return residual
        return self.output.add_to(residual, attended, self.out_norm, spec.norm_eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        spec, shard = self._spec, self._shard
        query = shard.query, shard.whole.query_size
        kv = shard.kv, shard.whole.kv_size
        linears = {
            **_packed(self.qkv, "qkv", {"q": query, "k": kv, "v": kv}, spec.qkv_bias),
            "output": _summed(self.output, *query, spec.output_bias, shard),
        }
        norms = _given(in_norm=self.in_norm, out_norm=self.out_norm, q_norm=self.q_norm, k_norm=self.k_norm)
        if spec.qk_norm is QKNorm.WHOLE:
            for name, (features, count), weight in (
                ("q_norm", query, self.q_norm),
                ("k_norm", kv, self.k_norm),
            ):
                assert weight is not None
                norms[name] = NormWeight(weight, count, features.start)
        return linears | norms

    def _normalise_whole(self, qkv: Tensor) -> Tensor:
        """All query heads together and all key heads together, where single heads are not."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        sizes = [len(self.q_norm), len(self.k_norm), self._spec.kv_size]
        query, key, value = torch.split(qkv, sizes, dim=1)
        collective = self._shard.collective
        if collective is None:
            query = self._kernels.rms_norm(query, self.q_norm, self._spec.norm_eps)
            key = self._kernels.rms_norm(key, self.k_norm, self._spec.norm_eps)
            return torch.cat((query, key, value), dim=1)
        # The mean square is that of all ranks' features; keys that several ranks have count once.
        whole, query, key = self._shard.whole, query.float(), key.float()
        shares = query.square().sum(1), key.square().sum(1) / self._shard.kv_copies
        squares = collective.sum(torch.stack(shares, dim=1))  # [T, 2]
        eps = self._spec.norm_eps
        query = query * (squares[:, :1] / whole.query_size + eps).rsqrt() * self.q_norm
        key = key * (squares[:, 1:] / whole.kv_size + eps).rsqrt() * self.k_norm
        return torch.cat((query.to(qkv.dtype), key.to(qkv.dtype), value), dim=1)


@dataclass(frozen=True, slots=True)
class Layer:
    attention: SelfAttention
    mlp: Mlp

    def targets(self) -> Mapping[str, Target]:
        """By the names that `WeightNames.layer` uses."""
        parts = {"attention": self.attention.targets(), "mlp": self.mlp.targets()}
        return {f"{part}.{name}": to for part, targets in parts.items() for name, to in targets.items()}


def _norm(wanted: bool, size: int, device: torch.device) -> Tensor | None:
    """[size] float32, or None where the spec asks for no norm."""
    return torch.empty(size, dtype=torch.float32, device=device) if wanted else None


def _given(**norms: Tensor | None) -> dict[str, Target]:
    return {name: NormWeight(norm, len(norm)) for name, norm in norms.items() if norm is not None}


def _packed(
    linear: Linear, name: str, parts: Mapping[str, tuple[range, int]], bias: bool
) -> dict[str, Target]:
    """A layer whose outputs are several projections one after the other: each of them, and all in one. A part is the
    features that are held, and how many the checkpoint has."""
    targets: dict[str, Target] = {}
    runs, count, to = [], 0, 0
    for part, (features, whole) in parts.items():
        run = RowRun(features.start, len(features), to)
        targets[f"{name}.{part}"] = LinearRows(linear, whole, linear.in_features, (run,), 0, bias, bias)
        runs.append(replace(run, first=count + run.first))
        count, to = count + whole, to + len(features)
    targets[name] = LinearRows(linear, count, linear.in_features, tuple(runs), 0, bias, bias)
    return targets


def _summed(linear: Linear, features: range, whole: int, bias: bool, shard: Shard) -> LinearRows:
    """A layer that has some of the columns, and whose product is summed over the ranks."""
    run = RowRun(0, linear.out_features, 0)
    return LinearRows(
        linear, linear.out_features, whole, (run,), features.start, bias, bias and shard.rank == 0
    )
