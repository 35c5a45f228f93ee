"""How a `config.json` describes the mixer of each layer: its attention, or its gated delta net.

A family has a function, made of the helpers at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from inflight.checkpoint.fields import Fields
from inflight.errors import ModelError
from inflight.layers.recurrent import DeltaNetShape
from inflight.layers.rotary import Rope
from inflight.models.decoders.attention import AttentionSpec, QKNorm
from inflight.models.decoders.delta_net import DeltaNetSpec
from inflight.models.decoders.spec import MixerSpec
from inflight.models.rope_config import read_rope

# (fields of the config, number of layers) -> the mixer of each layer
ReadMixers = Callable[[Fields, int], Sequence[MixerSpec]]

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

_MAX_STATE = 1 << 26  # values of a request's state in one layer


def llama(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    return [_attention(fields, **_biases(fields))] * num_layers


def mistral(fields: Fields, num_layers: int, **features: Any) -> list[AttentionSpec]:
    """Return attention without biases, with a window in all layers if the config has one."""
    kinds = [SLIDING if "sliding_window" in fields else FULL] * num_layers
    return _attentions(fields, kinds, **features)


def phi3(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    return mistral(fields, num_layers, partial_rotary=True)


def qwen2(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    return _attentions(fields, _late_windows(fields, num_layers), qkv_bias=True)


def qwen3(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    kinds = _late_windows(fields, num_layers)
    return _attentions(fields, kinds, qk_norm=QKNorm.HEAD, **_biases(fields))


def qwen3_moe(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    in_use = fields.boolean("use_sliding_window", False) and "sliding_window" in fields
    kind = SLIDING if in_use else FULL
    return [_attention(fields, kind, qk_norm=QKNorm.HEAD, **_biases(fields))] * num_layers


def qwen2_moe(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    """Return attention with a window in every other layer below `max_window_layers`."""
    kinds = _switched_windows(
        fields,
        num_layers,
        lambda index: index % 2 == 1 or index >= fields.integer("max_window_layers", least=0),
    )
    return _attentions(fields, kinds, qkv_bias=fields.boolean("qkv_bias", False))


def gemma2(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    softcap = fields.number("attn_logit_softcapping") if "attn_logit_softcapping" in fields else None
    return gemma3(fields, num_layers, qk_norm=QKNorm.NONE, softcap=softcap)


def gemma3(
    fields: Fields, num_layers: int, qk_norm: QKNorm = QKNorm.HEAD, softcap: float | None = None
) -> list[AttentionSpec]:
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    kinds = _window_pattern(fields, num_layers)
    return _attentions(fields, kinds, qk_norm=qk_norm, softcap=softcap, scale=scale, **_biases(fields))


def gemma4(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    """Return attention as in Gemma 3, but layers without a window, as the last one is, have heads of another size and
    possibly keys as values. The last layers may read the keys and values of earlier ones."""
    kinds = _window_pattern(fields, num_layers, is_last_full=True)
    wide, shared_values = _wide_heads(fields, kinds), fields.boolean("attention_k_eq_v", False)
    features = _biases(fields) | {"partial_rotary": True, "scale": 1.0}
    features |= {"qk_norm": QKNorm.HEAD, "value_norm": True}
    full = _attention(wide, FULL, values_are_keys=shared_values, **features)
    sliding = _attentions(fields, [kind for kind in kinds if kind == SLIDING], **features)
    mixers = [full if kind == FULL else sliding[0] for kind in kinds]
    first = num_layers - num_sharing(fields, num_layers)
    sources = {kind: index for index, kind in enumerate(kinds[:first])}
    if missing := set(kinds[first:]) - set(sources):
        raise fields.error("num_kv_shared_layers", f"small enough to leave a layer with {min(missing)}")
    shared = (replace(mixers[sources[kind]], kv_source=sources[kind]) for kind in kinds[first:])
    return [*mixers[:first], *shared]


def olmo2(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    return [_attention(fields, qk_norm=QKNorm.WHOLE, **_biases(fields))] * num_layers


def olmo3(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    """Return attention as in OLMo 2, but with windows. `rope_scaling` does not apply to layers with one."""
    kinds = _window_pattern(fields, num_layers)
    return _attentions(fields, kinds, scaled_windows=False, qk_norm=QKNorm.WHOLE, **_biases(fields))


def smollm3(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    """Return attention in which some layers do not rotate queries and keys; these may have a window."""
    rotated = _rotated(fields, num_layers)
    kinds = _switched_windows(fields, num_layers, lambda index: rotated[index])
    mixers = _attentions(fields, kinds, **_biases(fields))
    return [
        mixer if is_rotated else replace(mixer, rope=None)
        for mixer, is_rotated in zip(mixers, rotated, strict=True)
    ]


def glm(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    qk_norm = QKNorm.HEAD if fields.boolean("use_qk_norm", False) else QKNorm.NONE
    bias = fields.boolean("attention_bias", False)
    return [_attention(fields, partial_rotary=True, qk_norm=qk_norm, qkv_bias=bias)] * num_layers


def granite(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    scale, output_scale = (fields.number(f"{name}_multiplier", 1.0) for name in ("attention", "residual"))
    return [_attention(fields, scale=scale, output_scale=output_scale)] * num_layers


def gpt_oss(fields: Fields, num_layers: int) -> list[AttentionSpec]:
    kinds = _window_pattern(fields, num_layers)
    return _attentions(fields, kinds, has_sinks=True, **_biases(fields))


def delta_net(fields: Fields, num_layers: int) -> list[MixerSpec]:
    """Return gated delta nets in all layers but every n-th (`full_attention_interval`)."""
    every = fields.integer("full_attention_interval", 4)
    kinds = _kinds(fields, num_layers, lambda index: (index + 1) % every == 0, LINEAR)
    attention = _attention(fields, partial_rotary=True, qk_norm=QKNorm.HEAD, has_gate=True, **_biases(fields))
    net = _delta_net(fields)
    return [net if kind == LINEAR else attention for kind in kinds]


def context_rope(mixers: Sequence[MixerSpec]) -> Rope | None:
    """Return the rotary embedding that decides how long a context may be: that of a layer that sees all of it."""
    rotated = [(mixer.rope, mixer.kv) for mixer in mixers if mixer.rope is not None]
    unlimited = [rope for rope, kv in rotated if kv is not None and kv.window is None]
    return next(iter(unlimited or [rope for rope, _ in rotated]), None)


def num_sharing(fields: Fields, num_layers: int) -> int:
    """Return how many layers, the last ones, read the keys and values of earlier layers."""
    count = fields.integer("num_kv_shared_layers", 0, least=0)
    if count >= num_layers:
        raise fields.error("num_kv_shared_layers", f"less than num_hidden_layers, {num_layers}")
    return count


# ---- kinds of layers ----


def _kinds(
    fields: Fields, num_layers: int, is_full: Callable[[int], bool], other: str = SLIDING
) -> list[str]:
    """Return the kind of each layer, FULL or another one, as the config lists them, or by the layer's index."""
    if "layer_types" not in fields:
        return [FULL if is_full(index) else other for index in range(num_layers)]
    kinds = fields.strings("layer_types")
    if len(kinds) != num_layers:
        raise ModelError(
            f"layer_types in config.json lists {len(kinds)} layers, num_hidden_layers is {num_layers}"
        )
    if unknown := set(kinds) - {FULL, other}:
        raise ModelError(
            f"layer_types in config.json has {sorted(unknown)}: it may contain {FULL} and {other}"
        )
    return kinds


