"""The built-in reranker and embedder over HTTP: a real encoder in an engine with its own process."""

from __future__ import annotations

import pytest

from inflight import LLM
from inflight.checkpoint.builtin import builtin_folder
from tests.server.test_command import serving

QUERY = "why does it rain?"
DOCUMENTS = [
    "Bread is baked in an oven.",
    "It rains when clouds cool and their water falls.",
    "Two and two are four.",
]


def test_ranking_matches_the_offline_api() -> None:
    folder = str(builtin_folder("reranker"))
    with LLM(folder, show_progress=False) as llm:
        expected = llm.rerank(QUERY, DOCUMENTS, use_tqdm=False)
    with serving("inflight-builtin-reranker") as (_, http, said):
        assert "Tasks          classify, score, rerank" in said
        assert "KV cache" not in said
        answer = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
    assert [item["index"] for item in answer["results"]] == [item.index for item in expected]
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == [item.relevance_score for item in expected]
    assert (answer["model"], answer["scale"]) == ("inflight-builtin-reranker", "sigmoid")


def test_embeddings_match_the_offline_api() -> None:
    folder = str(builtin_folder("embedder"))
    with LLM(folder, show_progress=False) as llm:
        expected = [output.outputs.embedding for output in llm.embed(DOCUMENTS, use_tqdm=False)]
    with serving("inflight-builtin-embedder") as (_, http, _):
        answer = http.post("/v1/embeddings", json={"input": DOCUMENTS}).json()
        refused = http.post("/v1/completions", json={"prompt": "Hello"})
    for item, vector in zip(answer["data"], expected, strict=True):
        assert item["embedding"] == pytest.approx(vector, abs=1e-7)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unsupported_task"
