"""How a `config.json` describes the mixer of each layer: its attention, or its gated delta net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from inflight.errors import ModelError
from inflight.layers.recurrent import DeltaNetShape
from inflight.layers.rotary import Rope
from inflight.models.decoders.spec import AttentionSpec, DeltaNetSpec, MixerSpec, QKNorm
from inflight.models.hf_config import Fields, read_rope

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

# Layers with windows: none, all, those from `max_window_layers` on, all but every n-th (`sliding_window_pattern`), all
# if `use_sliding_window` is set, every other one below `max_window_layers`, or those that are not rotated.
Windows = Literal["none", "all", "late", "pattern", "switched", "even", "unrotated"]

_MAX_STATE = 1 << 26  # values of a request's state in one layer


@dataclass(frozen=True, slots=True)
class MixerFields:
    """The properties of a family's mixers. A bias is fixed, or the name of the config field that decides."""

    windows: Windows = "none"
    delta_nets: bool = False  # all layers but every n-th (`full_attention_interval`)
    qk_norm: QKNorm = QKNorm.NONE
    qk_norm_field: str | None = None  # the field that switches these norms on; None: they are always on
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    scale_field: str | None = None  # a field with the factor of the scores; None: head_dim**-0.5
    divisor_field: str | None = None  # or one with the square of their divisor
    softcap_field: str | None = None  # the limit of scores
    fixed_scale: float | None = None  # or the factor itself
    has_sinks: bool = False
    has_gate: bool = False
    value_norm: bool = False
    shared_values_field: str | None = (
        None  # the field that makes values of layers without a window their keys
    )
    wide_heads: bool = False  # whether layers without a window have heads of another size
    partial_rotary: bool = False
    shares_kv: bool = (
        False  # whether the last `num_kv_shared_layers` read the keys and values of earlier ones
    )
    full_at_end: bool = False  # whether the last layer never has a window
    scaled_windows: bool = True  # whether `rope_scaling` also applies to layers with a window
    unrotated: bool = False  # whether `no_rope_layers` lists layers that are not rotated

    def read(self, fields: Fields, num_layers: int) -> tuple[MixerSpec, ...]:
        """Return the mixer of each layer."""
        kinds = self.layer_types(fields, num_layers)
        wide = _wide_heads(fields, kinds) if self.wide_heads else fields
        mixers = {kind: self._mixer(wide if kind == FULL else fields, kind) for kind in set(kinds)}
        rotated = _rotated(fields, num_layers) if self.unrotated else [True] * num_layers
        each = tuple(
            mixers[kind] if is_rotated else _without_rope(mixers[kind])
            for kind, is_rotated in zip(kinds, rotated, strict=True)
        )
        return _with_shared_kv(fields, kinds, each) if self.shares_kv else each

    def _mixer(self, fields: Fields, kind: str) -> MixerSpec:
        if kind == LINEAR:
            return _delta_net(fields)
        num_heads, num_kv_heads, head_dim = _heads(fields)
        is_normed = self.qk_norm_field is None or fields.boolean(self.qk_norm_field, False)
        cap, shared = self.softcap_field, self.shared_values_field
        return AttentionSpec(
            num_heads,
            num_kv_heads,
            head_dim,
            scale=self._scale(fields, head_dim),
            rope=read_rope(fields, kind, head_dim, self.partial_rotary, self.scaled_windows),
            window=fields.integer("sliding_window") if kind == SLIDING else None,
            qk_norm=self.qk_norm if is_normed else QKNorm.NONE,
            qkv_bias=read_bias(fields, self.qkv_bias),
            output_bias=read_bias(fields, self.output_bias),
            has_sinks=self.has_sinks,
            softcap=None if cap is None or cap not in fields else fields.number(cap),
            has_gate=self.has_gate,
            value_norm=self.value_norm,
            values_are_keys=shared is not None and kind == FULL and fields.boolean(shared, False),
        )

    def _scale(self, fields: Fields, head_dim: int) -> float:
        if self.fixed_scale is not None:
            return self.fixed_scale
        if self.scale_field is not None:
            return fields.number(self.scale_field, 1.0)
        divisor = head_dim if self.divisor_field is None else fields.number(self.divisor_field)
        scale: float = divisor**-0.5
        return scale

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        """Return the kind of each layer."""
        may_list = self.delta_nets or self.windows in ("late", "even", "pattern", "unrotated")
        listed = may_list and "layer_types" in fields
        kinds = self._listed(fields, num_layers) if listed else self._usual_types(fields, num_layers)
        if self.full_at_end:
            kinds = [*kinds[:-1], FULL]
        switched = self.windows in ("late", "even", "switched", "unrotated")
        in_use = not switched or fields.boolean("use_sliding_window", False)
        if SLIDING not in kinds or (in_use and "sliding_window" in fields):
            return kinds
        if listed:
            raise ModelError(
                f"layer_types in config.json has {SLIDING}, but sliding_window is missing or disabled"
            )
        return [FULL] * num_layers

    def _listed(self, fields: Fields, num_layers: int) -> list[str]:
        kinds = fields.strings("layer_types")
        if len(kinds) != num_layers:
            raise ModelError(
                f"layer_types in config.json lists {len(kinds)} layers, num_hidden_layers is {num_layers}"
            )
        known = (FULL, LINEAR) if self.delta_nets else (FULL, SLIDING)
        if unknown := set(kinds) - set(known):
            raise ModelError(
                f"layer_types in config.json has {sorted(unknown)}: it may contain {' and '.join(known)}"
            )
        return kinds

    def _usual_types(self, fields: Fields, num_layers: int) -> list[str]:
        """Return the kinds of layers of a config that does not list them."""
        layers = range(num_layers)
        if self.delta_nets:
            every = fields.integer("full_attention_interval", 4)
            return [LINEAR if (index + 1) % every else FULL for index in layers]
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
            case "unrotated":
                return [FULL if is_rotated else SLIDING for is_rotated in _rotated(fields, num_layers)]
            case "none":
                return [FULL] * num_layers
            case _:
                return [SLIDING] * num_layers