def _with_windows(fields: Fields, kinds: list[str], in_use: bool = True) -> list[str]:
    """Return the kinds if the config has windows; without windows that are in use, FULL for each."""
    if SLIDING not in kinds or (in_use and "sliding_window" in fields):
        return kinds
    if "layer_types" in fields:
        raise ModelError(
            f"layer_types in config.json has {SLIDING}, but sliding_window is missing or disabled"
        )
    return [FULL] * len(kinds)


def _window_pattern(fields: Fields, num_layers: int, is_last_full: bool = False) -> list[str]:
    """Return kinds with a window in all layers but every n-th (`sliding_window_pattern`)."""
    kinds = _kinds(
        fields, num_layers, lambda index: (index + 1) % fields.integer("sliding_window_pattern") == 0
    )
    return _with_windows(fields, [*kinds[:-1], FULL] if is_last_full else kinds)


def _switched_windows(fields: Fields, num_layers: int, is_full: Callable[[int], bool]) -> list[str]:
    """Return kinds with windows that the config may switch off."""
    in_use = fields.boolean("use_sliding_window", False)
    return _with_windows(fields, _kinds(fields, num_layers, is_full), in_use)


def _late_windows(fields: Fields, num_layers: int) -> list[str]:
    """Return kinds with a window in the layers from `max_window_layers` on, unless it is switched off."""
    return _switched_windows(
        fields, num_layers, lambda index: index < fields.integer("max_window_layers", least=0)
    )


