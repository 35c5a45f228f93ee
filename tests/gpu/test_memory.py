"""The share of the GPU that an engine takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.errors import KVBudgetError


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_gpu_memory_utilization_is_respected(
    share: float, checkpoint: Callable[..., Path], prompts: list[list[int]]
) -> None:
    folder = checkpoint("qwen3")
    with LLM(
        folder, skip_tokenizer_init=True, show_progress=False, dtype="bfloat16", gpu_memory_utilization=share
    ) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True), use_tqdm=False)
        free, total = torch.cuda.mem_get_info()
        assert 1 - free / total == pytest.approx(share, abs=0.02)
    free, total = torch.cuda.mem_get_info()
    assert 1 - free / total < 0.1  # given back


def test_more_memory_than_available_is_rejected(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(KVBudgetError, match="are free on cuda"):
        LLM(checkpoint("qwen3"), skip_tokenizer_init=True, show_progress=False, kv_cache_memory=1 << 50)
