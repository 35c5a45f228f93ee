"""Vectors on the GPU: those of the CPU, from captured steps, for heads of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pooled import PooledEngine, random_texts, write_classifier, write_embedder, write_reranker

TEXTS = random_texts(512, 300, 1, 33, 90, 64, 64, 129, shared=1) * 9
PROMPTS = random_texts(40, 9, 17)


def vectors(folder: Path, generates: bool, **options: Any) -> tuple[Any, list[list[int]]]:
    engine = PooledEngine.load(folder, max_num_seqs=32, max_num_batched_tokens=1024, **options)
    for index, prompt in enumerate(PROMPTS if generates else []):
        engine.add(f"generates {index}", prompt, max_tokens=30)
    found = engine.pool(TEXTS)
    answers = [engine.tokens[name] for name in engine.tokens if name.startswith("generates")]
    engine.loaded.close()
    return found, answers


@pytest.mark.parametrize("eager", [False, True])
def test_a_reranker_beside_generation_in_float32_is_the_cpu(eager: bool, tmp_path: Path) -> None:
    folder = write_reranker(tmp_path / "Qwen3-Reranker")
    found, answers = vectors(folder, True, dtype="float32", enforce_eager=eager)
    expected, wanted = vectors(folder, True, dtype="float32", device="cpu")
    assert found == pytest.approx(expected, abs=1e-3)
    assert answers == wanted


@pytest.mark.parametrize("num_labels", [1, 2, 3, 65])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_labels_are_those_of_the_cpu(num_labels: int, dtype: str, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path, "llama", num_labels)
    found, _ = vectors(folder, False, dtype=dtype, skip_tokenizer_init=True)
    expected, _ = vectors(folder, False, dtype="float32", device="cpu", skip_tokenizer_init=True)
    assert np.abs(found - expected).max() < (1e-3 if dtype == "float32" else 0.3)


@pytest.mark.parametrize("dense", [0, 24])
def test_embeddings_are_those_of_the_cpu(dense: int, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path, dense)
    options = {"skip_tokenizer_init": True, "max_model_len": 512}
    found, _ = vectors(folder, False, dtype="float32", **options)
    expected, _ = vectors(folder, False, dtype="float32", device="cpu", **options)
    assert found == pytest.approx(expected, abs=1e-3)
