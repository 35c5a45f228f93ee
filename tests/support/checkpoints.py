"""Small random checkpoints of every family, written by transformers, and a small real tokenizer.

`transformers` and `tokenizers` are imported when called: importing this file costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 320
MAX_POSITION = 512
END_OF_TURN = "<|end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "A batch is a set of requests that are computed together, one token at a time.",
    "When the sun is low, the shadows of the trees are longer than the trees.",
    "Numbers such as 12, 345 and 6789 are written with digits; so is 3.14.",
    "def add(a, b):\n    return a + b\n",
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    # No end token: greedy runs go on until their length limit unless a test says otherwise.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _config(name: str, **fixed: Any) -> Callable[..., Any]:
    def make(**overrides: Any) -> Any:
        import transformers

        return getattr(transformers, name)(**(_SHAPE | fixed | overrides))

    return make


_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "rope_theta": 500.0,
    "beta_fast": 8.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

_RECURRENT = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
_RECURRENT_EXPERTS = _RECURRENT | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}

_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 16,
    "global_head_dim": 32,
    "final_logit_softcapping": 8.0,
}

# family -> a function that makes its transformers config; keywords replace fields
FAMILIES: Mapping[str, Callable[..., Any]] = {
    "llama": _config("LlamaConfig"),
    "mistral": _config("MistralConfig", sliding_window=8),
    "qwen2": _config("Qwen2Config", tie_word_embeddings=True),
    "qwen3": _config("Qwen3Config", head_dim=32, tie_word_embeddings=True),
    "phi3": _config("Phi3Config", original_max_position_embeddings=MAX_POSITION),
    "gemma3": _config("Gemma3TextConfig", head_dim=32, query_pre_attn_scalar=24, sliding_window=8),
    "olmo2": _config("Olmo2Config"),
    "qwen3-moe": _config(
        "Qwen3MoeConfig",
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen2-moe": _config(
        "Qwen2MoeConfig",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "mixtral": _config("MixtralConfig", intermediate_size=32, num_local_experts=4, sliding_window=8),
    "olmoe": _config("OlmoeConfig", intermediate_size=32, num_experts=8, num_experts_per_tok=2),
    "glm4-moe": _config(
        "Glm4MoeConfig",
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.8,
        first_k_dense_replace=1,
        use_qk_norm=True,
        num_mtp_layers=0,
    ),
    "granite-moe": _config(
        "GraniteMoeConfig",
        intermediate_size=32,
        num_local_experts=5,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        logits_scaling=0.7,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
    ),
    "gemma2": _config(
        "Gemma2Config",
        query_pre_attn_scalar=24,
        head_dim=32,
        sliding_window=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=8.0,
    ),
    "olmo3": _config("Olmo3Config", num_hidden_layers=4, sliding_window=8),
    "smollm3": _config("SmolLM3Config", no_rope_layer_interval=2),
    "gpt-oss": _config(
        "GptOssConfig",
        intermediate_size=32,
        num_local_experts=6,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=8,
        rope_parameters=_YARN,
    ),
    "gemma4": _config(
        "Gemma4TextConfig",
        **_GEMMA4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    "gemma4-small": _config(
        "Gemma4TextConfig",
        **_GEMMA4 | {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    "gemma4-moe": _config(
        "Gemma4TextConfig",
        **_GEMMA4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "qwen3-next": _config("Qwen3NextConfig", **_RECURRENT_EXPERTS, mlp_only_layers=[1]),
    "qwen3.5": _config("Qwen3_5TextConfig", **_RECURRENT),
    "qwen3.5-moe": _config("Qwen3_5MoeTextConfig", **_RECURRENT_EXPERTS),
}

# Families with layers that keep a state.
RECURRENT_FAMILIES = ("qwen3-next", "qwen3.5", "qwen3.5-moe")


def tolerance(family: str) -> float:
    """The largest difference of logprobs from transformers. It computes recurrent layers in another order, many tokens
    at once, and each is about 5e-5 from float64."""
    return 3e-4 if family in RECURRENT_FAMILIES else 1e-4


# Families that have models with other heads than a language model's here.
DENSE_FAMILIES = tuple(
    name
    for name in FAMILIES
    if "moe" not in name
    and not name.startswith(("mixtral", "gpt-oss", "gemma4"))
    and name not in RECURRENT_FAMILIES
)

# Its usual pattern, one full layer in six, would leave a small model without any.
_GEMMA3_LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def make_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model in float32 with random weights, norms and biases included: transformers starts
    them at 1 and 0, where many a mistake would not show."""
    import transformers

    if family == "gemma3" and "num_hidden_layers" not in overrides:
        overrides = _GEMMA3_LAYERS | overrides
    config = FAMILIES[family](**overrides)
    with torch.random.fork_rng(devices=[]):
        # `randomise` adds to the start values of some parameters, which are random as well.
        torch.manual_seed(seed + 2)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention_of(config)
        )
    randomise(model, seed)
    return model.eval()


def attention_of(config: Any) -> str | None:
    """The attention of transformers to compare with: soft caps are only in the plain one."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def randomise(model: Any, seed: int = 0) -> None:
    """Random weights in place, of a size that makes predictions differ clearly between tokens."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.12)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            else:  # norms, around the value that transformers starts them at
                parameter.add_(noise * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
            elif name.endswith("layer_scalar"):
                buffer.copy_(1 + torch.randn(buffer.shape, generator=generator) * 0.3)


def write_checkpoint(
    folder: Path,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` and return its folder. `overrides` are fields of its config."""
    model = make_model(family, seed, **overrides)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """A byte-level BPE tokenizer for any text, with special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = [END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return folder
