"""Typed reading of Hugging Face config files, and of the rotary embedding that a `config.json` describes.

Errors name the field that is missing or has the wrong type.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from inflight.errors import ModelError, shown
from inflight.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)

_MOST = {
    "num_hidden_layers": 4096,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4096),
}
_MOST_OTHERWISE = 1 << 24
_MOST_FLOAT = sys.float_info.max  # an integer of JSON may be larger


class Fields:
    """A JSON object and the name of its file for error messages. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer, bounded so that a bogus config cannot exhaust memory."""
        value = self._get(name, default)
        most = _MOST.get(name, _MOST_OTHERWISE)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, above: float = 0.0) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= _MOST_FLOAT:
            raise self.error(name, f"a finite number above {above:g}")
        return float(value)

    def same_integer(self, *names: str, least: int = 1) -> int:
        """Return the integer that configs hold under one of several names."""
        present = [name for name in names if name in self]
        values = {name: self.integer(name, least=least) for name in present or names[:1]}
        if len(set(values.values())) > 1:
            raise self.error(present[1], f"equal to {present[0]}, {values[present[0]]}")
        return next(iter(values.values()))

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def string(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self._get(name, None)
        numeric = isinstance(value, list) and all(
            isinstance(item, int | float) and not isinstance(item, bool) and 0 < item <= _MOST_FLOAT
            for item in value
        )
        if not numeric or len(value) != length:
            raise self.error(name, f"a list of {length} positive numbers")
        return tuple(float(item) for item in value)

    def integers(self, name: str) -> list[int]:
        """Return a list of integers, empty if it is missing."""
        value = self._get(name, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(name, "a list of integers")
        return value

    def strings(self, name: str) -> list[str]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of strings")
        return value

    def part(self, name: str) -> Fields:
        value = self._get(name, None)
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return Fields(value, f"{name} of {self.where}")

    def check_supported(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise unless each field in `fixed` has one of its supported values."""
        for name, allowed in fixed.items():
            if self.values.get(name) not in allowed:
                raise self.error(
                    name, " or ".join("null" if value is None else repr(value) for value in allowed)
                )

    def error(self, name: str, allowed: str) -> ModelError:
        return ModelError(f"{name} in {self.where} is {shown(self.values.get(name))}: it must be {allowed}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} has no {name!r}, which is required")
        return value


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
    try:
        reader = _SCALINGS[rope_type]
    except KeyError:
        raise rope.error("rope_type", f"one of {', '.join(_SCALINGS)}") from None
    return Rope(rope.number("rope_theta", above=1.0), rotary_dim, reader(rope, config, rotary_dim))


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


def _linear(rope: Fields, config: Fields, rotary_dim: int) -> Scaling:  # noqa: ARG001
    return LinearScaling(rope.number("factor"))


def _llama3(rope: Fields, config: Fields, rotary_dim: int) -> Scaling:  # noqa: ARG001
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.error("high_freq_factor", f"above low_freq_factor, {low:g}")
    return Llama3Scaling(rope.number("factor"), low, high, _original(rope, config))


def _yarn(rope: Fields, config: Fields, rotary_dim: int) -> Scaling:  # noqa: ARG001
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


def _longrope(rope: Fields, config: Fields, rotary_dim: int) -> Scaling:
    original = _original(rope, config)
    factor = rope.number("factor", config.integer("max_position_embeddings") / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(
        rope.numbers("short_factor", rotary_dim // 2),
        rope.numbers("long_factor", rotary_dim // 2),
        original,
        rope.number("attention_factor", default),
    )


def _proportional(rope: Fields, config: Fields, rotary_dim: int) -> Scaling:  # noqa: ARG001
    return ProportionalScaling(rope.number("partial_rotary_factor", 1.0), rope.number("factor", 1.0))


def _unscaled(rope: Fields, config: Fields, rotary_dim: int) -> None:  # noqa: ARG001
    return None


_SCALINGS: Mapping[str, Callable[[Fields, Fields, int], Scaling | None]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "su": _longrope,  # the name that the first Phi-3 checkpoints used
}
