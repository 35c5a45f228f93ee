"""Vectors and tokens of one batch on the GPU runner match the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.execution import platforms
from inflight.execution.platforms import platform
from inflight.layers.attention.triton import rope_write
from tests.execution.gpu.interpreted import InterpretedPlatform
from tests.execution.gpu.test_runner import SHAPE
from tests.support.pooled import PooledEngine, random_texts, write_classifier, write_reranker

# Padding is computed from whatever was in memory, and its results are dropped.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

MAX_LEN = 40
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_blocks": 40,
    "max_model_len": MAX_LEN,
}
# Two share a beginning; one is as long as a row, and leaves no place for a token.
TEXTS = random_texts(MAX_LEN, 29, 5, 33, shared=4)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Qwen3-Reranker"
    return write_reranker(folder, **SHAPE | {"vocab_size": 320})


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> InterpretedPlatform:
    place = InterpretedPlatform()
    monkeypatch.setattr(platforms, "platform", lambda _: place)
    monkeypatch.setattr(rope_write, "FEW_TOKENS", rope_write.HeadTile(tokens=32, heads=8, num_warps=4))
    return place


def pool_beside(engine: PooledEngine, *prompts: list[int], texts: list[list[int]] = TEXTS) -> Any:
    for index, prompt in enumerate(prompts):
        engine.add(f"generates {index}", prompt, max_tokens=4)
    return engine.pool(texts)


def test_vectors_and_tokens_of_one_batch_match_the_cpu(
    reranker: Path, interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PooledEngine.load(reranker, **OPTIONS)
    actual = pool_beside(engine, [5, 6, 7, 8, 9], texts=TEXTS[:3])
    assert any({slot.samples for slot in record.slots} == {True, False} for record in engine.records)
    answer = engine.tokens["generates 0"]
    monkeypatch.setattr(platforms, "platform", platform)
    assert interpreted.runners
    on_cpu = PooledEngine.load(reranker, device="cpu", **OPTIONS)
    assert actual == pytest.approx(pool_beside(on_cpu, [5, 6, 7, 8, 9], texts=TEXTS[:3]), abs=1e-4)
    assert answer == on_cpu.tokens["generates 0"]


def test_classifier_samples_nothing(
    tmp_path: Path, interpreted: InterpretedPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_classifier(tmp_path, "llama", 3, **SHAPE | {"vocab_size": 320})
    engine = PooledEngine.load(folder, skip_tokenizer_init=True, **OPTIONS)
    runner = interpreted.runners[-1]
    runner.prepare(runner.buckets.usual()[:1])
    runner.warm_up_scoring()
    actual = pool_beside(engine, [1, 2, 3], texts=TEXTS[1:3])
    assert engine.ended["generates 0"].finish_reason == "error"
    monkeypatch.setattr(platforms, "platform", platform)
    on_cpu = PooledEngine.load(folder, device="cpu", skip_tokenizer_init=True, **OPTIONS)
    assert actual == pytest.approx(on_cpu.pool(TEXTS[1:3]), abs=1e-4)


def test_prompt_logprobs_and_vectors_share_a_step(reranker: Path, interpreted: InterpretedPlatform) -> None:
    """Such a step keeps the hidden states of all tokens, and the head picks its own among them."""
    engine = PooledEngine.load(reranker, **OPTIONS)
    alone = engine.pool(TEXTS[2:3])
    engine.vectors.clear()
    engine.score("scored", [9, 8, 7, 6])
    assert np.abs(engine.pool(TEXTS[2:3]) - alone).max() < 1e-5
    assert interpreted.runners
    assert any(shape.scores for shape in interpreted.runners[-1].upload.shapes_met)


def test_text_as_long_as_its_row_does_not_touch_the_next_row(
    reranker: Path, interpreted: InterpretedPlatform
) -> None:
    engine = PooledEngine.load(reranker, **OPTIONS)
    tokens = interpreted.runners[-1].rows.tokens
    tokens.fill_(-1)
    engine.pool(TEXTS[:1])
    assert sorted(tokens.tolist()) == [[-1] * MAX_LEN] * 3 + [TEXTS[0]]
