"""GGUF files made from Hugging Face checkpoints, as llama.cpp's converter makes them, with the format's own package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# transformers' model_type -> the architecture of GGUF files
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "gemma3_text": "gemma3",
    "gemma2": "gemma2",
    "olmo3": "olmo2",
    "smollm3": "smollm3",
    "gpt_oss": "gpt-oss",
    "olmo2": "olmo2",
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "olmoe": "olmoe",
    "glm4_moe": "glm4moe",
    "granitemoe": "granitemoe",
}
_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# Chooses the type of a matrix: (name of the tensor, its values) -> "Q4_K"
ChooseType = Callable[[str, Tensor], str]


def write_gguf(
    path: Path,
    folder: Path,
    type_of: ChooseType = lambda _name, _tensor: "F32",
    metadata: Mapping[str, Any] | None = None,
    pre: str = "gpt-2",
) -> Path:
    """Write the checkpoint in `folder`, with its tokenizer if it has one. `metadata` is added to the file's."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    values = _hyperparameters(config, architecture) | dict(metadata or {})
    if (folder / "tokenizer.json").exists():
        values = _tokenizer(folder, config["vocab_size"], pre) | values
    for key, value in values.items():
        _add(writer, key, value)
    for name, tensor in _tensors(folder, config, architecture).items():
        add_tensor(writer, name, tensor, type_of(name, tensor) if tensor.dim() > 1 else "F32")
    write(writer)
    return path


def add_tensor(writer: Any, name: str, tensor: Tensor, type_name: str = "F32") -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[type_name]
    if type_name == "F16":
        writer.add_tensor(name, tensor.half().numpy())
    else:
        data = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)


def write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _hyperparameters(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    found = {key: config[field] for field, key in _KEYS.items() if config.get(field) is not None}
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    num_predictors = config.get("num_nextn_predict_layers") or 0
    found["block_count"] = config["num_hidden_layers"] + num_predictors
    if num_predictors:
        found["nextn_predict_layers"] = num_predictors
    found["rope.freq_base"] = float(full.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if full.get("rope_type") in ("linear", "yarn"):
        found |= {"rope.scaling.type": full["rope_type"], "rope.scaling.factor": float(full["factor"])}
    if full.get("rope_type") == "yarn":
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if full.get(name):
                found[f"rope.scaling.{key}"] = float(full[name])
    share = full.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found["rope.dimension_count"] = int(head_dim * share)
    if "head_dim" in config:
        found["attention.value_length"] = head_dim
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            found[name] = float(config[name])
    if config["model_type"] in ("gemma2", "gpt_oss"):
        found["attention.sliding_window"] = config["sliding_window"]
    if config["model_type"] == "gpt_oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if config["model_type"] in ("gemma3_text", "olmo3"):
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        found |= {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": kinds,
        }
        if "sliding_attention" in rope:
            found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if config["model_type"] == "phi3":
        found["attention.sliding_window"] = config.get("sliding_window") or 0
        if "long_factor" in full:
            found["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
            found["rope.scaling.attn_factor"] = float(full["attention_factor"])
    if config["model_type"] == "glm4_moe":
        found |= {"expert_gating_func": 2, "expert_weights_norm": bool(config["norm_topk_prob"])}
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _tensors(folder: Path, config: dict[str, Any], architecture: str) -> dict[str, Tensor]:
    """The checkpoint's tensors under the names and in the layout of GGUF files."""
    import gguf
    from safetensors.torch import load_file

    number = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    num_blocks = config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0)
    names = gguf.get_tensor_name_map(number, num_blocks)
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for key, part in _split(name, tensor, config):
            head, expert = _expert_of(key)
            target = names.get_name(head, try_suffixes=(".weight", ".bias"))
            assert target is not None, head
            if expert is None:
                found[target] = part
            else:
                experts.setdefault(target, {})[expert] = part
    found |= {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in experts.items()}
    return found | _rope_factors(config)


def _split(name: str, tensor: Tensor, config: dict[str, Any]) -> list[tuple[str, Tensor]]:
    model_type, heads = config["model_type"], config["num_attention_heads"]
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        tensor = tensor + 1
    if model_type == "gpt_oss" and "experts" in name:
        return _gpt_oss_experts(name, tensor)
    if name.endswith("sinks"):
        return [(f"{name}.weight", tensor)]
    if ARCHITECTURES[model_type] in ("llama", "granitemoe", "smollm3"):
        if ".q_proj." in name:
            tensor = interleave(tensor, heads)
        if ".k_proj." in name:
            tensor = interleave(tensor, config["num_key_value_heads"])
    if name.endswith("shared_expert_gate.weight"):
        return [(name, tensor.squeeze(0))]
    for packed, first, second in (
        ("mlp.experts.gate_up_proj", "mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"),
        (
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.experts.w1.weight",
            "block_sparse_moe.experts.w3.weight",
        ),
    ):
        if name.endswith(packed):
            gate, up = tensor.chunk(2, dim=1)
            base = name.removesuffix(packed)
            return [(base + first, gate), (base + second, up)]
    name = name.replace("block_sparse_moe.router.layer", "block_sparse_moe.gate")
    name = name.replace("block_sparse_moe.output_linear", "block_sparse_moe.experts.w2")
    return [(name if name.endswith((".weight", ".bias")) else f"{name}.weight", tensor)]


def _gpt_oss_experts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The rows of gate and up alternate, and all matrices are transposed."""
    suffix = "bias" if name.endswith("_bias") else "weight"
    name = name.removesuffix("_bias")
    rows = tensor if suffix == "bias" else tensor.transpose(1, 2)
    if name.endswith("down_proj"):
        return [(f"{name}.{suffix}", rows)]
    base = name.removesuffix("gate_up_proj")
    return [(f"{base}{part}_proj.{suffix}", rows[:, index::2]) for index, part in enumerate(("gate", "up"))]


def _expert_of(name: str) -> tuple[str, int | None]:
    """(the name of the tensor of all experts, the expert) of a tensor of one expert"""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part == "experts" and parts[index + 1].isdecimal():
            return ".".join([*parts[: index + 1], *parts[index + 2 :]]), int(parts[index + 1])
    return name, None


def interleave(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys as llama.cpp rotates them: the halves of each head alternate."""
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _rope_factors(config: dict[str, Any]) -> dict[str, Tensor]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]) for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    from inflight.layers.rotary import Llama3Scaling, Rope

    head_dim = config["hidden_size"] // config["num_attention_heads"]
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
    scaling = Llama3Scaling(
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    scaled = scaling.stretch(plain, Rope(rope["rope_theta"], head_dim), config["max_position_embeddings"])
    return {"rope_freqs.weight": plain / scaled}


def _tokenizer(folder: Path, vocab_size: int, pre: str) -> dict[str, Any]:
    """The metadata of a byte-level BPE tokenizer."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for text, index in tokenizer["model"]["vocab"].items():
        tokens[index], types[index] = text, NORMAL
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    ids = {text: index for index, text in enumerate(tokens)}
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.chat_template": settings["chat_template"],
        **{
            f"tokenizer.ggml.{key}_token_id": ids[settings[name]]
            for name, key in named.items()
            if settings.get(name)
        },
    }
