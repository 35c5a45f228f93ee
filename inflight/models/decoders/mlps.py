"""The MLPs of decoder layers: dense ones, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from inflight.layers.formats import Scheme
from inflight.layers.kernels import Experts, ExpertsShape, Kernels, Linear, Residual
from inflight.models.decoders.spec import (
    EXPERTS_DOWN,
    EXPERTS_GATE_UP,
    DecoderSpec,
    DenseMlpSpec,
    ExpertsMlpSpec,
    MlpSpec,
    Shard,
)
from inflight.models.tensors import (
    ExpertBias,
    ExpertMatrix,
    NormWeight,
    PlainTensor,
    Target,
    packed_rows,
    summed_columns,
    whole_rows,
)

# Targets -> how a layer that packs them holds its weights: see `DecoderSpec.scheme`.
SchemeOf = Callable[..., Scheme | None]


def unquantized(*targets: str) -> None:
    """Implements `SchemeOf`."""


class Mlp(Protocol):
    """The part of a layer that handles each token by itself."""

    in_norm: Tensor | None  # applied to the residual it reads

    def __call__(self, residual: Residual, next_norm: Tensor | None, live: Tensor | None = None) -> Residual:
        """Return the residual plus the MLP's output, to be read through `next_norm`. `live` [T] is negative for padding
        tokens, whose output is not used."""

    def targets(self) -> Mapping[str, Target]:
        """Return all load targets by name, packed weights both whole and in the parts that checkpoints hold."""


def build_mlp(
    shard: Shard,
    mlp: MlpSpec,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    scheme_of: SchemeOf,
) -> Mlp:
    """Return the shard's part of an empty MLP."""
    if isinstance(mlp, DenseMlpSpec):
        return DenseMlp(shard, mlp, kernels, dtype, device, scheme_of)
    own_class = NormedExpertsMlp if mlp.has_own_norms else ExpertsMlp
    return own_class(shard, mlp, kernels, dtype, device, scheme_of)


