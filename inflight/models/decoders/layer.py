"""One decoder layer: attention, then an MLP; each reads the residual and adds to it."""

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
    """Rows [first, first + count) of a checkpoint's tensor, which go to rows from `to` on."""

    first: int
    count: int
    to: int


@dataclass(frozen=True, slots=True)
class LinearRows:
    """The rows and columns of a checkpoint's weight [count, num_columns] that a linear layer holds. A tensor parallel
    rank holds only some of them."""

    linear: Linear
    count: int
    num_columns: int
    runs: tuple[RowRun, ...]
    first_column: int  # the layer's in_features columns start here
    bias: bool  # whether the checkpoint has a bias
    has_bias: bool  # whether the layer holds it: if the ranks' products are summed, only one does

    def load(self, weight: Tensor, first: int = 0) -> None:
        """Load rows [first, first + len(weight)) of the checkpoint's weight."""
        columns = slice(self.first_column, self.first_column + self.linear.in_features)
        for run, part in self._parts(weight, first):
            self.linear.load(part[:, columns], run)

    def load_bias(self, bias: Tensor, first: int = 0) -> None:
        if self.has_bias:
            for run, part in self._parts(bias, first):
                self.linear.load_bias(part, run)

    def _parts(self, tensor: Tensor, first: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts of these rows that the layer holds, each with its first row in the layer."""
        for run in self.runs:
            start, end = max(run.first, first), min(run.first + run.count, first + len(tensor))
            if start < end:
                yield run.to + start - run.first, tensor[start - first : end - first]


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A norm, and the features of the checkpoint's norm that it holds."""

    weight: Tensor
    count: int  # in the checkpoint
    first: int = 0


# The target that a module of a checkpoint is loaded into.
Target = NormWeight | LinearRows


class Mlp(Protocol):
    """The part of a layer that handles each token by itself."""

    in_norm: Tensor | None  # applied to the residual it reads

    def __call__(self, residual: Residual, next_norm: Tensor | None) -> Residual:
        """Return the residual plus the MLP's output, to be read through `next_norm`."""

    def targets(self) -> Mapping[str, Target]:
        """Return all load targets by name, packed weights both whole and in the parts that checkpoints hold."""


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
        return linears | _norm_targets(in_norm=self.in_norm, out_norm=self.out_norm)


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
            # Norms of the whole projection are applied in _normalise_whole.
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
        """Return the residual plus attention's output, to be read through `next_norm`.

        With `wanted` [W], token indices, only their rows are returned: for other tokens, only keys and values are
        computed.
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
        norms = _norm_targets(
            in_norm=self.in_norm, out_norm=self.out_norm, q_norm=self.q_norm, k_norm=self.k_norm
        )
        if spec.qk_norm is QKNorm.WHOLE:
            for name, (features, count), weight in (
                ("q_norm", query, self.q_norm),
                ("k_norm", kv, self.k_norm),
            ):
                assert weight is not None
                norms[name] = NormWeight(weight, count, features.start)
        return linears | norms

    def _normalise_whole(self, qkv: Tensor) -> Tensor:
        """Normalise all query heads together and all key heads together."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        sizes = [len(self.q_norm), len(self.k_norm), self._spec.kv_size]
        query, key, value = torch.split(qkv, sizes, dim=1)
        collective = self._shard.collective
        if collective is None:
            query = self._kernels.rms_norm(query, self.q_norm, self._spec.norm_eps)
            key = self._kernels.rms_norm(key, self.k_norm, self._spec.norm_eps)
            return torch.cat((query, key, value), dim=1)
        # The mean square is over all ranks' features; keys that several ranks hold count once.
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
        """Return the load targets by the names that `WeightNames.layer` uses."""
        parts = {"attention": self.attention.targets(), "mlp": self.mlp.targets()}
        return {f"{part}.{name}": to for part, targets in parts.items() for name, to in targets.items()}


def _norm(exists: bool, size: int, device: torch.device) -> Tensor | None:
    """Return an empty norm weight [size] float32, or None if the spec has no such norm."""
    return torch.empty(size, dtype=torch.float32, device=device) if exists else None


def _norm_targets(**norms: Tensor | None) -> dict[str, Target]:
    return {name: NormWeight(norm, len(norm)) for name, norm in norms.items() if norm is not None}


def _packed(
    linear: Linear, name: str, parts: Mapping[str, tuple[range, int]], bias: bool
) -> dict[str, Target]:
    """Return the targets of a layer that packs several projections: each part, and all of them as one. A part is given
    as (the features held here, the number of features in the checkpoint)."""
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
    """Return the target of a layer that holds some columns and whose product is summed over the ranks."""
    run = RowRun(0, linear.out_features, 0)
    return LinearRows(
        linear, linear.out_features, whole, (run,), features.start, bias, bias and shard.rank == 0
    )
