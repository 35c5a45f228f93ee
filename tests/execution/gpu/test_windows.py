"""Windows in the GPU runner, in Triton's interpreter: their own block tables and plans give the tokens of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.execution import platforms
from inflight.layers.attention.triton import rope_write
from tests.execution.gpu.interpreted import InterpretedPlatform
from tests.support.checkpoints import write_checkpoint

PROMPTS = [[*range(40, 53)], [*range(40, 49), 9, 8]]
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 1,
}


def answers(folder: Path, **options: Any) -> list[list[int]]:
    """Each prompt's tokens, and those of a second turn that continues the first."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 11, "block_size": 4, "num_blocks": 60}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **sizes, **options) as llm:
        assert llm._engine.facts.windows == (None, 6)
        first = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        second = [[*prompt, *tokens, 3] for prompt, tokens in zip(PROMPTS, first, strict=True)]
        outputs = llm.generate(second, params, use_tqdm=False)
        assert all(output.num_cached_tokens for output in outputs) == ("device" not in options)
        assert llm.stats().kv.num_used == 0
    return [*first, *(output.outputs[0].token_ids for output in outputs)]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # rows of padding hold anything
def test_windows_match_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", layer_types=None, **LAYERS)
    expected = answers(folder, device="cpu", enable_prefix_caching=False)
    monkeypatch.setattr(platforms, "platform", lambda _: InterpretedPlatform())
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    assert answers(folder, dtype="float32") == expected
