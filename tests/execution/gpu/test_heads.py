"""Gemma 4 in the GPU runner, in Triton's interpreter: layers whose heads differ in number and size, keys and values
that layers share, inputs of each layer, and experts beside a dense MLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.execution import platforms
from inflight.layers.attention.triton import rope_write
from tests.execution.gpu.interpreted import InterpretedPlatform
from tests.support.checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

PROMPTS = [[*range(40, 55)], [*range(40, 52), 9, 8], [7, 8, 9]]
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}


# The last two layers read the keys and values of the first two.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": SHAPE["layer_types"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 96,
}


def answers(folder: Path, **options: Any) -> list[list[int]]:
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 13, "block_size": 4, "num_blocks": 80}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    with LLM(folder, skip_tokenizer_init=True, show_progress=False, **(sizes | options)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert llm.stats().kv.num_used == 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(("family", "context"), [("gemma4", 24), ("gemma4-small", 64), ("gemma4-moe", 64)])
def test_heads_of_several_shapes_match_the_cpu(
    family: str, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a short context no layer has a window, and all read the prefix that requests share together."""
    changes = SMALL if family == "gemma4-small" else {}
    window = 6 if context == 64 else 24
    folder = write_checkpoint(tmp_path, family, **SHAPE | changes, sliding_window=window)
    expected = answers(folder, device="cpu", enable_prefix_caching=False, max_model_len=context)
    monkeypatch.setattr("inflight.layers.attention.triton.planner.PREFIX_MIN_BLOCKS", 2)
    monkeypatch.setattr("inflight.layers.attention.triton.planner.PREFIX_MIN_SAVED", 2)
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    place = InterpretedPlatform()
    monkeypatch.setattr(platforms, "platform", lambda _: place)
    assert answers(folder, dtype="float32", max_model_len=context) == expected
    runner = place.runners[-1]
    assert any(shape.prefix for shape in runner.upload.shapes_met)
    assert runner.decoder.kv_shape(4).windows == ((None, 6) if context == 64 else (None, None))
