"""The metadata of a GGUF file as the `config.json` and `generation_config.json` that the same model has on the hub.

An architecture is an entry of `ARCHITECTURES`. Its metadata keys begin with its name: `llama.block_count`. Some facts
are not in the metadata: whether layers have biases or experts, and the size of the vocabulary, follow from the tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.checkpoint.fields import Fields
from inflight.checkpoint.gguf_file import GgufFile
from inflight.errors import ModelError, UnknownArchitectureError, shown

GGUF_FIELD = "gguf_architecture"  # of a config whose weights are in a GGUF file
_SOFTMAX, _SIGMOID = 1, 2  # of experts' scores
_MAX_ROPE_FACTORS = 1 << 12
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_END_TOKENS = ("eos", "eot", "eom")
# Metadata that would change the computation, with the values that are supported.
_FIXED = {"attention.causal": (True,), "attention.clamp_kqv": (0.0,), "use_parallel_residual": (False, True)}


class Reader(Fields):
    """The metadata of one architecture, and what follows from the tensors."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        prefix = f"{architecture}."
        values = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        super().__init__(values, str(file.path), prefix)
        self.file = file

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Return an integer. A list of one per layer will do if all are equal."""
        value = self.values.get(name)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            (value,) = {type(item): item for item in value}.values()
            if type(value) is int:
                return value
        return super().integer(name, default, least)

    def number(self, name: str, default: float | None = None, above: float = -math.inf) -> float:
        return super().number(name, default, above)

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def size(self, name: str, dimension: int) -> int:
        """Return one dimension of a tensor, counted from the rows."""
        tensor = self.file.tensors.get(name)
        if tensor is None or len(tensor.shape) <= dimension:
            raise ModelError(f"{self.where} has no tensor {name} with {dimension + 1} dimensions or more")
        return tensor.shape[dimension]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of GGUF files: what it is called elsewhere, and the fields that only it has."""

    name: Callable[[Reader], str]
    fields: Callable[[Reader], dict[str, Any]]
    # Whether rows of queries and keys are stored in the order in which llama.cpp rotates them: pairs of features that
    # are half a head apart elsewhere are neighbours.
    interleaved: bool = False


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the config of the model in a file."""
    architecture, prefix = architecture_of(file), file.fields.string("general.architecture")
    reader = Reader(file, prefix)
    reader.check_supported({key: allowed for key, allowed in _FIXED.items() if key in reader})
    heads, hidden = reader.integer("attention.head_count"), reader.integer("embedding_length")
    head_dim = reader.integer("attention.key_length", hidden // heads if heads > 0 else 0)
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise reader.error("attention.value_length", f"attention.key_length, {head_dim}")
    rotary = reader.integer("rope.dimension_count", head_dim)
    return {
        "architectures": [architecture.name(reader)],
        GGUF_FIELD: prefix,
        "vocab_size": reader.size("token_embd.weight", 0),
        "hidden_size": hidden,
        "intermediate_size": reader.integer("feed_forward_length", 0) or None,
        "num_hidden_layers": reader.integer("block_count") - reader.integer("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.integer("context_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.number("rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotary / head_dim if head_dim > 0 else 1.0,
        "rope_scaling": _rope_scaling(reader),
        "attention_bias": reader.has_tensor("blk.0.attn_q.bias"),
        "tie_word_embeddings": not reader.has_tensor("output.weight"),
        "dtype": _dtype(file),
        "quantization_config": {
            "quant_method": "gguf",
            "types": {name: tensor.type.name for name, tensor in file.tensors.items()},
        },
        **architecture.fields(reader),
    }


def gguf_generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the tokens that end a generation, and the sampling parameters that the file recommends."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in _END_TOKENS]
    ends = list(dict.fromkeys(file.fields.integer(key, least=0) for key in keys if key in file.metadata))
    recommended = {
        theirs: file.metadata[f"general.sampling.{ours}"]
        for ours, theirs in _SAMPLING.items()
        if f"general.sampling.{ours}" in file.metadata
    }
    return {"eos_token_id": ends, **recommended}


def architecture_of(file: GgufFile) -> Architecture:
    name = file.fields.string("general.architecture")
    if name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"cannot serve {file.path}: its architecture is {shown(name)}, supported are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _dtype(file: GgufFile) -> str:
    """Return the dtype of the weights that are not in blocks: that of most matrices."""
    types = [tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1]
    most = max(set(types), key=types.count, default="F32")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _rope_scaling(reader: Reader) -> dict[str, Any] | None:
    """Return the scaling of rotary positions. Factors of each frequency are tensors of the file."""
    original = reader.integer("rope.scaling.original_context_length", reader.integer("context_length"))
    if reader.has_tensor("rope_factors_long.weight") or reader.has_tensor("rope_freqs.weight"):
        is_long = reader.has_tensor("rope_factors_long.weight")
        names = (
            ("rope_factors_short.weight", "rope_factors_long.weight")
            if is_long
            else ("rope_freqs.weight",) * 2
        )
        short, long = (_small_tensor(reader.file, name) for name in names)
        magnitude = reader.number("rope.scaling.attn_factor", 1.0)
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": magnitude,
            # Factors without a longer list are for any length.
            "original_max_position_embeddings": original if is_long else reader.integer("context_length"),
        }
    rope_type = reader.values.get("rope.scaling.type")
    if rope_type in (None, "none"):
        return None
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": reader.number("rope.scaling.factor")}
    if rope_type != "yarn":
        raise reader.error("rope.scaling.type", "none, linear or yarn; longrope needs rope_factors tensors")
    optional = {
        "attention_factor": "rope.scaling.yarn_attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    return {
        "rope_type": "yarn",
        "factor": reader.number("rope.scaling.factor"),
        "original_max_position_embeddings": original,
        **{field: reader.number(key) for field, key in optional.items() if key in reader},
    }


def _small_tensor(file: GgufFile, name: str) -> list[float]:
    """Return the numbers of a float32 tensor."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or tensor.num_bytes > 4 * _MAX_ROPE_FACTORS:
        raise ModelError(
            f"{name} in {file.path} must be there as F32, with at most {_MAX_ROPE_FACTORS} numbers"
        )
    return list(struct.unpack(f"<{tensor.num_bytes // 4}f", file.data(tensor)))