# ---- attention ----


def _attention(
    fields: Fields,
    kind: str = FULL,
    *,
    partial_rotary: bool = False,
    scaled_windows: bool = True,
    **features: Any,
) -> AttentionSpec:
    """Return attention with the heads that the config describes. `features` are fields of the spec."""
    num_heads, num_kv_heads, head_dim = _heads(fields)
    rope = read_rope(fields, kind, head_dim, partial_rotary, scaled_windows)
    window = fields.integer("sliding_window") if kind == SLIDING else None
    features = {"scale": head_dim**-0.5, **features}
    return AttentionSpec(num_heads, num_kv_heads, head_dim, rope=rope, window=window, **features)


def _attentions(fields: Fields, kinds: Sequence[str], **features: Any) -> list[AttentionSpec]:
    """Return the attention of layers of these kinds."""
    mixers = {kind: _attention(fields, kind, **features) for kind in dict.fromkeys(kinds)}
    return [mixers[kind] for kind in kinds]


def _biases(fields: Fields) -> dict[str, Any]:
    bias = fields.boolean("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


def _heads(fields: Fields) -> tuple[int, int, int]:
    """(query heads, key/value heads, features of a head)"""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    if "head_dim" not in fields and hidden_size % num_heads:
        raise fields.error(
            "num_attention_heads", f"a divisor of hidden_size, {hidden_size}, as head_dim is not given"
        )
    return num_heads, num_kv_heads, fields.integer("head_dim", hidden_size // num_heads)


def _wide_heads(fields: Fields, kinds: Sequence[str]) -> Fields:
    """Return the fields with the heads of layers without a window. New configs list the fields that differ in each of
    these layers, older ones have fields of their own."""
    names = {"head_dim": "global_head_dim"}
    if fields.boolean("attention_k_eq_v", False):
        names["num_key_value_heads"] = "num_global_key_value_heads"
    if "per_layer_config" not in fields:
        own = {name: fields.values[other] for name, other in names.items() if other in fields}
        return Fields({**fields.values, **own}, fields.where)
    listed = fields.part("per_layer_config")
    wide = {str(index) for index, kind in enumerate(kinds) if kind == FULL}
    change = listed.part(min(listed.values)).values if listed.values else {}
    if listed.values and (set(listed.values) != wide or any(own != change for own in listed.values.values())):
        raise fields.error(
            "per_layer_config", f"the same object for each layer with {FULL}, and for no other"
        )
    if not set(change) <= {"head_dim", "num_key_value_heads"}:
        raise fields.error("per_layer_config", "objects with head_dim and num_key_value_heads")
    return Fields({**fields.values, **change}, fields.where)


def _delta_net(fields: Fields) -> DeltaNetSpec:
    num_key_heads = fields.integer("linear_num_key_heads")
    num_value_heads = fields.integer("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {num_key_heads}")
    shape = DeltaNetShape(
        num_key_heads,
        num_value_heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim", least=2),
    )
    if shape.state_size > _MAX_STATE:
        raise ModelError(
            f"the delta nets in {fields.where} have {shape.state_size} values per state: at most {_MAX_STATE} are "
            "supported"
        )
    return DeltaNetSpec(shape)


def _rotated(fields: Fields, num_layers: int) -> list[bool]:
    """Return whether each layer rotates queries and keys. In the config, 0 stands for a layer that does not."""
    if "no_rope_layers" not in fields:
        every = fields.integer("no_rope_layer_interval", 4)
        return [(index + 1) % every != 0 for index in range(num_layers)]
    listed = fields.integers("no_rope_layers")
    if len(listed) < num_layers:
        raise fields.error("no_rope_layers", f"a list of {num_layers} numbers, one for each layer")
    return [bool(number) for number in listed[:num_layers]]
