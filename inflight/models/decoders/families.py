"""The model families: how a Hugging Face `config.json` becomes a `DecoderSpec`.

A family is an entry of `FAMILIES`: the names of its tensors, and functions that read its mixers and MLPs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from inflight.checkpoint.fields import Fields
from inflight.checkpoint.gguf_config import ARCHITECTURES, GGUF_FIELD
from inflight.errors import UnknownArchitectureError
from inflight.models.decoders import experts_config, mixer_config, weight_names
from inflight.models.decoders.gguf_names import gguf_predictor, with_gguf_names
from inflight.models.decoders.mlps import DenseMlpSpec
from inflight.models.decoders.predictor import MtpNames, MtpSpec
from inflight.models.decoders.spec import (
    DecoderSpec,
    LayerInputsSpec,
    MixerSpec,
    MlpSpec,
    NormPlacement,
    WeightNames,
)
from inflight.models.encoders.families import ENCODERS
from inflight.models.head_config import read_labels
from inflight.models.quantization import read_quantization
from inflight.models.rope_config import default_context

_MAX_EXTRA_LAYERS = 16
# How configs name the number of layers that predict further tokens.
_NUM_PREDICTORS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of a family."""

    names: WeightNames
    head: Literal["language", "classifier", "none"] = "language"
    mixers: mixer_config.ReadMixers = mixer_config.llama
    experts: experts_config.ReadMlps | None = None  # reads the MLPs of each layer; None: all are dense
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_offset: float = 0.0
    mlp_bias: str | None = None  # the config field that decides; None: MLPs have none
    activation_field: str = "hidden_act"
    scaled_embedding: bool = False
    multipliers: bool = False  # whether the config scales embeddings and logits
    layer_scales: bool = False
    layer_inputs: bool = False  # whether layers have their own inputs, if the config says so
    section: str | None = None  # the text model's part of a multimodal config
    # The names of the layer that predicts further tokens, by the number of other layers; None: it is not supported.
    predictor: Callable[[int], MtpNames] | None = None
    # Fields that configs may omit because transformers has a default.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Fields that would change the computation, with the values that are supported.
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_DEFAULTS = {"hidden_act": "silu", "rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN_DEFAULTS = _DEFAULTS | {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}
_GEMMA: dict[str, Any] = {
    "norm_placement": NormPlacement.BOTH,
    "norm_offset": 1.0,
    "activation_field": "hidden_activation",
    "scaled_embedding": True,
}
_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
_GEMMA3: dict[str, Any] = _GEMMA | {
    "mixers": mixer_config.gemma3,
    "defaults": _GEMMA_DEFAULTS
    | {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "fixed": {"attn_logit_softcapping": (None,), "use_bidirectional_attention": (None, False)},
}

_GEMMA4: dict[str, Any] = _GEMMA | {
    "mixers": mixer_config.gemma4,
    "experts": experts_config.gemma4,
    "norm_offset": 0.0,
    "layer_scales": True,
    "layer_inputs": True,
    "defaults": _GEMMA_DEFAULTS
    | {
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262_144,
        "max_position_embeddings": 131_072,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
    "fixed": {
        "use_bidirectional_attention": (None, "vision"),
    },
}

_CAUSAL: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(weight_names.LLAMA, mlp_bias="mlp_bias", defaults=_DEFAULTS),
    "MistralForCausalLM": Family(
        weight_names.LLAMA, mixers=mixer_config.mistral, defaults=_DEFAULTS | {"sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(weight_names.LLAMA, mixers=mixer_config.qwen2, defaults=_QWEN_DEFAULTS),
    "Qwen3ForCausalLM": Family(
        weight_names.QWEN3,
        mixers=mixer_config.qwen3,
        defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    ),
    "Phi3ForCausalLM": Family(
        weight_names.PHI3,
        mixers=mixer_config.phi3,
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": None},
    ),
    "Gemma3ForCausalLM": Family(weight_names.GEMMA3, **_GEMMA3),
    "Gemma3ForConditionalGeneration": Family(weight_names.GEMMA3_VISION, section="text_config", **_GEMMA3),
    "Gemma2ForCausalLM": Family(
        weight_names.GEMMA2,
        mixers=mixer_config.gemma2,
        defaults=_GEMMA_DEFAULTS | {"rope_theta": 10_000.0, "sliding_window_pattern": 2},
        fixed={"use_bidirectional_attention": (None, False)},
        **_GEMMA,
    ),
    "Olmo2ForCausalLM": Family(
        weight_names.OLMO2,
        mixers=mixer_config.olmo2,
        norm_placement=NormPlacement.POST,
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-5},
    ),
    "Olmo3ForCausalLM": Family(
        weight_names.OLMO2,
        mixers=mixer_config.olmo3,
        norm_placement=NormPlacement.POST,
        defaults=_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "SmolLM3ForCausalLM": Family(
        weight_names.LLAMA,
        mixers=mixer_config.smollm3,
        mlp_bias="mlp_bias",
        defaults=_DEFAULTS | {"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    ),
}

_DELTA_NET_DEFAULTS = _DEFAULTS | {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}
_DELTA_NETS: dict[str, Any] = {
    "mixers": mixer_config.delta_net,
    "predictor": weight_names.qwen_predictor,
    "norm_offset": 1.0,
    "defaults": _DELTA_NET_DEFAULTS,
    "fixed": {"hidden_act": ("silu",), "attn_output_gate": (None, True)},
}
_HYBRID_FAMILIES: Mapping[str, Family] = {
    "Gemma4ForCausalLM": Family(weight_names.GEMMA4, **_GEMMA4),
    "Gemma4ForConditionalGeneration": Family(weight_names.GEMMA4_VISION, section="text_config", **_GEMMA4),
    "Qwen3NextForCausalLM": Family(weight_names.QWEN3_NEXT, experts=experts_config.qwen2, **_DELTA_NETS),
    "Qwen3_5ForCausalLM": Family(weight_names.QWEN3_5, **_DELTA_NETS),
    "Qwen3_5MoeForCausalLM": Family(weight_names.QWEN3_5, experts=experts_config.qwen2, **_DELTA_NETS),
    "Qwen3_5ForConditionalGeneration": Family(
        weight_names.QWEN3_5_VISION, section="text_config", **_DELTA_NETS
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        weight_names.QWEN3_5_VISION, experts=experts_config.qwen2, section="text_config", **_DELTA_NETS
    ),
}

_EXPERT_FAMILIES: Mapping[str, Family] = {
    "Qwen3MoeForCausalLM": Family(
        weight_names.QWEN3_MOE,
        mixers=mixer_config.qwen3_moe,
        experts=experts_config.qwen3,
        defaults=_QWEN_DEFAULTS,
    ),
    "Qwen2MoeForCausalLM": Family(
        weight_names.QWEN2_MOE,
        mixers=mixer_config.qwen2_moe,
        experts=experts_config.qwen2,
        defaults=_QWEN_DEFAULTS | {"qkv_bias": True},
    ),
    "MixtralForCausalLM": Family(
        weight_names.MIXTRAL,
        mixers=mixer_config.mistral,
        experts=experts_config.mixtral,
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    ),
    "OlmoeForCausalLM": Family(
        weight_names.OLMOE,
        mixers=mixer_config.olmo2,
        experts=experts_config.olmoe,
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-5},
        fixed={"clip_qkv": (None,), "sliding_window": (None,)},
    ),
    "Glm4MoeForCausalLM": Family(
        weight_names.GLM4_MOE,
        mixers=mixer_config.glm,
        experts=experts_config.glm,
        predictor=weight_names.glm_predictor,
        defaults=_DEFAULTS | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    ),
    "GraniteMoeForCausalLM": Family(
        weight_names.GRANITE_MOE,
        mixers=mixer_config.granite,
        experts=experts_config.granite,
        multipliers=True,
        defaults=_DEFAULTS,
        fixed={"attention_bias": (None, False)},
    ),
    "GptOssForCausalLM": Family(
        weight_names.GPT_OSS,
        mixers=mixer_config.gpt_oss,
        experts=experts_config.gpt_oss,
        defaults=_DEFAULTS
        | {
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
    ),
}

# How transformers names the same decoders with a classification head, and without any head.
_FAMILY_NAMES = {name.removesuffix("ForCausalLM"): name for name in _CAUSAL if name.endswith("ForCausalLM")}
_FAMILY_NAMES["Gemma3Text"] = _FAMILY_NAMES.pop("Gemma3")

FAMILIES: Mapping[str, Family] = {
    **_CAUSAL,
    **_EXPERT_FAMILIES,
    **_HYBRID_FAMILIES,
    **{
        f"{name}ForSequenceClassification": replace(_CAUSAL[causal], head="classifier")
        for name, causal in _FAMILY_NAMES.items()
    },
    **{f"{name}Model": replace(_CAUSAL[causal], head="none") for name, causal in _FAMILY_NAMES.items()},
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first architecture in the config that is known; it selects the family."""
    named = config.get("architectures") or []
    names = [str(name) for name in named] if isinstance(named, list) else [str(named)]
    if not names:
        names = [_of_model_type(str(config.get("model_type")))]
    for name in names:
        if name in FAMILIES:
            return name
    decoders = [name.removesuffix("Text") for name in _FAMILY_NAMES]
    others = (*_EXPERT_FAMILIES, *_HYBRID_FAMILIES)
    decoders += [name.removesuffix("ForCausalLM") for name in others if name.endswith("ForCausalLM")]
    raise UnknownArchitectureError(
        f"cannot serve {', '.join(names)}: supported families are {', '.join(decoders)} and the encoders "
        f"{', '.join(ENCODERS)}"
    )


def _of_model_type(model_type: str) -> str:
    """Return the architecture of a config that names only its model type, such as qwen3_moe. The text model of a
    multimodal one has its own type, such as gemma3_text."""
    base = model_type.removesuffix("_text").replace("_", "")
    is_text = model_type.endswith("_text")
    for suffix in ("ForCausalLM",) if is_text else ("ForConditionalGeneration", "ForCausalLM"):
        for name in FAMILIES:
            if name.endswith(suffix) and name.removesuffix(suffix).replace("_", "").lower() == base:
                return name
    return f"model_type {model_type}"


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that describes the text model, with the family's defaults filled in."""
    family = FAMILIES[architecture_of(config)]
    part = dict(config)
    if family.section is not None:
        part |= Fields(config).part(family.section).values
    return {**family.defaults, **part}


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Return the decoder that a `config.json` describes."""
    architecture = architecture_of(config)
    family = FAMILIES[architecture]
    fields = Fields(text_config(config))
    fields.check_supported({"is_causal": (None, True), **family.fixed})
    num_layers, hidden_size = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    mixers = tuple(family.mixers(fields, num_layers))
    max_position, served = default_context(
        mixer_config.context_rope(mixers), fields.integer("max_position_embeddings")
    )
    spec = DecoderSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        mixers=mixers,
        mlps=_mlps(fields, family, num_layers),
        max_position=max_position,
        default_context=served,
        norm_eps=fields.number("rms_norm_eps"),
        norm_placement=family.norm_placement,
        norm_offset=family.norm_offset,
        embedding_scale=hidden_size**0.5 if family.scaled_embedding else 1.0,
        logit_softcap=_softcap(fields),
        has_layer_scales=family.layer_scales,
        layer_inputs=_layer_inputs(fields, family) if family.layer_inputs else None,
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        names=_names(fields, family, mixers),
        quantization=read_quantization(fields),
        num_labels=len(read_labels(config)) if family.head == "classifier" else 0,
    )
    if family.multipliers:
        spec = replace(
            spec,
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            logit_divisor=fields.number("logits_scaling", 1.0),
        )
    gguf = config.get(GGUF_FIELD)
    if gguf is not None:
        num_extra = min(fields.integer("num_nextn_predict_layers", 0, least=0), _MAX_EXTRA_LAYERS)
        spec = with_gguf_names(spec, gguf, ARCHITECTURES[gguf].interleaved, num_extra)
    return spec if family.head == "language" else without_lm_head(spec)


def mtp_spec(config: Mapping[str, Any], spec: DecoderSpec) -> MtpSpec | None:
    """Return the layer of a decoder's checkpoint that predicts further tokens, or None if there is not exactly one.

    Not all configs say whether they have one: the tensors tell.
    """
    family = FAMILIES[spec.architecture]
    fields = Fields(text_config(config))
    counts = [fields.integer(name, least=0) for name in _NUM_PREDICTORS if name in fields]
    attention = [mixer for mixer in spec.mixers if mixer is not None and mixer.kv is not None]
    if family.predictor is None or not attention or counts[:1] not in ([], [1]):
        return None
    num_layers = spec.num_layers
    names = gguf_predictor(spec.names, num_layers) if GGUF_FIELD in config else family.predictor(num_layers)
    index = names.layer.first_layer or 0
    return MtpSpec(attention[-1], _mlps(fields, family, index + 1)[index], names)


def _mlps(fields: Fields, family: Family, num_layers: int) -> tuple[MlpSpec, ...]:
    activation = _activation(fields, family.activation_field)
    if family.experts is not None:
        return tuple(family.experts(fields, num_layers, activation))
    bias = family.mlp_bias is not None and fields.boolean(family.mlp_bias, False)
    dense = DenseMlpSpec(fields.integer("intermediate_size"), activation, bias)
    return (dense,) * num_layers


def _layer_inputs(fields: Fields, family: Family) -> LayerInputsSpec | None:
    size = fields.integer("hidden_size_per_layer_input", least=0)
    if not size:
        return None
    vocab_size = fields.integer("vocab_size")
    if fields.integer("vocab_size_per_layer_input") != vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"vocab_size, {vocab_size}")
    return LayerInputsSpec(size, _activation(fields, family.activation_field))


def _names(fields: Fields, family: Family, mixers: tuple[MixerSpec, ...]) -> WeightNames:
    """Return the family's names. Layers that predict further tokens follow the others, and are ignored, as are keys and
    values of layers that read those of others."""
    count = fields.integer("num_nextn_predict_layers", 0, least=0)
    extra = [rf"\blayers\.{len(mixers) + index}\." for index in range(min(count, _MAX_EXTRA_LAYERS))]
    shared = [index for index, mixer in enumerate(mixers) if mixer.kv_source is not None]
    extra += [rf"\blayers\.{index}\.self_attn\.[kv]_" for index in shared]
    return replace(family.names, ignored=(*family.names.ignored, *extra))


def without_lm_head(spec: DecoderSpec) -> DecoderSpec:
    """Return the same decoder without its language-model head. A base model's tensors have no prefix, and a causal
    model's weights may still contain the head."""
    names = spec.names
    read = replace(
        names,
        prefixes=(*names.prefixes, ""),
        heads=(*names.heads, names.heads[0]),
        ignored=(*names.ignored, *(f"^{re.escape(head)}$" for head in names.heads)),
    )
    return replace(spec, has_lm_head=False, names=read)


def _activation(fields: Fields, name: str) -> str:
    activation = fields.string(name)
    if activation not in _ACTIVATIONS:
        raise fields.error(name, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]


def _softcap(fields: Fields) -> float | None:
    return fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else None