# ---- architectures ----


def _experts(reader: Reader) -> dict[str, Any]:
    gating = reader.integer("expert_gating_func", _SOFTMAX)
    if gating != _SOFTMAX:
        raise reader.error("expert_gating_func", f"{_SOFTMAX}, a softmax")
    return {
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
    }


def _qwen_moe(reader: Reader) -> dict[str, Any]:
    num_layers = min(reader.integer("block_count"), len(reader.file.tensors))
    sparse = [index for index in range(num_layers) if reader.has_tensor(f"blk.{index}.ffn_gate_inp.weight")]
    first = sparse[0] if sparse else 0
    shared = f"blk.{first}.ffn_gate_shexp.weight"
    return {
        **_experts(reader),
        "moe_intermediate_size": reader.size(f"blk.{first}.ffn_gate_exps.weight", 1),
        "shared_expert_intermediate_size": reader.size(shared, 0) if reader.has_tensor(shared) else None,
        "mlp_only_layers": sorted(set(range(num_layers)) - set(sparse)),
        "qkv_bias": reader.has_tensor("blk.0.attn_q.bias"),
    }


def _llama(reader: Reader) -> dict[str, Any]:
    bias = {"mlp_bias": reader.has_tensor("blk.0.ffn_down.bias")}
    return _experts(reader) if reader.integer("expert_count", 0) else bias


def _attention_scalar(reader: Reader, layers_of_largest: int) -> int:
    """Return the number by whose root a Gemma divides its scores: another one for the largest, as no key says."""
    if reader.integer("block_count") == layers_of_largest:
        return reader.integer("embedding_length") // max(1, reader.integer("attention.head_count"))
    return reader.integer("attention.key_length")


