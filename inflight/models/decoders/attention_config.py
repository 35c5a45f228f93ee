"""How a `config.json` describes the attention of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inflight.errors import ModelError
from inflight.layers.rotary import Rope
from inflight.models.decoders.spec import AttentionSpec, QKNorm
from inflight.models.hf_config import Fields, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"

# Layers with windows: none, all, from the layer `max_window_layers` on, all but every n-th (`sliding_window_pattern`),
# all if `use_sliding_window` is set, or every other one below `max_window_layers`.
Windows = Literal["none", "all", "late", "pattern", "switched", "even"]


@dataclass(frozen=True, slots=True)
class AttentionFields:
    """The properties of a family's attention. A bias is fixed, or the name of the config field that decides."""

    windows: Windows = "none"
    qk_norm: QKNorm = QKNorm.NONE
    qk_norm_field: str | None = None  # the field that switches these norms on; None: they are always on
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    scale_field: str | None = None  # a field with the factor of the scores; None: head_dim**-0.5
    divisor_field: str | None = None  # or one with the square of their divisor
    partial_rotary: bool = False

    def read(self, fields: Fields, num_layers: int) -> tuple[AttentionSpec, ...]:
        """Return the attention of each layer."""
        kinds = self.layer_types(fields, num_layers)
        layers = {kind: self._layer(fields, kind) for kind in set(kinds)}
        return tuple(layers[kind] for kind in kinds)

    def _layer(self, fields: Fields, kind: str) -> AttentionSpec:
        num_heads, num_kv_heads, head_dim = _heads(fields)
        is_normed = self.qk_norm_field is None or fields.boolean(self.qk_norm_field, False)
        return AttentionSpec(
            num_heads,
            num_kv_heads,
            head_dim,
            scale=self._scale(fields, head_dim),
            rope=read_rope(fields, kind, head_dim, self.partial_rotary),
            window=fields.integer("sliding_window") if kind == SLIDING else None,
            qk_norm=self.qk_norm if is_normed else QKNorm.NONE,
            qkv_bias=read_bias(fields, self.qkv_bias),
            output_bias=read_bias(fields, self.output_bias),
        )

    def _scale(self, fields: Fields, head_dim: int) -> float:
        if self.scale_field is not None:
            return fields.number(self.scale_field, 1.0)
        divisor = head_dim if self.divisor_field is None else fields.number(self.divisor_field)
        scale: float = divisor**-0.5
        return scale

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        """Return the kind of each layer."""
        listed = self.windows in ("late", "even", "pattern") and "layer_types" in fields
        kinds = _listed(fields, num_layers) if listed else self._usual_types(fields, num_layers)
        switched = self.windows in ("late", "even", "switched")
        in_use = not switched or fields.boolean("use_sliding_window", False)
        if in_use and "sliding_window" in fields:
            return kinds
        if listed and SLIDING in kinds:
            raise ModelError(
                f"layer_types in config.json has {SLIDING}, but sliding_window is missing or disabled"
            )
        return [FULL] * num_layers

    def _usual_types(self, fields: Fields, num_layers: int) -> list[str]:
        """Return the kinds of layers of a config that does not list them."""
        layers = range(num_layers)
        match self.windows:
            case "pattern":
                every = fields.integer("sliding_window_pattern")
                return [SLIDING if (index + 1) % every else FULL for index in layers]
            case "even":
                end = fields.integer("max_window_layers", least=0)
                return [FULL if index % 2 or index >= end else SLIDING for index in layers]
            case "late":
                first = fields.integer("max_window_layers", least=0)
                return [SLIDING if index >= first else FULL for index in layers]
            case "none":
                return [FULL] * num_layers
            case _:
                return [SLIDING] * num_layers


PLAIN_ATTENTION = AttentionFields()


def context_rope(layers: tuple[AttentionSpec, ...]) -> Rope | None:
    """Return the rotary embedding that decides how long a context may be: that of a layer that sees all of it."""
    rotated = [layer for layer in layers if layer.rope is not None]
    unlimited = [layer.rope for layer in rotated if layer.window is None]
    return next(iter(unlimited or [layer.rope for layer in rotated]), None)


def read_bias(fields: Fields, bias: bool | str) -> bool:
    """Return whether there is a bias: `bias`, or the config field with that name."""
    return fields.boolean(bias, False) if isinstance(bias, str) else bias


def _listed(fields: Fields, num_layers: int) -> list[str]:
    kinds = fields.strings("layer_types")
    if len(kinds) != num_layers:
        raise ModelError(
            f"layer_types in config.json lists {len(kinds)} layers, num_hidden_layers is {num_layers}"
        )
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ModelError(
            f"layer_types in config.json has {sorted(unknown)}: it may contain {FULL} and {SLIDING}"
        )
    return kinds


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
