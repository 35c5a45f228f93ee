"""Which modules of a checkpoint are quantized, and how: the `quantization_config` of a `config.json`.

Modules have the names that the checkpoint gives them, such as "model.layers.0.self_attn.q_proj". A checkpoint without
such a config has the null object `UNQUANTIZED`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from inflight.checkpoint.fields import Fields
from inflight.errors import ModelError, shown
from inflight.layers.formats.gguf import block_format
from inflight.layers.formats.packed import AwqFormat, GptqFormat, PackQuantizedFormat
from inflight.layers.formats.schemes import GroupScheme, Scheme
from inflight.layers.formats.weight_format import (
    FLOATS,
    PLAIN,
    Mxfp4Format,
    QuantizingFormat,
    ScaledFormat,
    WeightFormat,
)
from inflight.models.module_names import Matches, ModuleNames
from inflight.models.tensors import StoredTensor

# Tensors of quantized checkpoints that are not needed: fixed scales of inputs (see `ScaledFormat`), shapes that the
# config implies, and scales of KV caches.
_UNUSED = (
    r"\.((input|output)_(scale|zero_point)|activation_scale)$",
    r"\.weight_shape$",
    r"\.(q|k|v|kv|prob)_scale$",
)
MAX_GROUP = 1 << 16
_EXPERT = re.compile(r"\.experts\.(\d{1,4})\.")


class Quantization(ABC):
    """The weight format of every module."""

    ignored: tuple[str, ...] = _UNUSED  # patterns of tensors that are not needed
    embeddings: bool = False  # whether embeddings have a format, too
    method: str | None = None  # as the checkpoint's config names it

    @abstractmethod
    def format_of(self, *modules: str) -> WeightFormat:
        """Return the format of a linear layer that goes by any of these names. "{}" in them stands for any expert."""

    def may_have(self, *modules: str) -> bool:  # noqa: ARG002
        """Return whether the checkpoint may have a module by any of these names."""
        return True

    def plain_experts(self, *modules: str) -> frozenset[int]:  # noqa: ARG002
        """Return the experts whose matrices are plain although those of others are not. "{}" stands for their number in
        the names."""
        return frozenset()

    def as_stored(self, stored: Mapping[str, StoredTensor]) -> Quantization:  # noqa: ARG002
        """Return the same with what the tensors in the checkpoint's files decide."""
        return self