def _gemma3(reader: Reader) -> dict[str, Any]:
    pattern = reader.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        windows: dict[str, Any] = {"layer_types": kinds}
    else:
        windows = {"sliding_window_pattern": reader.integer("attention.sliding_window_pattern", 6)}
    return {
        "query_pre_attn_scalar": _attention_scalar(reader, 62),
        "sliding_window": reader.integer("attention.sliding_window"),
        **windows,
        "rope_local_base_freq": reader.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": reader.number("final_logit_softcapping", 0.0) or None,
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon", 1e-6),
    }


def _glm4_moe(reader: Reader) -> dict[str, Any]:
    if reader.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise reader.error("expert_gating_func", f"{_SIGMOID}, a sigmoid")
    return {
        "n_routed_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "n_shared_experts": reader.integer("expert_shared_count"),
        "first_k_dense_replace": reader.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": reader.number("expert_weights_scale", 1.0),
        "norm_topk_prob": reader.boolean("expert_weights_norm", False),
        "n_group": reader.integer("expert_group_count", 1),
        "topk_group": reader.integer("expert_group_used_count", 1),
        "use_qk_norm": reader.has_tensor("blk.0.attn_q_norm.weight"),
        "num_nextn_predict_layers": reader.integer("nextn_predict_layers", 0),
    }


def _granite_moe(reader: Reader) -> dict[str, Any]:
    scales = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {**_experts(reader), **{field: reader.number(key, 1.0) for field, key in scales.items()}}


def _gemma2(reader: Reader) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _attention_scalar(reader, 46),
        "sliding_window": reader.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": reader.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reader.number("final_logit_softcapping", 30.0),
    }


def _olmo(reader: Reader) -> dict[str, Any]:
    pattern = reader.values.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {}
    kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {"sliding_window": reader.integer("attention.sliding_window"), "layer_types": kinds}


def _gpt_oss(reader: Reader) -> dict[str, Any]:
    scaling = _rope_scaling(reader)
    return {
        **_experts(reader),
        "intermediate_size": reader.integer("expert_feed_forward_length"),
        "sliding_window": reader.integer("attention.sliding_window"),
        "rope_scaling": None if scaling is None else {**scaling, "truncate": False},
    }


def _named(name: str) -> Callable[[Reader], str]:
    return lambda _: name


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(  # Mistral, too
        lambda reader: "MixtralForCausalLM" if reader.integer("expert_count", 0) else "LlamaForCausalLM",
        _llama,
        interleaved=True,
    ),
    "qwen2": Architecture(_named("Qwen2ForCausalLM"), lambda _: {}),
    "qwen3": Architecture(_named("Qwen3ForCausalLM"), lambda _: {}),
    "phi3": Architecture(
        _named("Phi3ForCausalLM"),
        lambda reader: {"sliding_window": reader.integer("attention.sliding_window", 0) or None},
    ),
    "gemma3": Architecture(_named("Gemma3ForCausalLM"), _gemma3),
    "gemma2": Architecture(_named("Gemma2ForCausalLM"), _gemma2),
    "olmo2": Architecture(  # OLMo 3, too
        lambda reader: (
            "Olmo3ForCausalLM" if "attention.sliding_window_pattern" in reader else "Olmo2ForCausalLM"
        ),
        _olmo,
    ),
    "smollm3": Architecture(
        _named("SmolLM3ForCausalLM"), lambda _: {"no_rope_layer_interval": 4}, interleaved=True
    ),
    "qwen2moe": Architecture(_named("Qwen2MoeForCausalLM"), _qwen_moe),
    "qwen3moe": Architecture(
        _named("Qwen3MoeForCausalLM"), lambda reader: {**_qwen_moe(reader), "norm_topk_prob": True}
    ),
    "olmoe": Architecture(_named("OlmoeForCausalLM"), _experts),
    "glm4moe": Architecture(_named("Glm4MoeForCausalLM"), _glm4_moe),
    "gpt-oss": Architecture(_named("GptOssForCausalLM"), _gpt_oss),
    "granitemoe": Architecture(_named("GraniteMoeForCausalLM"), _granite_moe, interleaved=True),
}
