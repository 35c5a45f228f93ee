"""One layer of the decoder: attention, then an MLP, each of which reads the residual and adds to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.attention.backend import AttentionBackend, AttentionLayer
from inflight.layers.kernels import Kernels, Linear, Residual
from inflight.models.spec import DecoderSpec, QKNorm


@dataclass(frozen=True, slots=True)
class LinearRows:
    """Output rows [first, first + count) of a linear layer."""

    linear: Linear
    first: int
    count: int
    bias: bool


# What a module of a checkpoint fills: a norm, or rows of a linear layer.
Target = Tensor | LinearRows


class Mlp(Protocol):
    """The part of a layer that takes each token by itself."""

    in_norm: Tensor | None  # through which it reads the residual

    def __call__(self, residual: Residual, next_norm: Tensor | None) -> Residual:
        """The residual and what the MLP adds to it, to be read through `next_norm`."""

    def targets(self) -> Mapping[str, Target]:
        """By name: all that is loaded, whole and in the parts that checkpoints hold."""


class DenseMlp:
    """Implements `Mlp`: norm, gate and up in one product, activation, down."""

    def __init__(self, spec: DecoderSpec, kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._spec = spec
        self.gate_up: Linear = kernels.linear(hidden, 2 * inner, dtype, spec.mlp_bias)
        self.down: Linear = kernels.linear(inner, hidden, dtype, spec.mlp_bias)
        self.in_norm = _norm(spec.norm_placement.before, hidden, device)
        self.out_norm = _norm(spec.norm_placement.after, hidden, device)

    def __call__(self, residual: Residual, next_norm: Tensor | None) -> Residual:
        eps = self._spec.norm_eps
        inner = self.gate_up.gated(residual, eps, self._spec.activation)
        return self.down.add_to(residual, inner, self.out_norm, eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        inner, bias = self._spec.intermediate_size, self._spec.mlp_bias
        linears = {
            "gate_up": LinearRows(self.gate_up, 0, 2 * inner, bias),
            "gate_up.gate": LinearRows(self.gate_up, 0, inner, bias),
            "gate_up.up": LinearRows(self.gate_up, inner, inner, bias),
            "down": LinearRows(self.down, 0, self._spec.hidden_size, bias),
        }
        return linears | _given(in_norm=self.in_norm, out_norm=self.out_norm)


class SelfAttention:
    """Norm, queries, keys and values in one product, attention over the KV cache, output projection."""

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: Kernels,
        backend: AttentionBackend[Any],
        dtype: torch.dtype,
        device: torch.device,
        cos_sin: Tensor,
        window: int | None,
    ) -> None:
        hidden = spec.hidden_size
        self._spec = spec
        self._kernels = kernels
        self._backend = backend
        self.qkv: Linear = kernels.linear(hidden, spec.query_size + 2 * spec.kv_size, dtype, spec.qkv_bias)
        self.output: Linear = kernels.linear(spec.query_size, hidden, dtype, spec.output_bias)
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
        spec = self._spec
        query, kv, bias = spec.query_size, spec.kv_size, spec.qkv_bias
        linears = {
            "qkv": LinearRows(self.qkv, 0, query + 2 * kv, bias),
            "qkv.q": LinearRows(self.qkv, 0, query, bias),
            "qkv.k": LinearRows(self.qkv, query, kv, bias),
            "qkv.v": LinearRows(self.qkv, query + kv, kv, bias),
            "output": LinearRows(self.output, 0, spec.hidden_size, spec.output_bias),
        }
        norms = _given(in_norm=self.in_norm, out_norm=self.out_norm, q_norm=self.q_norm, k_norm=self.k_norm)
        return linears | norms

    def _normalise_whole(self, qkv: Tensor) -> Tensor:
        """All query heads together and all key heads together, where single heads are not."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        sizes = [len(self.q_norm), len(self.k_norm), self._spec.kv_size]
        query, key, value = torch.split(qkv, sizes, dim=1)
        query = self._kernels.rms_norm(query, self.q_norm, self._spec.norm_eps)
        key = self._kernels.rms_norm(key, self.k_norm, self._spec.norm_eps)
        return torch.cat((query, key, value), dim=1)


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
    return {name: norm for name, norm in norms.items() if norm is not None}
