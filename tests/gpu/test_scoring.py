"""Vectors from captured steps on the GPU match the CPU, for heads of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inflight.execution.gpu.device import EagerSteps, StepGraphs
from inflight.execution.gpu.encoder_runner import GpuEncoderRunner
from inflight.models.heads import POOLINGS
from tests.support.encoder_checkpoints import load, make_encoder, texts, write_pooling
from tests.support.encoder_checkpoints import vectors as encoded
from tests.support.pooled import PooledEngine, random_texts, write_classifier, write_embedder, write_reranker

TEXTS = random_texts(512, 300, 1, 33, 90, 64, 64, 129, shared=1) * 9
PROMPTS = random_texts(40, 9, 17)


def vectors(folder: Path, generates: bool, **options: Any) -> tuple[Any, list[list[int]]]:
    engine = PooledEngine.load(
        folder, max_num_seqs=32, max_num_batched_tokens=1024, num_blocks=1000, **options
    )
    for index, prompt in enumerate(PROMPTS if generates else []):
        engine.add(f"generates {index}", prompt, max_tokens=30)
    actual = engine.pool(TEXTS)
    answers = [engine.tokens[name] for name in engine.tokens if name.startswith("generates")]
    engine.loaded.close()
    return actual, answers


@pytest.mark.parametrize("eager", [False, True])
def test_reranker_beside_generation_in_float32_matches_the_cpu(eager: bool, tmp_path: Path) -> None:
    folder = write_reranker(tmp_path / "Qwen3-Reranker")
    actual, answers = vectors(folder, True, dtype="float32", enforce_eager=eager)
    expected, reference = vectors(folder, True, dtype="float32", device="cpu")
    assert actual == pytest.approx(expected, abs=1e-3)
    assert answers == reference


@pytest.mark.parametrize("num_labels", [1, 2, 3, 65])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_labels_match_the_cpu(num_labels: int, dtype: str, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path, "llama", num_labels)
    actual, _ = vectors(folder, False, dtype=dtype, skip_tokenizer_init=True)
    expected, _ = vectors(folder, False, dtype="float32", device="cpu", skip_tokenizer_init=True)
    assert np.abs(actual - expected).max() < (1e-3 if dtype == "float32" else 0.3)


@pytest.mark.parametrize("dense", [0, 24])
def test_embeddings_match_the_cpu(dense: int, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path, dense)
    options = {"skip_tokenizer_init": True, "max_model_len": 512}
    actual, _ = vectors(folder, False, dtype="float32", **options)
    expected, _ = vectors(folder, False, dtype="float32", device="cpu", **options)
    assert actual == pytest.approx(expected, abs=1e-3)


# ---- encoders ----

ENCODED = texts([96, 1, 33, 64, 7, 2, 90, 65, 50, 12] * 8)
SECONDS = [0, 0, 5, 63, 3, 1, 0, 1, 20, 0] * 8


def encoder_vectors(folder: Path, seconds: list[int], **options: Any) -> NDArray[np.float32]:
    """[texts, size], computed twice by one engine: what is left of steps reaches nobody."""
    engine = load(folder, max_num_seqs=32, max_num_batched_tokens=700, **options)
    runner = engine.core.runner
    if isinstance(runner, GpuEncoderRunner):
        assert isinstance(runner.steps, EagerSteps if options.get("enforce_eager") else StepGraphs)
    first, actual = (np.array(encoded(engine, ENCODED, seconds)) for _ in range(2))
    engine.close()
    assert np.isfinite(first).all()
    assert np.abs(actual - first).max() < 1e-2 * np.abs(first).max()
    return actual


def assert_captured_steps_are_right(folder: Path, seconds: list[int]) -> None:
    """In float32 the reference is the CPU; in bfloat16, the same kernels launched one by one."""
    captured = encoder_vectors(folder, seconds, device="cuda", dtype="float32")
    expected = encoder_vectors(folder, seconds, dtype="float32")
    assert np.abs(captured - expected).max() < 1e-3
    captured = encoder_vectors(folder, seconds, device="cuda", dtype="bfloat16")
    eager = encoder_vectors(folder, seconds, device="cuda", dtype="bfloat16", enforce_eager=True)
    assert np.abs(captured - eager).max() < 2e-2 * np.abs(eager).max()
    assert np.abs(captured - expected).max() < max(0.3, 0.1 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "distilbert", "modernbert"])
def test_classifying_encoders_match_the_cpu(family: str, tmp_path: Path) -> None:
    make_encoder(family, classifier=True, num_labels=3).save_pretrained(tmp_path)
    assert_captured_steps_are_right(tmp_path, SECONDS if family == "bert" else [0] * len(SECONDS))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling_of_an_encoder_matches_the_cpu(pooling: str, tmp_path: Path) -> None:
    make_encoder("bert", classifier=False).save_pretrained(tmp_path)
    assert_captured_steps_are_right(write_pooling(tmp_path, pooling), SECONDS)
