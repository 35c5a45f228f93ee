"""The MLPs of decoder layers: dense ones, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from inflight.layers.kernels import ExpertRouting, Experts, ExpertsShape, Linear, Residual, check_gate
from inflight.models.decoders.spec import EXPERTS_DOWN, EXPERTS_GATE_UP, Shard
from inflight.models.decoders.sublayers import LayerBuilder, Mlp, norm_targets
from inflight.models.tensors import (
    ExpertBias,
    ExpertMatrix,
    Target,
    packed_rows,
    summed_columns,
    whole_rows,
    whole_tensor,
)


@dataclass(frozen=True, slots=True)
class DenseMlpSpec:
    """Implements `MlpSpec`: a gated MLP."""

    inner: int  # features
    activation: str
    bias: bool = False

    def step_values(self, hidden: int) -> int:  # noqa: ARG002
        return 3 * self.inner  # gate and up, and their product

    def num_parts(self, expert_parallel: bool) -> int:  # noqa: ARG002
        return self.inner

    def build(self, layer: LayerBuilder) -> Mlp:
        return DenseMlp(self, layer)


@dataclass(frozen=True, slots=True)
class ExpertsMlpSpec:
    """Implements `MlpSpec`: experts, a few of which each token uses, and a shared MLP that all tokens use."""

    inner: int  # features of one expert
    activation: str
    routing: ExpertRouting
    bias: bool = False
    limit: float = 0.0  # of the clamped activation
    shared_inner: int = 0  # 0: there is no shared MLP
    has_shared_gate: bool = False  # whether each token scales the shared MLP's output
    # Whether the router, the experts and the shared MLP have their own norms, before and after them.
    has_own_norms: bool = False

    def step_values(self, hidden: int) -> int:
        return max(3 * self.shared_inner, self.routing.top_k * (self.inner + hidden))

    def num_parts(self, expert_parallel: bool) -> int:
        parts = self.routing.num_experts if expert_parallel else self.inner
        return min(parts, self.shared_inner or parts)

    def build(self, layer: LayerBuilder) -> Mlp:
        return NormedExpertsMlp(self, layer) if self.has_own_norms else ExpertsMlp(self, layer)


class DenseMlp:
    """Implements `Mlp`: norm, gate and up in one product, activation, down."""

    def __init__(self, mlp: DenseMlpSpec, layer: LayerBuilder) -> None:
        check_gate(mlp.activation)
        spec, shard = layer.spec, layer.shard
        inner = len(shard.part(mlp.inner))
        self._spec = spec
        self._shard = shard
        self._mlp = mlp
        self.activation = mlp.activation
        self.gate_up = layer.linear("mlp.gate_up", spec.hidden_size, 2 * inner, mlp.bias)
        self.down = layer.output("mlp.down", inner, mlp.bias)
        self.in_norm, self.out_norm = layer.norms()

    def __call__(
        self,
        residual: Residual,
        next_norm: Tensor | None,
        padding_mask: Tensor | None = None,  # noqa: ARG002
    ) -> Residual:
        eps = self._spec.norm_eps
        inner = self.gate_up.gated(residual, eps, self.activation)
        return self.down.add_to(residual, inner, self.out_norm, eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        mlp, shard = self._mlp, self._shard
        return {
            **_dense_targets("mlp", self.gate_up, self.down, shard, mlp.inner, mlp.bias),
            **norm_targets(self._spec, "mlp", in_norm=self.in_norm, out_norm=self.out_norm),
        }


class ExpertsMlp:
    """Implements `Mlp`: a router, its experts, and possibly a dense MLP beside them that all tokens share.

    Tensor parallel ranks hold some features of each expert or, if the spec says so, some of the experts.
    """

    shared_part = "mlp.shared"  # the targets of the shared MLP begin with it

    def __init__(self, mlp: ExpertsMlpSpec, layer: LayerBuilder) -> None:
        spec, shard, hidden = layer.spec, layer.shard, layer.spec.hidden_size
        self._spec = spec
        self._kernels = layer.kernels
        self._shard = shard
        self._mlp = mlp
        experts = range(mlp.routing.num_experts)
        self._local_experts = shard.part(len(experts)) if spec.expert_parallel else experts
        self._inner = range(mlp.inner) if spec.expert_parallel else shard.part(mlp.inner)
        self.experts: Experts = layer.kernels.experts(
            ExpertsShape(
                hidden,
                len(self._inner),
                mlp.routing,
                layer.dtype,
                mlp.activation,
                mlp.bias,
                mlp.limit,
                self._local_experts,
                layer.scheme(*EXPERTS_GATE_UP),
                layer.scheme(EXPERTS_DOWN),
            ),
            shard.collective,
        )
        self.in_norm = layer.norm(True)
        self.shared_gate_up: Linear | None = None
        self.shared_down: Linear | None = None
        self.shared_gate: Linear | None = None
        if mlp.shared_inner:
            check_gate(mlp.activation)
            inner = len(shard.part(mlp.shared_inner))
            self.shared_gate_up = layer.linear(f"{self.shared_part}.gate_up", hidden, 2 * inner)
            self.shared_down = layer.linear(f"{self.shared_part}.down", inner, hidden)
        if mlp.has_shared_gate:
            self.shared_gate = layer.kernels.linear(hidden, 1, layer.dtype, False)

    def __call__(
        self, residual: Residual, next_norm: Tensor | None, padding_mask: Tensor | None = None
    ) -> Residual:
        eps = self._spec.norm_eps
        if self.shared_gate_up is None or self.shared_down is None:
            return self.experts.add_to(residual, eps, next_norm, padding_mask)
        inner = self.shared_gate_up.gated(residual, eps, self._mlp.activation)
        if self.shared_gate is not None:
            inner = self._kernels.sigmoid_gate(inner, self.shared_gate.normed(residual, eps))
        if self._shard.collective is not None:  # reduce both sums at once
            return self.experts.add_to(residual, eps, next_norm, padding_mask, self.shared_down(inner))
        residual = self.experts.add_to(residual, eps, None, padding_mask)
        return self.shared_down.add_to(residual, inner, None, eps, next_norm)

    def targets(self) -> Mapping[str, Target]:
        experts, has_bias = self.experts, self._mlp.routing.has_bias
        targets: dict[str, Target] = {"mlp.router": whole_rows(experts.router, has_bias)}
        if experts.correction is not None:
            targets["mlp.correction"] = whole_tensor(experts.correction, dummy=0.0)
        if experts.scales is not None:
            targets["mlp.expert_scales"] = whole_tensor(experts.scales, dummy=1.0)
        targets |= {f"mlp.experts.{name}": target for name, target in self._matrices().items()}
        if self.shared_gate_up is not None and self.shared_down is not None:
            shared = self.shared_gate_up, self.shared_down, self._shard, self._mlp.shared_inner, False
            targets |= _dense_targets(self.shared_part, *shared)
        if self.shared_gate is not None:
            targets["mlp.shared_gate"] = whole_rows(self.shared_gate, bias=False)
        return targets | norm_targets(self._spec, "mlp", in_norm=self.in_norm)

    def _matrices(self) -> dict[str, Target]:
        hidden, mlp, local_experts, inner = (
            self._spec.hidden_size,
            self._mlp,
            self._local_experts,
            self._inner,
        )
        count = mlp.routing.num_experts

        def up_to_inner(*parts: str) -> ExpertMatrix:
            return ExpertMatrix(
                self.experts, parts, count, mlp.inner, hidden, local_experts, inner, range(hidden)
            )

        gate_up = up_to_inner("gate", "up")
        down = ExpertMatrix(
            self.experts, ("down",), count, hidden, mlp.inner, local_experts, range(hidden), inner
        )
        matrices: dict[str, Target] = {
            "gate": up_to_inner("gate"),
            "up": up_to_inner("up"),
            "gate_up": gate_up,
            "gate_up.transposed": replace(gate_up, transposed=True),
            "gate_up.alternating": replace(gate_up, transposed=True, interleaved=True),
            "down": down,
            "down.transposed": replace(down, transposed=True),
        }
        if mlp.bias:
            # Where the ranks' products are summed, one of them adds the bias.
            adds_bias = self._spec.expert_parallel or self._shard.rank == 0
            matrices["gate_bias"] = ExpertBias(up_to_inner("gate"))
            matrices["up_bias"] = ExpertBias(up_to_inner("up"))
            matrices["gate_up_bias"] = ExpertBias(replace(gate_up, interleaved=True))
            matrices["down_bias"] = ExpertBias(
                replace(down, local_experts=local_experts if adds_bias else range(0))
            )
        return matrices


class NormedExpertsMlp(ExpertsMlp):
    """Implements `Mlp` as Gemma 4 has it: a router, its experts and a dense MLP, each of which reads the residual
    through its own norm. The sums of experts and dense MLP are normalised, added, and normalised again."""

    shared_part = "mlp"

    def __init__(self, mlp: ExpertsMlpSpec, layer: LayerBuilder) -> None:
        super().__init__(mlp, layer)
        hidden = layer.spec.hidden_size
        self._router_scale: float = hidden**-0.5
        self.router_norm, self.expert_norm, self.expert_out_norm, self.dense_out_norm, self.out_norm = (
            layer.empty(hidden) for _ in range(5)
        )

    def __call__(
        self, residual: Residual, next_norm: Tensor | None, padding_mask: Tensor | None = None
    ) -> Residual:
        kernels, eps, x = self._kernels, self._spec.norm_eps, residual.x
        assert self.shared_gate_up is not None
        assert self.shared_down is not None
        dense = self.shared_down(self.shared_gate_up.gated(residual, eps, self._mlp.activation))
        if self._shard.collective is not None:
            dense = self._shard.collective.sum(dense)
        routed = kernels.rms_norm(x, self.router_norm, eps) * self._router_scale
        chosen = self.experts.sum(kernels.rms_norm(x, self.expert_norm, eps), routed, padding_mask)
        both = kernels.add(
            kernels.rms_norm(dense, self.dense_out_norm, eps),
            kernels.rms_norm(chosen, self.expert_out_norm, eps),
        )
        return Residual(kernels.add(x, kernels.rms_norm(both, self.out_norm, eps)), next_norm)

    def targets(self) -> Mapping[str, Target]:
        norms = norm_targets(
            self._spec,
            "mlp",
            expert_norm=self.expert_norm,
            expert_out_norm=self.expert_out_norm,
            dense_out_norm=self.dense_out_norm,
            out_norm=self.out_norm,
        )
        return {**super().targets(), **norms, "mlp.router_norm": whole_tensor(self.router_norm, dummy=1.0)}


def _dense_targets(
    name: str, gate_up: Linear, down: Linear, shard: Shard, inner: int, bias: bool
) -> dict[str, Target]:
    part = shard.part(inner), inner
    return {
        **packed_rows(gate_up, f"{name}.gate_up", {"gate": part, "up": part}, bias),
        f"{name}.down": summed_columns(down, *part, bias, shard.rank == 0),
    }
