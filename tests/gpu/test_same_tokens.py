"""Tokens on the GPU match the CPU, however a step is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight import SamplingParams
from tests.gpu.conftest import Ask
from tests.support.checkpoints import FAMILIES

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_in_float32_matches_the_cpu(family: str, checkpoint: Checkpoint, ask: Ask) -> None:
    folder = checkpoint(family)
    assert ask(folder, dtype="float32") == ask(folder, dtype="float32", device="cpu")


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8}, {}]
)
def test_seeded_sampling_in_float32_matches_the_cpu(
    params: dict[str, float], checkpoint: Checkpoint, ask: Ask
) -> None:
    reference = SamplingParams(
        temperature=0.8,
        seed=5,
        max_tokens=24,
        ignore_eos=True,
        detokenize=False,
        **params,  # type: ignore[arg-type]
    )
    folder = checkpoint("qwen3")
    actual, expected = (
        ask(folder, reference, dtype="float32"),
        ask(folder, reference, dtype="float32", device="cpu"),
    )
    # A logarithm that rounds differently may change one sample in thousands; the rest of that answer then differs.
    assert sum(a == b for a, b in zip(actual, expected, strict=True)) >= len(expected) - 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_graphs_and_depth_change_nothing(dtype: str, checkpoint: Checkpoint, ask: Ask) -> None:
    folder = checkpoint("qwen3")
    expected = ask(folder, dtype=dtype)
    assert ask(folder, dtype=dtype, enforce_eager=True) == expected
    assert ask(folder, dtype=dtype, pipeline_depth=1) == expected


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss", "qwen3.5"])
def test_prefixes_and_chunks_change_nothing(family: str, checkpoint: Checkpoint, ask: Ask) -> None:
    folder = checkpoint(family)
    expected = ask(folder, dtype="float32")
    assert ask(folder, dtype="float32", enable_prefix_caching=False) == expected
    assert ask(folder, dtype="float32", max_num_batched_tokens=512) == expected
    assert ask(folder, dtype="float32", block_size=32, num_blocks=200) == expected


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-oss", "qwen3.5"])
def test_prefixes_and_chunks_change_nothing_with_an_fp8_kv_cache(
    family: str, checkpoint: Checkpoint, ask: Ask
) -> None:
    folder, options = checkpoint(family), {"dtype": "float32", "kv_cache_dtype": "fp8"}
    other_steps: list[dict[str, Any]] = [{"enable_prefix_caching": False}, {"max_num_batched_tokens": 512}]
    for skipped in ((), ("0",)):
        expected = ask(folder, **options, kv_cache_dtype_skip_layers=skipped)
        for more in other_steps:
            actual = ask(folder, **options, kv_cache_dtype_skip_layers=skipped, **more)
            # A key whose last bit differs may get the neighbouring code; the rest of that answer may then differ.
            assert sum(a == b for a, b in zip(actual, expected, strict=True)) >= len(expected) - 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_change_nothing_with_an_fp8_kv_cache(dtype: str, checkpoint: Checkpoint, ask: Ask) -> None:
    folder, options = checkpoint("qwen3"), {"dtype": dtype, "kv_cache_dtype": "fp8"}
    assert ask(folder, **options) == ask(folder, **options, enforce_eager=True)


def test_preemption_changes_nothing(checkpoint: Checkpoint, ask: Ask) -> None:
    folder = checkpoint("llama")
    assert ask(folder, dtype="float32", num_blocks=24, max_model_len=260) == ask(folder, dtype="float32")


@pytest.mark.parametrize(
    "more",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5, "frequency_penalty": 0.4}, {"logit_bias": {7: 3.0}},
     {"min_tokens": 5}, {"logprobs": 3}, {"allowed_token_ids": [4, 5, 6, 7]}],
)  # fmt: skip
def test_requests_sampled_outside_the_graph_match_the_cpu(
    more: dict[str, object], checkpoint: Checkpoint, ask: Ask
) -> None:
    reference = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, **more)  # type: ignore[arg-type]
    folder = checkpoint("qwen3")
    assert ask(folder, reference, dtype="float32") == ask(folder, reference, dtype="float32", device="cpu")