class Unquantized(Quantization):
    """The null object: every module is plain."""

    ignored = ()

    def format_of(self, *modules: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN


UNQUANTIZED = Unquantized()


# What `--quantization` can do while loading.
ON_LOADING: Mapping[str, GroupScheme] = {
    "fp8": GroupScheme("fp8", inputs="fp8"),
    "int8": GroupScheme("int8", inputs="int8"),
    "int4": GroupScheme("int4", 128, zeros=True),
}


@dataclass(frozen=True)
class QuantizedOnLoading(Quantization):
    """A plain checkpoint whose layers are quantized while it is loaded."""

    scheme: Scheme
    head: bool = False  # whether the LM head is, too
    ignored: tuple[str, ...] = ()

    def format_of(self, *modules: str) -> WeightFormat:
        return QuantizingFormat(self.scheme) if self.head or not any(map(_is_head, modules)) else PLAIN


@dataclass(frozen=True)
class GgufTypes(Quantization):
    """A GGUF file, in which each tensor has a type of its own."""

    types: Mapping[str, str] = field(hash=False)  # tensor -> type
    ignored: tuple[str, ...] = ()
    embeddings: bool = True
    method: str | None = "gguf"

    def format_of(self, *modules: str) -> WeightFormat:
        types = self._types_of(modules)
        return (block_format(types[0]) or PLAIN) if types else PLAIN

    def may_have(self, *modules: str) -> bool:
        return bool(self._types_of(modules))

    def _types_of(self, modules: Iterable[str]) -> list[str]:
        names = (name for module in modules for name in (module, f"{module}.weight"))
        return [self.types[name] for name in names if name in self.types]


Rule = tuple[Matches, WeightFormat]


@dataclass(frozen=True)
class Rules(Quantization):
    """The first rule that matches decides; modules that none matches are plain.

    Configs often do not name all modules that are plain, so the tensors in the files overrule them: a matrix of 16 or
    32 bits without a scale is plain.
    """

    rules: tuple[Rule, ...]
    method: str | None = None
    # Whether the LM head is plain by default. Where the files are known, they decide.
    plain_head: bool = False
    # Modules that the files hold as plain numbers, by their name; for those of experts, which has "{}" in place of the
    # expert's number, the experts.
    plain: Mapping[str, frozenset[int]] = field(default_factory=dict, hash=False)
    _formats: dict[tuple[str, ...], WeightFormat] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )

    def format_of(self, *modules: str) -> WeightFormat:
        if modules not in self._formats:
            self._formats[modules] = self._find_format(modules)
        return self._formats[modules]

    def _find_format(self, modules: Iterable[str]) -> WeightFormat:
        names = []
        for module in modules:
            experts = self.plain.get(module, frozenset())
            if module in self.plain and not experts:
                return PLAIN
            names.append(module.replace("{}", str(next(i for i in count() if i not in experts))))
        if self.plain_head and any(map(_is_head, names)):
            return PLAIN
        return next((weights for matches, weights in self.rules if any(map(matches, names))), PLAIN)

    def plain_experts(self, *modules: str) -> frozenset[int]:
        return frozenset().union(*(self.plain.get(module, ()) for module in modules))

    def as_stored(self, stored: Mapping[str, StoredTensor]) -> Quantization:
        plain: dict[str, set[int]] = {}
        for name, tensor in stored.items():
            has_scale = f"{name}_scale" in stored or f"{name}_scale_inv" in stored
            if tensor.dtype in FLOATS and len(tensor.shape) > 1 and not has_scale:
                module = name.removesuffix(".weight")
                experts = plain.setdefault(_EXPERT.sub(".experts.{}.", module), set())
                experts |= {int(number) for number in _EXPERT.findall(module)}
        decided = {name: frozenset(experts) for name, experts in plain.items()}
        ends = {name.rpartition(".")[2] for name in stored}
        rules = tuple((matches, _with_stored_scale(weights, ends)) for matches, weights in self.rules)
        return replace(self, rules=rules, plain_head=False, plain=decided)


def _with_stored_scale(weights: WeightFormat, names: Collection[str]) -> WeightFormat:
    """Return a format with the name of the scale that the files have: AutoFP8 and transformers name that of a whole
    matrix differently, and configs do not tell."""
    inverse = "weight_scale_inv"
    if isinstance(weights, ScaledFormat) and weights.scale not in names and inverse in names:
        return replace(weights, scale=inverse)
    return weights


def _always(module: str) -> bool:  # noqa: ARG001
    return True


def read_quantization(config: Fields) -> Quantization:
    """Return what a `config.json` says."""
    if "quantization_config" not in config:
        return UNQUANTIZED
    part = config.part("quantization_config")
    method = part.string("quant_method")
    if method not in _METHODS:
        raise part.error("quant_method", f"one of {', '.join(_METHODS)}")
    quantization = _METHODS[method](part)
    return replace(quantization, method=method) if isinstance(quantization, Rules) else quantization


# ---- the methods ----


def _fp8(config: Fields) -> Rules:
    config.check_supported({"fmt": (None, "e4m3"), "activation_scheme": ("dynamic", "static", None)})
    if "weight_block_size" in config:
        rows, columns = _block(config, "weight_block_size")
        scheme = GroupScheme("fp8", columns, inputs="fp8")
        exponents = config.values.get("scale_fmt") == "ue8m0"
        weights = ScaledFormat(scheme, rows, columns, "weight_scale_inv", exponents)
    else:
        weights = ScaledFormat(GroupScheme("fp8", inputs="fp8"), 0, 0)
    names = [*config.strings("modules_to_not_convert", []), *config.strings("ignored_layers", [])]
    excluded = ModuleNames(config.where).within(names)
    return Rules(((excluded, PLAIN), (_always, weights)), plain_head=True)


