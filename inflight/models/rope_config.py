"""The rotary embedding that a `config.json` describes, and the context that it allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from inflight.checkpoint.fields import Fields
from inflight.errors import ModelError
from inflight.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)

MAX_CONTEXT, MAX_DEFAULT_CONTEXT = 1 << 24, 1 << 20  # tokens


def read_rope(
    config: Fields, layer_type: str, head_dim: int, partial: bool, scaled_windows: bool = True
) -> Rope:
    """Return the rotary embedding of layers of `layer_type`. `partial`: the family may rotate only part of a head.
    `scaled_windows`: `rope_scaling` also applies to layers with a window."""
    rope = _parameters(config, layer_type, scaled_windows)
    rope_type = rope.string("rope_type", rope.string("type", "default"))
    share = rope.number("partial_rotary_factor", 1.0)
    if share > 1 or (share != 1 and not partial):
        raise rope.error("partial_rotary_factor", "at most 1" if partial else "1 for this architecture")
    rotary_dim = head_dim if rope_type == "proportional" else int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(
            f"head_dim {head_dim} with partial_rotary_factor {share:g} leaves {rotary_dim} rotary features: "
            "they must be an even number of at least 2"
        )
    scaling = _scaling(rope_type, rope, config, rotary_dim)
    return Rope(rope.number("rope_theta", above=1.0), rotary_dim, scaling)


def default_context(rope: Rope | None, max_position: int) -> tuple[int, int]:
    """Return (the longest context that the checkpoint supports, the context to serve by default).

    `max_position` is its `max_position_embeddings`. With YaRN it may be the trained length or the stretched one. With
    long and short factors, short prompts do best with the short ones, so a longer context is opt-in. So are more than
    a million tokens: position tables are allocated at start, and a config may claim anything.
    """
    match rope and rope.scaling:
        case YarnScaling(factor=factor, original_max_position=original):
            longest = min(max(max_position, int(original * factor)), MAX_CONTEXT)
            return longest, min(longest, MAX_DEFAULT_CONTEXT)
        case LongScaling(original_max_position=original):
            return max_position, min(original, max_position, MAX_DEFAULT_CONTEXT)
        case _:
            return max_position, min(max_position, MAX_DEFAULT_CONTEXT)


def _parameters(config: Fields, layer_type: str, scaled_windows: bool) -> Fields:
    """Return the parameters of one rotary embedding, whichever layout the config uses."""
    values: dict[str, Any] = {}
    where = config.where
    # Layers with their own base frequency are not scaled.
    scaled = layer_type != "sliding_attention" or (scaled_windows and "rope_local_base_freq" not in config)
    for key in ("rope_parameters", "rope_scaling"):
        if key not in config:
            continue
        part = config.part(key)
        nested = {name for name, value in part.values.items() if isinstance(value, Mapping)}
        if nested:
            if layer_type not in nested:
                raise ModelError(f"{part.where} has {', '.join(sorted(nested))} but no {layer_type!r}")
            part = part.part(layer_type)
        elif key == "rope_scaling" and not scaled:
            continue
        values.update(part.values)
        where = part.where
    theta_key = "rope_theta"
    if layer_type == "sliding_attention" and "rope_local_base_freq" in config:
        theta_key = "rope_local_base_freq"
    values.setdefault("rope_theta", config.values.get(theta_key))
    values.setdefault("partial_rotary_factor", config.values.get("partial_rotary_factor"))
    return Fields(values, where)


def _original(rope: Fields, config: Fields) -> int:
    """Return the trained context length. A top-level field takes precedence, as in Phi-3."""
    for fields in (config, rope):
        if "original_max_position_embeddings" in fields:
            return fields.integer("original_max_position_embeddings", least=2)
    return config.integer("max_position_embeddings", least=2)


def _scaling(rope_type: str, rope: Fields, config: Fields, rotary_dim: int) -> Scaling | None:
    match rope_type:
        case "default":
            return None
        case "linear":
            return LinearScaling(rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                raise rope.error("high_freq_factor", f"above low_freq_factor, {low:g}")
            return Llama3Scaling(rope.number("factor"), low, high, _original(rope, config))
        case "yarn":
            return _yarn(rope, config)
        case "longrope" | "su":  # the first Phi-3 checkpoints used the other name
            return _longrope(rope, config, rotary_dim)
        case "proportional":
            share = rope.number("partial_rotary_factor", 1.0)
            return ProportionalScaling(share, rope.number("factor", 1.0))
    raise rope.error("rope_type", "one of default, linear, llama3, yarn, longrope, proportional, su")


def _yarn(rope: Fields, config: Fields) -> YarnScaling:
    original = _original(rope, config)
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    if "attention_factor" in rope:
        magnitude = rope.number("attention_factor")
    elif rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        magnitude = _sharpening(factor, rope.number("mscale")) / _sharpening(
            factor, rope.number("mscale_all_dim")
        )
    else:
        magnitude = _sharpening(factor, 1.0)
    return YarnScaling(
        factor,
        original,
        magnitude,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.boolean("truncate", True),
    )


def _sharpening(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(rope: Fields, config: Fields, rotary_dim: int) -> LongScaling:
    original = _original(rope, config)
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(
        tuple(rope.numbers("short_factor", rotary_dim // 2)),
        tuple(rope.numbers("long_factor", rotary_dim // 2)),
        original,
        rope.number("attention_factor", default),
    )
