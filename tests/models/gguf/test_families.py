"""Every family from a GGUF file: the same numbers as transformers computes from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.layers.native_kernels import cpu_kernels
from inflight.layers.torch_kernels import TorchKernels
from inflight.models.decoders.footprint import meta_decoder, meta_kernels, num_bytes
from tests.models.running import load, logprobs, prompt, transformers_logprobs
from tests.support.checkpoints import FAMILIES, RECURRENT_FAMILIES, make_model
from tests.support.gguf_checkpoints import write_gguf

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + index / 10 for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": 256,
    "attention_factor": 1.19,
}
# Features that converters do not support are left out: windows of Mistral and Mixtral, other divisors of Gemma's
# scores, layers without experts.
OVERRIDES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gemma2": {"query_pre_attn_scalar": 32},
    "qwen3-moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
}
# Families that are not read from GGUF files.
NOT_CONVERTED = ("gemma4", "gemma4-small", "gemma4-moe", *RECURRENT_FAMILIES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, OVERRIDES.get(family, {})) for family in FAMILIES if family not in NOT_CONVERTED},
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2 with YaRN": ("qwen2", {"rope_parameters": YARN}),
    "phi3 with long factors": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 256},
    ),
    "gemma3, scaled": (
        "gemma3",
        {
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "glm4-moe with bias": ("glm4-moe", {"attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_gguf_file_gives_the_same_logits_as_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model = make_model(family, **overrides)
    model.save_pretrained(tmp_path)
    decoder = load(write_gguf(tmp_path / "model.gguf", tmp_path))
    ids = prompt()
    ours, theirs = logprobs(decoder, ids), transformers_logprobs(model, ids)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def write_in_blocks(folder: Path, family: str) -> Path:
    """Write a model with blocks of several types in one layer."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    make_model(family, **sizes).save_pretrained(folder)
    types = {
        ".bias": "F32",
        "ffn_gate_inp": "F32",
        "attn_k": "Q5_0",
        "attn_v": "Q5_1",
        "ffn_down_exps": "MXFP4" if family == "gpt-oss" else "Q4_1",
        "ffn_up_exps": "MXFP4" if family == "gpt-oss" else "Q5_0",
        "ffn_down": "Q4_1",
    }

    def type_of(name: str, _tensor: torch.Tensor) -> str:
        return next((kind for part, kind in types.items() if part in name), "Q8_0")

    return write_gguf(folder / "model.gguf", folder, type_of)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "olmoe", "mixtral", "gpt-oss"])
def test_product_of_blocks_is_close_to_that_of_expanded_ones(family: str, tmp_path: Path) -> None:
    """Blocks of several types in one layer, tied embeddings in blocks, experts with and without biases."""
    path = write_in_blocks(tmp_path, family)
    ids = prompt()
    expanded, quick = logprobs(load(path), ids), logprobs(load(path, fast=True), ids)
    divergence = (expanded.exp() * (expanded - quick)).sum(-1)
    assert float(divergence.median()) < 0.01  # a router may choose another expert now and then


@pytest.mark.parametrize("family", ["olmoe", "gpt-oss"])
def test_experts_hold_their_blocks_and_plans_count_them(family: str, tmp_path: Path) -> None:
    if isinstance(cpu_kernels(), TorchKernels):
        pytest.skip("there is no compiler")
    decoder = load(write_in_blocks(tmp_path, family), torch.bfloat16, fast=True)
    planned = meta_decoder(decoder.shard, meta_kernels("cpu", torch.bfloat16), torch.bfloat16)
    for layer, empty in zip(decoder.layers, planned.layers, strict=True):
        experts, planned_experts = experts_of(layer), experts_of(empty)
        types = {kind for matrices in (experts._gate_up, experts._down) for _, kind in matrices._stacks}
        assert types == ({"MXFP4", "Q8_0"} if family == "gpt-oss" else {"Q4_1", "Q5_0", "Q8_0"})
        # Gate and up are held together, and counted in the larger of their types.
        assert num_bytes(experts._down) == num_bytes(planned_experts._down)
        assert 0.6 < num_bytes(experts) / num_bytes(planned_experts) <= 1


def experts_of(layer: Any) -> Any:
    return layer.mlp.experts