def _awq(config: Fields) -> Rules:
    config.check_supported({"version": (None, "gemm", "GEMM"), "zero_point": (None, True)})
    bits = config.integer("w_bit" if "w_bit" in config else "bits")
    if bits != 4:
        raise config.error("bits", "4")
    group = _group(config, "q_group_size" if "q_group_size" in config else "group_size")
    names = config.strings("modules_to_not_convert", [])
    excluded = ModuleNames(config.where).some(names, lambda module, name: name in module)
    return Rules(((excluded, PLAIN), (_always, AwqFormat(4, group, True))), plain_head=True)


def _gptq(config: Fields) -> Rules:
    weights = _gptq_format(config)
    names = ModuleNames(config.where)
    rules: list[Rule] = []
    dynamic = config.part("dynamic") if "dynamic" in config else Fields({})
    for key, value in dynamic.values.items():
        sign, colon, pattern = key.partition(":")
        if not colon or sign not in ("+", "-"):
            sign, pattern = "+", key
        matches = names.pattern(pattern)
        if sign == "-" or value is False:
            rules.append((matches, PLAIN))
        else:
            changes = value if isinstance(value, Mapping) else {}
            merged = Fields({**config.values, **changes}, f"{shown(key)} in {dynamic.where}")
            rules.append((matches, _gptq_format(merged)))
    if "modules_in_block_to_quantize" in config:
        quantized = _nested_strings(config, "modules_in_block_to_quantize")
        rules.append((names.some(quantized, lambda module, name: module.endswith(f".{name}")), weights))
    else:
        rules.append((_always, weights))
    return Rules(tuple(rules), plain_head=not config.boolean("lm_head", False))


