"""Embeddings, classes, scores and rankings over HTTP, from a head whose vectors are known."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.server.live import Live, live_server
from tests.server.pooled import CLASSIFIER, EMBEDDER, MAX_LEN, RERANKER, TOKENIZER, PooledBackend, vector_of

TEXTS = ["a fox", "the rain in the hills", "why?"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[Live]:
    yield from served(PooledBackend(EMBEDDER))


@pytest.fixture(scope="module")
def classifier() -> Iterator[Live]:
    yield from served(PooledBackend(CLASSIFIER))


@pytest.fixture(scope="module")
def reranker() -> Iterator[Live]:
    """It generates too."""
    yield from served(PooledBackend(RERANKER, generates=True))


def served(backend: PooledBackend) -> Iterator[Live]:
    with live_server(backend, served_model_name=("a-model",)) as live:
        yield live
        live.wait_until_idle()
    backend.close()


def answer(live: Live, path: str, **body: Any) -> Any:
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def embedding(ids: list[int], dimensions: int = 16) -> NDArray[np.float32]:
    vector = vector_of(ids, 16)[:dimensions]
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


# ---- embeddings ----


@pytest.mark.parametrize(
    ("inputs", "texts"),
    [
        (TEXTS[0], [ids_of(TEXTS[0])]),
        (TEXTS, [ids_of(text) for text in TEXTS]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        (["a fox", [8]], [ids_of("a fox"), [8]]),
    ],
)
def test_embeddings_match_the_reference(embedder: Live, inputs: Any, texts: list[list[int]]) -> None:
    result = answer(embedder, "/v1/embeddings", input=inputs)
    assert result["object"] == "list"
    assert result["model"] == "a-model"
    assert [item["index"] for item in result["data"]] == list(range(len(texts)))
    assert {item["object"] for item in result["data"]} == {"embedding"}
    for item, ids in zip(result["data"], texts, strict=True):
        np.testing.assert_allclose(item["embedding"], embedding(ids), atol=1e-6)
    num_tokens = sum(map(len, texts))
    assert result["usage"]["prompt_tokens"] == result["usage"]["total_tokens"] == num_tokens


def test_base64_is_little_endian_float32(embedder: Live) -> None:
    as_numbers = answer(embedder, "/v1/embeddings", input=TEXTS, encoding_format="float")["data"]
    as_bytes = answer(embedder, "/v1/embeddings", input=TEXTS, encoding_format="base64")["data"]
    for numbers, text in zip(as_numbers, as_bytes, strict=True):
        vector = np.frombuffer(base64.b64decode(text["embedding"]), dtype="<f4")
        np.testing.assert_array_equal(vector, np.asarray(numbers["embedding"], dtype=np.float32))


def test_dimensions_truncate_and_prompts_are_prepended(embedder: Live) -> None:
    result = answer(embedder, "/v1/embeddings", input="a fox", dimensions=4, encoding_format="base64")
    vector = np.frombuffer(base64.b64decode(result["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(vector, embedding(ids_of("a fox"), 4), atol=1e-6)
    result = answer(embedder, "/v1/embeddings", input="a fox", prompt_name="query")
    np.testing.assert_allclose(result["data"][0]["embedding"], embedding(ids_of("query: a fox")), atol=1e-6)


def test_long_text_is_truncated_only_on_request(embedder: Live) -> None:
    text = "word " * (2 * MAX_LEN)
    refused = embedder.post("/v1/embeddings", {"input": text})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "input"
    for how, length in (
        ({"truncate": True}, MAX_LEN),
        ({"truncate_prompt_tokens": -1}, MAX_LEN),
        ({"truncate_prompt_tokens": 7}, 7),
    ):
        result = answer(embedder, "/v1/embeddings", input=text, **how)
        assert result["usage"]["prompt_tokens"] == length


# ---- scores and rankings ----


def test_scores_are_cosines_of_embeddings(embedder: Live) -> None:
    result = answer(embedder, "/score", text_1="a fox", text_2=TEXTS)
    assert result["scale"] == "cosine"
    query = embedding(ids_of("query: a fox"))
    expected = [float(query @ embedding(ids_of(f"passage: {text}"))) for text in TEXTS]
    np.testing.assert_allclose([item["score"] for item in result["data"]], expected, atol=1e-6)
    same = answer(embedder, "/v1/score", queries=["a fox"] * 3, documents=TEXTS)
    assert same["data"] == result["data"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranking_lists_the_best_first(reranker: Live, path: str) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1], "title": "Rain"}, TEXTS[2]]
    result = answer(reranker, path, query="what falls?", documents=documents, return_documents=True)
    assert result["scale"] == "softmax"
    scores = {item["index"]: item["relevance_score"] for item in result["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert all(0 <= score <= 1 for score in scores.values())
    pairs = answer(reranker, "/score", text_1="what falls?", text_2=TEXTS)["data"]
    assert scores == {item["index"]: item["score"] for item in pairs}
    returned = {item["index"]: item["document"] for item in result["results"]}
    assert returned == {0: {"text": TEXTS[0]}, 1: documents[1], 2: {"text": TEXTS[2]}}
    assert result["meta"]["tokens"]["input_tokens"] == result["usage"]["total_tokens"] > 0
    best = answer(reranker, path, query="what falls?", documents=documents, top_n=2)["results"]
    assert [{**item, "document": returned[item["index"]]} for item in best] == result["results"][:2]


def test_scale_can_be_chosen(reranker: Live) -> None:
    body = {"query": "what falls?", "documents": TEXTS}
    logits = answer(reranker, "/rerank", **body, scale="logit")
    assert logits["scale"] == "logit"
    shares = answer(reranker, "/rerank", **body)["results"]
    for logit, share in zip(logits["results"], shares, strict=True):
        assert 1 / (1 + np.exp(-logit["relevance_score"])) == pytest.approx(
            share["relevance_score"], rel=1e-5
        )
    refused = reranker.post("/rerank", {**body, "scale": "cosine"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "scale")


def test_generating_and_scoring_share_an_engine(reranker: Live) -> None:
    assert answer(reranker, "/v1/completions", prompt=[5, 6], max_tokens=2)["usage"]["completion_tokens"] == 2
    first = answer(reranker, "/rerank", query="a very long question " * 8, documents=TEXTS[:1])
    again = answer(reranker, "/rerank", query="a very long question " * 8, documents=TEXTS[1:])
    cached = [result["meta"]["cached_tokens"] for result in (first, again)]
    assert cached[1] > 2 * cached[0]  # what both have in common is result twice, and now the query with it
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == cached[1]


# ---- classes ----


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_have_labels_and_probabilities(classifier: Live, path: str) -> None:
    result = answer(classifier, path, input=TEXTS)
    assert result["scale"] == "softmax"
    assert result["labels"] == list(CLASSIFIER.labels)
    for item, text in zip(result["data"], TEXTS, strict=True):
        weights = np.exp(vector_of(ids_of(text), 3))
        np.testing.assert_allclose(item["probs"], weights / weights.sum(), rtol=1e-5)
        assert item["label"] == CLASSIFIER.labels[int(weights.argmax())]
        assert item["num_classes"] == 3
    logits = answer(classifier, path, input=TEXTS[0], scale="logit")
    np.testing.assert_allclose(logits["data"][0]["probs"], vector_of(ids_of(TEXTS[0]), 3), rtol=1e-6)


# ---- what a model can do ----


def test_model_list_names_the_tasks(embedder: Live, classifier: Live, reranker: Live) -> None:
    def card(live: Live) -> Any:
        return live.http.get("/v1/models").json()["data"][0]

    assert card(embedder)["tasks"] == ["embed", "score", "rerank"]
    assert card(embedder)["pooling"]["dimensions"] == [4, 8]
    assert card(embedder)["pooling"]["prompts"] == ["query", "document"]
    assert card(classifier)["tasks"] == ["classify"]
    assert card(classifier)["pooling"]["labels"] == ["bad", "fair", "good"]
    assert card(reranker)["tasks"] == ["generate", "score", "rerank"]
    assert card(reranker)["pooling"]["scale"] == "softmax"


BODIES: dict[str, Any] = {
    "/v1/embeddings": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def test_unsupported_task_is_rejected_with_the_supported_ones(
    embedder: Live, classifier: Live, reranker: Live, live: Live
) -> None:
    for server, paths, can in (
        (embedder, ["/classify", "/v1/completions", "/v1/chat/completions"], "embed, score, rerank"),
        (classifier, ["/v1/embeddings", "/score", "/v2/rerank", "/v1/completions"], "classify"),
        (reranker, ["/v1/embeddings", "/classify"], "generate, score, rerank"),
        (live, ["/v1/embeddings", "/classify", "/score", "/v2/rerank"], "generate"),
    ):
        for path in paths:
            response = server.post(path, BODIES[path])
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_task", "model")
            assert error["message"].endswith(f": it can {can}")
