"""Every family, rope scaling and layout against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.running import load, logprobs, prompt, transformers_logprobs
from tests.support.checkpoints import FAMILIES, make_model, randomise, tolerance, write_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [1.5 + 0.7 * i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
INTERVAL_OF_2 = ["linear_attention", "full_attention"] * 2
TWO_KINDS = ["full_attention", "sliding_attention", "sliding_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 32}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN | {"rope_theta": 500.0}}),
    "llama-yarn-untruncated": ("llama", {"rope_parameters": YARN | {"rope_theta": 500.0, "truncate": False}}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
    "llama-yarn-attention": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-late-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-layer-types": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": TWO_KINDS},
    ),
    "phi3-window": ("phi3", {"sliding_window": 8}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "gemma3-softcap": ("gemma3", {"final_logit_softcapping": 4.0}),
    "gemma3-untied-bias": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma3-linear": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "olmo2-no-groups": ("olmo2", {"num_key_value_heads": 4}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-caps": ("gemma2", {"attn_logit_softcapping": 0.4, "final_logit_softcapping": 3.0}),
    "olmo3-yarn": ("olmo3", {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN_ROPE}}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "smollm3-windows": ("smollm3", {"use_sliding_window": True, "sliding_window": 6}),
    "gemma4-values": ("gemma4", {"attention_k_eq_v": False, "attention_bias": True}),
    "gemma4-equal-heads": ("gemma4", {"global_head_dim": 16, "num_global_key_value_heads": 2}),
    "gpt-oss-no-bias": ("gpt-oss", {"attention_bias": False}),
    "gpt-oss-full": ("gpt-oss", {"layer_types": ["full_attention"] * 3}),
    "qwen3-next-interval": ("qwen3-next", {"layer_types": INTERVAL_OF_2, "norm_topk_prob": False}),
    "qwen3.5-equal-heads": ("qwen3.5", {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 2}),
    "qwen3.5-tied-bias": ("qwen3.5", {"tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_prompt_logprobs_agree_with_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model = make_model(family, **overrides)
    model.save_pretrained(tmp_path)
    ours = logprobs(load(tmp_path), prompt())
    torch.testing.assert_close(ours, transformers_logprobs(model, prompt()), rtol=0, atol=tolerance(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_fastest_kernels_agree_with_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path)
    ours = logprobs(load(tmp_path, fast=True), prompt(), chunks=[17, 1, 22])
    torch.testing.assert_close(ours, transformers_logprobs(model, prompt()), rtol=0, atol=tolerance(family))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "olmo2", "gpt-oss", "qwen3.5"])
def test_chunks_and_single_tokens_agree_with_the_whole_prompt(family: str, tmp_path: Path) -> None:
    decoder = load(write_checkpoint(tmp_path, family))
    whole = logprobs(decoder, prompt(24))
    pieces = logprobs(decoder, prompt(24), chunks=[7, 1, 1, 12, 3])
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_skipping_unneeded_tokens_changes_nothing(family: str, fast: bool, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    decoder = load(tmp_path, fast=fast)
    whole = logprobs(decoder, prompt(), [10, 20, 10])
    some = logprobs(decoder, prompt(), [10, 20, 10], outputs=[[3, 9], [], [0, 9]])
    torch.testing.assert_close(some, whole[[3, 9, 30, 39]], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("length", "served"), [(12, None), (40, 512)])
def test_longrope_uses_the_factors_of_the_context_served(
    length: int, served: int | None, tmp_path: Path
) -> None:
    """transformers picks them by the prompt's length: short ones up to 16 tokens here, long ones beyond."""
    model = make_model("phi3", original_max_position_embeddings=16, rope_parameters=dict(LONG))
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path, max_position=served)
    assert decoder.spec.default_context == 16
    assert decoder.spec.max_position == 512
    ours = logprobs(decoder, prompt(length))
    torch.testing.assert_close(ours, transformers_logprobs(model, prompt(length)), rtol=0, atol=1e-4)


def test_bfloat16_weights_are_used_exactly(tmp_path: Path) -> None:
    """bf16 weights and float32 arithmetic: the same as transformers with the rounded weights in float32."""
    write_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ours = logprobs(load(tmp_path, dtype=torch.bfloat16), prompt())
    torch.testing.assert_close(ours, transformers_logprobs(model, prompt()), rtol=0, atol=1e-4)


def test_sharded_checkpoint_loads_the_same_weights(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", "llama")
    sharded = write_checkpoint(tmp_path / "sharded", "llama", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logprobs(load(sharded), prompt()), logprobs(load(whole), prompt()))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_model_of_a_multimodal_checkpoint_is_loaded(prefix: str, tmp_path: Path) -> None:
    """The same weights are read under the names of the hub and under those that transformers uses in memory."""
    import transformers
    from safetensors.torch import load_file, save_file

    text = FAMILIES["gemma3"]().to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28})
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    actual = (
        "language_model.model." if "language_model.model.norm.weight" in tensors else "model.language_model."
    )
    save_file({name.replace(actual, prefix): tensor.clone() for name, tensor in tensors.items()}, file)
    ours = logprobs(load(tmp_path), prompt())
    torch.testing.assert_close(ours, transformers_logprobs(model, prompt()), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "case", ["llama-llama3", "llama-yarn", "llama-linear", "gemma3-linear", "phi3-partial"]
)
def test_old_config_layouts_mean_the_same(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    write_checkpoint(tmp_path, family, **overrides)
    new = logprobs(load(tmp_path), prompt())
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        config["sliding_window_pattern"] = 2
        del config["layer_types"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    config["rope_scaling"] = {"type": rope.pop("rope_type")} | rope
    path.write_text(json.dumps(config))
    assert torch.equal(logprobs(load(tmp_path), prompt()), new)
