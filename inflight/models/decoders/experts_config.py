"""How a `config.json` describes the MLPs of models with experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from inflight.checkpoint.fields import Fields
from inflight.layers.kernels import CLAMPED_SILU, ExpertRouting
from inflight.models.decoders.mixer_config import num_sharing
from inflight.models.decoders.mlps import DenseMlpSpec, ExpertsMlpSpec
from inflight.models.decoders.spec import MlpSpec

# (fields of the config, number of layers, activation) -> the MLP of each layer
ReadMlps = Callable[[Fields, int, str], Iterator[MlpSpec]]

_NUM_EXPERTS = ("num_experts", "num_local_experts")


def qwen3(fields: Fields, num_layers: int, activation: str) -> Iterator[MlpSpec]:
    """Yield the MLPs of Qwen3-MoE. Some layers may be dense."""
    num_experts = fields.same_integer(*_NUM_EXPERTS, least=0)
    dense_layers = set(fields.integers("mlp_only_layers"))
    step = fields.integer("decoder_sparse_step", 1)
    for index in range(num_layers):
        if not num_experts or index in dense_layers or (index + 1) % step:
            yield DenseMlpSpec(fields.integer("intermediate_size"), activation)
        else:
            inner = fields.integer("moe_intermediate_size")
            yield ExpertsMlpSpec(inner, activation, _softmax_routing(fields, num_experts))


def qwen2(fields: Fields, num_layers: int, activation: str) -> Iterator[MlpSpec]:
    """Yield the MLPs of Qwen2-MoE, which have a shared MLP with a gate."""
    for mlp in qwen3(fields, num_layers, activation):
        if isinstance(mlp, ExpertsMlpSpec):
            shared = fields.integer("shared_expert_intermediate_size")
            yield replace(mlp, shared_inner=shared, has_shared_gate=True)
        else:
            yield mlp


def olmoe(fields: Fields, num_layers: int, activation: str) -> Iterator[MlpSpec]:
    routing = _softmax_routing(fields, fields.same_integer(*_NUM_EXPERTS))
    for _ in range(num_layers):
        yield ExpertsMlpSpec(fields.integer("intermediate_size"), activation, routing)


def mixtral(fields: Fields, num_layers: int, activation: str) -> Iterator[MlpSpec]:
    num_experts = fields.same_integer(*_NUM_EXPERTS)
    routing = _routing(fields, num_experts, "softmax", normalise=True)
    for _ in range(num_layers):
        yield ExpertsMlpSpec(fields.integer("intermediate_size"), activation, routing)


def glm(fields: Fields, num_layers: int, activation: str) -> Iterator[MlpSpec]:
    """Yield the MLPs of GLM-4.5. The first layers are dense, the others have shared experts."""
    num_experts = fields.same_integer("n_routed_experts", *_NUM_EXPERTS)
    inner = fields.integer("moe_intermediate_size")
    routing = _routing(
        fields,
        num_experts,
        "sigmoid",
        normalise=fields.boolean("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        has_correction=True,
    )
    shared = inner * fields.integer("n_shared_experts", 1, least=0)
    for index in range(num_layers):
        if index < fields.integer("first_k_dense_replace", 1, least=0):
            yield DenseMlpSpec(fields.integer("intermediate_size"), activation)
        else:
            yield ExpertsMlpSpec(inner, activation, routing, shared_inner=shared)


def gemma4(fields: Fields, num_layers: int, activation: str) -> Iterator[MlpSpec]:
    """Yield the MLPs of Gemma 4, which may have experts beside them. Layers that share keys and values may have wider
    ones."""
    first = num_layers - num_sharing(fields, num_layers)
    is_wider = fields.boolean("use_double_wide_mlp", False)
    routing: ExpertRouting | None = None
    if fields.boolean("enable_moe_block", False):
        count = fields.integer("num_experts")
        routing = _routing(
            fields, count, "softmax", normalise=True, has_scales=True, top_k_field="top_k_experts"
        )
    for index in range(num_layers):
        inner = fields.integer("intermediate_size") * (2 if is_wider and index >= first else 1)
        if routing is None:
            yield DenseMlpSpec(inner, activation)
        else:
            own = fields.integer("moe_intermediate_size")
            yield ExpertsMlpSpec(own, activation, routing, shared_inner=inner, has_own_norms=True)


def granite(fields: Fields, num_layers: int, activation: str) -> Iterator[MlpSpec]:
    """Yield the MLPs of Granite, whose output is scaled."""
    num_experts = fields.same_integer(*_NUM_EXPERTS)
    routing = _routing(fields, num_experts, "chosen", scale=fields.number("residual_multiplier", 1.0))
    for _ in range(num_layers):
        yield ExpertsMlpSpec(fields.integer("intermediate_size"), activation, routing)


def gpt_oss(fields: Fields, num_layers: int, activation: str) -> Iterator[MlpSpec]:  # noqa: ARG001
    """Yield the MLPs of gpt-oss, whose gates are clamped."""
    routing = _routing(fields, fields.same_integer(*_NUM_EXPERTS), "chosen", has_bias=True)
    inner, limit = fields.integer("intermediate_size"), fields.number("swiglu_limit", 7.0)
    for _ in range(num_layers):
        yield ExpertsMlpSpec(inner, CLAMPED_SILU, routing, bias=True, limit=limit)


def _softmax_routing(fields: Fields, num_experts: int) -> ExpertRouting:
    return _routing(fields, num_experts, "softmax", normalise=fields.boolean("norm_topk_prob", False))


def _routing(
    fields: Fields,
    num_experts: int,
    scores: Literal["softmax", "sigmoid", "chosen"],
    *,
    num_groups: int = 1,
    top_groups: int = 1,
    top_k_field: str = "num_experts_per_tok",
    **features: Any,
) -> ExpertRouting:
    """Return the routing that the config describes. `features` are further fields of it."""
    top_k = fields.integer(top_k_field)
    if top_k > num_experts:
        raise fields.error(top_k_field, f"at most the number of experts, {num_experts}")
    group_size = num_experts // num_groups
    if num_experts % num_groups or (num_groups > 1 and group_size < 2):
        raise fields.error(
            "n_group", f"a divisor of the number of experts, {num_experts}, with groups of at least 2"
        )
    if top_groups > num_groups or top_groups * group_size < top_k:
        raise fields.error(
            "topk_group", f"at most n_group, {num_groups}, and leave {top_k} experts to choose from"
        )
    features |= {"num_groups": num_groups, "top_groups": top_groups}
    return ExpertRouting(num_experts, top_k, scores, **features)
