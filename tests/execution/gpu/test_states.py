"""Recurrent layers in the GPU's runner: states of rows, snapshots and captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.execution import platforms
from inflight.layers.attention.triton import rope_write
from tests.execution.gpu.interpreted import InterpretedPlatform
from tests.support.checkpoints import write_checkpoint

# Padding is computed from whatever was in memory, and its results are dropped.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

SHARED = list(range(3, 21))
PROMPTS = [[*SHARED, 1], [*SHARED, 1, 4, 5, 6, 7, 8, 9], [5, 6, 7]]


def answers(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    """Return the tokens for the prompts, the first one alone and then all at once, and the number of cached ones."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size": 8, "num_blocks": 200} | options
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **options) as llm:
        outputs = [
            *llm.generate(PROMPTS[:1], params, use_tqdm=False),
            *llm.generate(PROMPTS, params, use_tqdm=False),
        ]
    return [output.outputs[0].token_ids for output in outputs], sum(
        output.num_cached_tokens or 0 for output in outputs
    )


def test_recurrent_states_match_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    folder = write_checkpoint(tmp_path, "qwen3.5", **layers)
    expected, num_cached = answers(folder, device="cpu")
    assert num_cached == 2 * 16
    monkeypatch.setattr(platforms, "platform", lambda _: InterpretedPlatform())
    # The interpreter takes its time by the program: few and large ones.
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    assert answers(folder) == (expected, num_cached)