class DenseMlp:
    """Implements `Mlp`: norm, gate and up in one product, activation, down."""

    def __init__(
        self,
        shard: Shard,
        mlp: DenseMlpSpec,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        scheme_of: SchemeOf = unquantized,
    ) -> None:
        spec = shard.whole
        hidden, inner = spec.hidden_size, len(shard.part(mlp.inner))
        self._spec = spec
        self._shard = shard
        self._mlp = mlp
        self.activation = mlp.activation
        scheme = scheme_of("mlp.gate_up")
        self.gate_up: Linear = kernels.linear(hidden, 2 * inner, dtype, mlp.bias, scheme=scheme)
        has_bias, scheme = mlp.bias and shard.rank == 0, scheme_of("mlp.down")
        self.down: Linear = kernels.linear(inner, hidden, dtype, has_bias, shard.collective, scheme)
        self.in_norm = empty_norm(spec.norm_placement.before, hidden, device)
        self.out_norm = empty_norm(spec.norm_placement.after, hidden, device)

    def __call__(
        self,
        residual: Residual,
        next_norm: Tensor | None,
        live: Tensor | None = None,  # noqa: ARG002
    ) -> Residual:
        eps = self._spec.norm_eps
        inner = self.gate_up.gated(residual, eps, self.activation)
        return self.down.add_to(residual, inner, self.out_norm, eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        linears = _dense_targets(self.gate_up, self.down, self._shard, self._mlp.inner, self._mlp.bias)
        return linears | norm_targets(self._spec, in_norm=self.in_norm, out_norm=self.out_norm)


class ExpertsMlp:
    """Implements `Mlp`: a router, its experts, and possibly a dense MLP beside them that all tokens share.

    Tensor parallel ranks hold some features of each expert or, if the spec says so, some of the experts.
    """

    def __init__(
        self,
        shard: Shard,
        mlp: ExpertsMlpSpec,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        scheme_of: SchemeOf = unquantized,
    ) -> None:
        spec, hidden = shard.whole, shard.whole.hidden_size
        self._spec = spec
        self._kernels = kernels
        self._shard = shard
        self._mlp = mlp
        experts = range(mlp.routing.num_experts)
        self._held = shard.part(len(experts)) if spec.expert_parallel else experts
        self._inner = range(mlp.inner) if spec.expert_parallel else shard.part(mlp.inner)
        self.experts: Experts = kernels.experts(
            ExpertsShape(
                hidden,
                len(self._inner),
                mlp.routing,
                dtype,
                mlp.activation,
                mlp.bias,
                mlp.limit,
                self._held,
                scheme_of(*EXPERTS_GATE_UP),
                scheme_of(EXPERTS_DOWN),
            ),
            shard.collective,
        )
        self.in_norm = empty_norm(True, hidden, device)
        self.shared_gate_up: Linear | None = None
        self.shared_down: Linear | None = None
        self.shared_gate: Linear | None = None
        if mlp.shared_inner:
            inner = len(shard.part(mlp.shared_inner))
            scheme = scheme_of("mlp.shared.gate_up")
            self.shared_gate_up = kernels.linear(hidden, 2 * inner, dtype, False, scheme=scheme)
            scheme = scheme_of("mlp.shared.down")
            self.shared_down = kernels.linear(inner, hidden, dtype, False, scheme=scheme)
        if mlp.has_shared_gate:
            self.shared_gate = kernels.linear(hidden, 1, dtype, False)

    def __call__(self, residual: Residual, next_norm: Tensor | None, live: Tensor | None = None) -> Residual:
        eps = self._spec.norm_eps
        if self.shared_gate_up is None or self.shared_down is None:
            return self.experts.add_to(residual, eps, next_norm, live)
        inner = self.shared_gate_up.gated(residual, eps, self._mlp.activation)
        if self.shared_gate is not None:
            inner = self._kernels.sigmoid_gate(inner, self.shared_gate.normed(residual, eps))
        if self._shard.collective is not None:  # reduce both sums at once
            return self.experts.add_to(residual, eps, next_norm, live, self.shared_down(inner))
        residual = self.experts.add_to(residual, eps, None, live)
        return self.shared_down.add_to(residual, inner, None, eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        mlp, routing = self._mlp, self._mlp.routing
        targets: dict[str, Target] = {"router": whole_rows(self.experts.router, routing.has_bias)}
        if self.experts.correction is not None:
            targets["correction"] = PlainTensor(self.experts.correction, dummy=0.0)
        if self.experts.scales is not None:
            targets["expert_scales"] = PlainTensor(self.experts.scales, dummy=1.0)
        targets |= self._matrices()
        if self.shared_gate_up is not None and self.shared_down is not None:
            shared = _dense_targets(
                self.shared_gate_up, self.shared_down, self._shard, mlp.shared_inner, bias=False
            )
            targets |= {f"shared.{name}": target for name, target in shared.items()}
        if self.shared_gate is not None:
            targets["shared_gate"] = whole_rows(self.shared_gate, bias=False)
        return targets | norm_targets(self._spec, in_norm=self.in_norm)

    def _matrices(self) -> dict[str, Target]:
        hidden, mlp, held, inner = self._spec.hidden_size, self._mlp, self._held, self._inner
        count = mlp.routing.num_experts

        def up_to_inner(*parts: str) -> ExpertMatrix:
            return ExpertMatrix(self.experts, parts, count, mlp.inner, hidden, held, inner, range(hidden))

        gate_up = up_to_inner("gate", "up")
        down = ExpertMatrix(self.experts, ("down",), count, hidden, mlp.inner, held, range(hidden), inner)
        matrices: dict[str, Target] = {
            "experts.gate": up_to_inner("gate"),
            "experts.up": up_to_inner("up"),
            "experts.gate_up": gate_up,
            "experts.gate_up.transposed": replace(gate_up, transposed=True),
            "experts.gate_up.alternating": replace(gate_up, transposed=True, interleaved=True),
            "experts.down": down,
            "experts.down.transposed": replace(down, transposed=True),
        }
        if mlp.bias:
            # Where the ranks' products are summed, one of them adds the bias.
            adds_bias = self._spec.expert_parallel or self._shard.rank == 0
            matrices["experts.gate_bias"] = ExpertBias(up_to_inner("gate"))
            matrices["experts.up_bias"] = ExpertBias(up_to_inner("up"))
            matrices["experts.gate_up_bias"] = ExpertBias(replace(gate_up, interleaved=True))
            matrices["experts.down_bias"] = ExpertBias(replace(down, held=held if adds_bias else range(0)))
        return matrices


class NormedExpertsMlp(ExpertsMlp):
    """Implements `Mlp` as Gemma 4 has it: a router, its experts and a dense MLP, each of which reads the residual
    through a norm of its own. The sums of experts and dense MLP are normalised, added, and normalised again."""

    def __init__(
        self,
        shard: Shard,
        mlp: ExpertsMlpSpec,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        scheme_of: SchemeOf = unquantized,
    ) -> None:
        def own_scheme(*targets: str) -> Scheme | None:
            return scheme_of(*(target.replace("mlp.shared.", "mlp.") for target in targets))

        super().__init__(shard, mlp, kernels, dtype, device, own_scheme)
        hidden = shard.whole.hidden_size
        self._router_scale: float = hidden**-0.5
        self.router_norm, self.expert_norm, self.expert_out_norm, self.dense_out_norm, self.out_norm = (
            torch.empty(hidden, dtype=torch.float32, device=device) for _ in range(5)
        )

    def __call__(self, residual: Residual, next_norm: Tensor | None, live: Tensor | None = None) -> Residual:
        kernels, eps, x = self._kernels, self._spec.norm_eps, residual.x
        assert self.shared_gate_up is not None
        assert self.shared_down is not None
        dense = self.shared_down(self.shared_gate_up.gated(residual, eps, self._mlp.activation))
        if self._shard.collective is not None:
            dense = self._shard.collective.sum(dense)
        routed = kernels.rms_norm(x, self.router_norm, eps) * self._router_scale
        chosen = self.experts.sum(kernels.rms_norm(x, self.expert_norm, eps), routed, live)
        both = kernels.add(
            kernels.rms_norm(dense, self.dense_out_norm, eps),
            kernels.rms_norm(chosen, self.expert_out_norm, eps),
        )
        return Residual(kernels.add(x, kernels.rms_norm(both, self.out_norm, eps)), next_norm)

    def targets(self) -> Mapping[str, Target]:
        norms = norm_targets(
            self._spec,
            expert_norm=self.expert_norm,
            expert_out_norm=self.expert_out_norm,
            dense_out_norm=self.dense_out_norm,
            out_norm=self.out_norm,
        )
        targets = {name.removeprefix("shared."): target for name, target in super().targets().items()}
        return {**targets, **norms, "router_norm": PlainTensor(self.router_norm, dummy=1.0)}


def empty_norm(exists: bool, size: int, device: torch.device) -> Tensor | None:
    """Return an empty norm weight [size] float32, or None if the spec has no such norm."""
    return torch.empty(size, dtype=torch.float32, device=device) if exists else None


def norm_targets(spec: DecoderSpec, **norms: Tensor | None) -> dict[str, NormWeight]:
    return {
        name: NormWeight(norm, len(norm), offset=spec.norm_offset)
        for name, norm in norms.items()
        if norm is not None
    }


def _dense_targets(gate_up: Linear, down: Linear, shard: Shard, inner: int, bias: bool) -> dict[str, Target]:
    part = shard.part(inner), inner
    return {
        **packed_rows(gate_up, "gate_up", {"gate": part, "up": part}, bias),
        "down": summed_columns(down, *part, bias, shard.rank == 0),
    }