PLAIN_ATTENTION = MixerFields()


def context_rope(mixers: Sequence[MixerSpec]) -> Rope | None:
    """Return the rotary embedding that decides how long a context may be: that of a layer that sees all of it."""
    rotated = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec) and mixer.rope is not None]
    unlimited = [layer.rope for layer in rotated if layer.window is None]
    return next(iter(unlimited or [layer.rope for layer in rotated]), None)


def read_bias(fields: Fields, bias: bool | str) -> bool:
    """Return whether there is a bias: `bias`, or the config field with that name."""
    return fields.boolean(bias, False) if isinstance(bias, str) else bias


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


def num_sharing(fields: Fields, num_layers: int) -> int:
    """Return how many layers, the last ones, read the keys and values of earlier layers."""
    count = fields.integer("num_kv_shared_layers", 0, least=0)
    if count >= num_layers:
        raise fields.error("num_kv_shared_layers", f"less than num_hidden_layers, {num_layers}")
    return count


def _with_shared_kv(
    fields: Fields, kinds: Sequence[str], mixers: tuple[MixerSpec, ...]
) -> tuple[MixerSpec, ...]:
    """Let the last layers read the keys and values of the last layer of their kind before them."""
    first = len(kinds) - num_sharing(fields, len(kinds))
    sources = {kind: index for index, kind in enumerate(kinds[:first])}
    if missing := set(kinds[first:]) - set(sources):
        raise fields.error("num_kv_shared_layers", f"small enough to leave a layer with {min(missing)}")
    shared = [
        replace(mixer, kv_source=sources[kind]) if isinstance(mixer, AttentionSpec) else mixer
        for kind, mixer in zip(kinds[first:], mixers[first:], strict=True)
    ]
    return (*mixers[:first], *shared)


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


def _without_rope(mixer: MixerSpec) -> MixerSpec:
    return replace(mixer, rope=None) if isinstance(mixer, AttentionSpec) else mixer
