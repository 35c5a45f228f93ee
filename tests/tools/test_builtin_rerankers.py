"""The reranker and the embedder that ship: complete, small, as good as the docs say, and what transformers computes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

import tools.rerankers
from inflight.checkpoint.builtin import builtin_folder
from inflight.cli.main import app
from inflight.entrypoints.llm import LLM
from tools.rerankers.evaluate import figures, table, written_lists
from tools.rerankers.ranked import RankedList

ROOT = Path(tools.rerankers.__file__).parents[2]
QUERY = "why does it rain?"
TEXTS = [
    "Water vapor rises, cools high up and falls back to the ground as drops.",
    "A guitar has six strings.",
    "Hi",
]


@pytest.fixture(scope="module")
def evaluated() -> Any:
    """What was measured after the training."""
    return json.loads((ROOT / "tools" / "rerankers" / "eval.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reranker() -> Iterator[LLM]:
    with LLM(builtin_folder("reranker"), dtype="float32", show_progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def embedder() -> Iterator[LLM]:
    with LLM(builtin_folder("embedder"), dtype="float32", show_progress=False) as llm:
        yield llm


def scores(llm: LLM, query: str, texts: list[str]) -> list[float]:
    return [output.outputs.score for output in llm.score(query, texts, use_tqdm=False)]


def test_files_are_complete_small_and_packaged() -> None:
    common = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    sentence_files = {
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = project["tool"]["setuptools"]["package-data"]["inflight"]
    size = 0
    for folder, expected in (
        (builtin_folder("reranker"), common),
        (builtin_folder("embedder"), common | sentence_files),
    ):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {path.relative_to(folder).as_posix() for path in files} == expected
        inside = [path.relative_to(ROOT / "inflight").as_posix() for path in files]
        assert all(any(PurePath(path).match(pattern) for pattern in packaged) for path in inside)
        size += sum(path.stat().st_size for path in files)
    assert size < 6_000_000


def test_rankings_match_the_recorded_evaluation(reranker: LLM, embedder: LLM, evaluated: Any) -> None:
    def first(one: RankedList, found: list[float]) -> str:
        return one.texts[found.index(max(found))]

    for name, lists in written_lists().items():
        for key, llm in (("cross_encoder", reranker), ("embedder", embedder)):
            found = [scores(llm, one.query, list(one.texts)) for one in lists]
            assert figures(found) == evaluated["sets"][name][key]
            told = [evaluated["first_texts"][f"{name}: {one.query}"][key] for one in lists]
            assert [first(one, of_one) for one, of_one in zip(lists, found, strict=True)] == told


def test_scores_match_transformers(reranker: LLM) -> None:
    folder = builtin_folder("reranker")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    batch = AutoTokenizer.from_pretrained(folder)(
        [QUERY] * len(TEXTS), TEXTS, return_tensors="pt", padding=True
    )
    with torch.inference_mode():
        expected = torch.sigmoid(model(**batch).logits[:, 0])
    np.testing.assert_allclose(scores(reranker, QUERY, TEXTS), expected, atol=1e-4)


def test_embeddings_match_transformers(embedder: LLM) -> None:
    folder = builtin_folder("embedder")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, return_tensors="pt", padding=True)
    with torch.inference_mode():
        states = model(**batch).last_hidden_state * batch["attention_mask"][..., None]
    expected = torch.nn.functional.normalize(states.sum(1), dim=-1)
    found = [output.outputs.vector for output in embedder.embed(TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(np.stack(found), expected, atol=1e-4)
    shorter = embedder.embed(TEXTS, dimensions=32, use_tqdm=False)[0].outputs.vector
    beginning = expected[0, :32]
    np.testing.assert_allclose(shorter, beginning / beginning.norm(), atol=1e-4)


def test_commands_use_the_built_in_models(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(reversed(TEXTS)), encoding="utf-8")
    ranked = CliRunner().invoke(app, ["rerank", QUERY, str(file), "--json"], catch_exceptions=False)
    assert json.loads(ranked.stdout)["results"][0]["document"] == TEXTS[0]
    embedded = CliRunner().invoke(app, ["embed", "hello"], catch_exceptions=False)
    assert len(json.loads(embedded.stdout)["embedding"]) == 128


def test_docs_quote_the_recorded_figures(evaluated: Any) -> None:
    assert table(evaluated["sets"]) in (ROOT / "docs" / "scoring.md").read_text(encoding="utf-8")
