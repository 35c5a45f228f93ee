"""Quantized models from their checkpoints to their tokens, and asleep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import SHAPES
from inflight import LLM, SamplingParams
from inflight.models.decoders.decoder import Decoder
from tests.gpu.conftest import Ask
from tests.support.held_bytes import storage_bytes
from tests.support.quantized import Writer, awq, block_fp8, rewrite

FORMATS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "fp8 in blocks": (
        block_fp8(128, 128),
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "int4": (
        awq(32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_checkpoint_is_served_and_sleeps(
    name: str, checkpoint: Callable[..., Path], prompts: list[list[int]], ask: Ask, tmp_path: Path
) -> None:
    write, config = FORMATS[name]
    original = checkpoint("llama", hidden_size=256, intermediate_size=384)
    folder = rewrite(original, tmp_path / "quantized", {"_proj": write}, config)
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_blocks": 400, "dtype": "bfloat16"}
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options) as llm:
        expected = tokens(llm, prompts)
        llm.sleep()
        llm.wake_up()
        assert tokens(llm, prompts) == expected
    assert ask(folder, dtype="bfloat16", enforce_eager=True) == expected
    # Most answers begin as with the weights that the codes stand for; later on, rounding makes a difference.
    plain = ask(folder / "plain", dtype="float32", device="cpu")
    assert sum(a[0] == b[0] for a, b in zip(expected, plain, strict=True)) > len(plain) / 2


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_sleeping_model_keeps_one_copy_of_its_weights(quantization: str, prompts: list[list[int]]) -> None:
    """Random weights of a real model's size, beside which the workspaces of libraries are small."""
    shape = SHAPES["llama-3.1-8b"] | {"num_hidden_layers": 8, "vocab_size": 32_000}
    before = torch.cuda.memory_allocated()
    with LLM(
        "-",
        hf_config=shape,
        load_format="dummy",
        quantization=quantization,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        show_progress=False,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        num_blocks=400,
    ) as llm:
        decoder = llm._engine.model
        assert isinstance(decoder, Decoder)
        expected = tokens(llm, prompts)
        awake, weights = torch.cuda.memory_allocated() - before, storage_bytes(decoder, "cuda")
        llm.sleep()
        assert storage_bytes(decoder, "cpu") == weights
        assert torch.cuda.memory_allocated() - before < 0.1 * weights
        llm.wake_up()
        assert (storage_bytes(decoder, "cuda"), storage_bytes(decoder, "cpu")) == (weights, 0)
        assert tokens(llm, prompts) == expected
        assert torch.cuda.memory_allocated() - before == pytest.approx(awake, rel=0.02)
        del decoder
