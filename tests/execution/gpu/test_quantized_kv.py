"""An fp8 KV cache in the GPU runner, in Triton's interpreter: tokens do not depend on chunks and prefix hits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from inflight.execution import platforms
from inflight.layers.attention import cpu
from inflight.layers.attention.triton import rope_write
from tests.execution.gpu.interpreted import InterpretedPlatform
from tests.support.checkpoints import write_checkpoint

SHARED = [*range(40, 53)]
PROMPTS = [SHARED, [*SHARED[:9], 9, 8], [*SHARED[:12], 7]]
WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 1,
    "layer_types": None,
}
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def answers(folder: Path, max_num_batched_tokens: int = 64, **options: Any) -> list[Any]:
    """Each prompt's tokens and log-probabilities, and those of a second turn that continues the first."""
    sizes = {"max_num_seqs": 4, "block_size": 4, "num_blocks": 60}
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, logprobs=1)
    with LLM(
        folder,
        skip_tokenizer_init=True,
        show_progress=False,
        max_num_batched_tokens=max_num_batched_tokens,
        **sizes,
        **options,
    ) as llm:
        first = llm.generate(PROMPTS, params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in first]
        second = [[*prompt, *answer, 3] for prompt, answer in zip(PROMPTS, tokens, strict=True)]
        outputs = [*first, *llm.generate(second, params, use_tqdm=False)]
        assert llm.stats().kv.num_used == 0
    return [
        (token, pytest.approx(position[token].logprob, abs=2e-4))
        for output in outputs
        for token, position in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True)
    ]


def interpret(monkeypatch: pytest.MonkeyPatch) -> InterpretedPlatform:
    platform = InterpretedPlatform()
    monkeypatch.setattr(platforms, "platform", lambda _: platform)
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    return platform


def on_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """The answers of plain torch, each prompt computed as a whole."""
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "native_library", lambda: None)
        defaults = replace(platforms.CpuPlatform.defaults, kv_cache_dtypes=("auto", "fp8"))
        patch.setattr(platforms.CpuPlatform, "defaults", defaults)
        return answers(folder, device="cpu", enable_prefix_caching=False, **options)


@pytest.mark.parametrize("layers", [{}, WINDOWS], ids=["plain", "windows"])
def test_answers_do_not_depend_on_chunks_and_hits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: dict[str, Any]
) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", **layers)
    expected = on_cpu(folder, monkeypatch, kv_cache_dtype="fp8")
    platform = interpret(monkeypatch)
    fp8 = {"kv_cache_dtype": "fp8", "dtype": "float32"}
    assert answers(folder, 64, enable_prefix_caching=False, **fp8) == expected
    assert answers(folder, 5, **fp8) == expected
    for runner in platform.runners:
        assert all(layer.is_quantized for layer in runner.decoder.kv_shape(4).layers)


def test_skipped_layers_are_not_quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", **WINDOWS)
    options = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ("sliding_window",), "dtype": "float32"}
    expected = on_cpu(folder, monkeypatch, **options)
    platform = interpret(monkeypatch)
    assert answers(folder, 7, **options) == expected
    layers = platform.runners[0].decoder.kv_shape(4).layers
    assert [(layer.window, layer.is_quantized) for layer in layers] == [(None, True), (6, False)]