def _gptq_format(config: Fields) -> WeightFormat:
    bits = config.integer("bits")
    if bits not in (4, 8):
        raise config.error("bits", "4 or 8")
    layout = config.string("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise config.error("checkpoint_format", "gptq or gptq_v2")
    return GptqFormat(
        bits,
        _group(config, "group_size"),
        zeros=not config.boolean("sym", True),
        ordered=not config.boolean("desc_act", False),
        zero_offset=1 if layout == "gptq" else 0,
    )


def _auto_round(config: Fields) -> Rules:
    packing = config.string("packing_format", "auto_round:auto_gptq")
    if packing not in ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq"):
        raise config.error("packing_format", "auto_round:auto_gptq")
    extra = config.part("extra_config") if "extra_config" in config else Fields({})
    for name in extra.values:
        if extra.part(name).integer("bits") not in (16, 32):
            raise ModelError(
                f"extra_config of {config.where} has other settings for {shown(name)}: only modules that are not "
                "quantized (16 or 32 bits) are supported"
            )
    rules = _gptq(config)
    return replace(rules, rules=((ModuleNames(config.where).exactly(extra.values), PLAIN), *rules.rules))


def _mxfp4(config: Fields) -> Rules:
    excluded = ModuleNames(config.where).within(config.strings("modules_to_not_convert", []))
    return Rules(((excluded, PLAIN), (lambda module: ".experts." in module, Mxfp4Format())))


# ---- compressed-tensors ----


def _compressed_tensors(config: Fields) -> Rules:
    sparsity = config.part("sparsity_config") if "sparsity_config" in config else Fields({})
    sparsity.check_supported({"format": (None, "dense")})
    names = ModuleNames(config.where)
    groups = config.part("config_groups")
    rules: list[Rule] = _target_rules(names, config.strings("ignore", []), PLAIN)
    by_class: list[Rule] = []
    for name in groups.values:
        group = groups.part(name)
        weights, targets = _group_format(group, config.string("format", "dense")), group.strings("targets")
        rules += _target_rules(names, targets, weights)
        if "Linear" in targets:
            by_class.append((_always, weights))
    return Rules((*rules, *by_class))


def _target_rules(names: ModuleNames, targets: list[str], weights: WeightFormat) -> list[Rule]:
    """Return rules for targets that are names or patterns of modules."""
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    return [(names.exactly(targets), weights), *((names.pattern(pattern), weights) for pattern in patterns)]


def _group_format(group: Fields, default: str) -> WeightFormat:
    layout = group.string("format", default)
    weights = group.part("weights")
    kind, bits = weights.string("type", "int"), weights.integer("num_bits")
    symmetric = weights.boolean("symmetric", True)
    inputs = _input_codes(group)
    if layout == "pack-quantized" and kind == "int" and bits in (4, 8):
        actorder = weights.values.get("actorder")
        if actorder not in (None, False, True, "group", "weight", "dynamic", "static"):
            raise weights.error("actorder", "group, weight or null")
        columns = _strategy_block(weights, "channel", "group")[1]
        # "static" and "weight" only change the order in which the columns were rounded.
        ordered = actorder not in (True, "group", "dynamic")
        return PackQuantizedFormat(bits, columns, not symmetric, ordered)
    if bits == 8 and symmetric and (layout, kind) in _EIGHT_BITS:
        codes: Literal["fp8", "int8"] = "fp8" if kind == "float" else "int8"
        rows, columns = _strategy_block(weights, "tensor", "channel", "group", "block")
        scheme = GroupScheme(codes, columns, inputs=inputs if inputs == codes else None)
        return ScaledFormat(scheme, rows, columns)
    raise ModelError(
        f"{weights.where} stores {bits}-bit {kind}{'' if symmetric else ' asymmetric'} weights as {layout}: "
        "supported are 8-bit symmetric ones as float-quantized, int-quantized or naive-quantized, and 4- and 8-bit "
        "int ones as pack-quantized"
    )


_EIGHT_BITS = {
    ("float-quantized", "float"),
    ("naive-quantized", "float"),
    ("int-quantized", "int"),
    ("naive-quantized", "int"),
}


def _input_codes(group: Fields) -> Literal["fp8", "int8"] | None:
    if "input_activations" not in group:
        return None
    inputs = group.part("input_activations")
    kind, bits = inputs.string("type", "int"), inputs.integer("num_bits")
    if bits != 8 or kind not in ("int", "float"):
        raise ModelError(
            f"{inputs.where} quantizes inputs to {bits}-bit {kind}: it must be 8-bit int or float"
        )
    return "fp8" if kind == "float" else "int8"


def _strategy_block(weights: Fields, *supported: str) -> tuple[int, int]:
    """Return the rows and columns that share a scale; 0: all."""
    group = weights.values.get("group_size")
    default = "group" if isinstance(group, int) and group > 0 else "channel" if group == -1 else "tensor"
    strategy = weights.string("strategy", default)
    if strategy not in supported:
        raise weights.error("strategy", f"one of {', '.join(supported)}")
    if strategy == "block":
        return _block(weights, "block_structure")
    if strategy == "group":
        return 1, _group(weights, "group_size")
    return (1, 0) if strategy == "channel" else (0, 0)


# ---- fields ----


def _block(config: Fields, name: str) -> tuple[int, int]:
    value = config.integers(name)
    if len(value) != 2 or not all(0 < size <= MAX_GROUP for size in value):
        raise config.error(name, f"a list of two integers from 1 to {MAX_GROUP}")
    return value[0], value[1]


def _group(config: Fields, name: str) -> int:
    """Return the columns of a group; 0: all, which configs write as -1."""
    if config.values.get(name) == -1:
        return 0
    size = config.integer(name)
    if size % 8 or size > MAX_GROUP:
        raise config.error(name, f"-1, or a multiple of 8 up to {MAX_GROUP}")
    return size


def _nested_strings(config: Fields, name: str) -> list[str]:
    """Return the strings of a list of lists."""
    value = config.values.get(name)
    inner = (
        [item for part in value if isinstance(part, list) for item in part] if isinstance(value, list) else []
    )
    if not inner or not all(isinstance(item, str) for item in inner):
        raise config.error(name, "a list of lists of module names")
    return inner


def _is_head(module: str) -> bool:
    return module.split(".")[-1] == "lm_head"


def _gguf(config: Fields) -> Quantization:
    """Read the types that `checkpoint/gguf_config.py` lists."""
    types = config.part("types").values
    if not all(isinstance(name, str) for name in types.values()):
        raise config.error("types", "names of types")
    return GgufTypes(types)


_METHODS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
}
