"""Packages that embed and rerank, against a live server: openai, cohere, langchain and llama-index."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.server.live import Live, live_server
from tests.server.pooled import EMBEDDER, PooledBackend

MODEL = "a-model"
QUERY = "why does it rain?"
DOCUMENTS = ["a fox in the hills", "rain is water that falls", "seven", "snow"]
SECRET: Any = "secret"

# The clients' own warnings.
its_own = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    backend = PooledBackend(EMBEDDER)
    with live_server(backend, api_key=(SECRET,), served_model_name=(MODEL,)) as live:
        live.http.headers["authorization"] = f"Bearer {SECRET}"
        yield live
        live.wait_until_idle()
    backend.close()


@pytest.fixture(scope="module", autouse=True)
def _leave_nothing_open() -> Iterator[None]:
    """These packages leave connections to the garbage collector, which warns of each. It must come for them here."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            gc.collect()


@pytest.fixture(scope="module")
def vectors(server: Live) -> Any:
    data = server.post("/v1/embeddings", {"input": DOCUMENTS}).json()["data"]
    return np.asarray([item["embedding"] for item in data], dtype=np.float32)


@pytest.fixture(scope="module")
def ranking(server: Live) -> list[tuple[int, float]]:
    results = server.post("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    return [(item["index"], item["relevance_score"]) for item in results]


# ---- openai ----


def test_openai_client_gets_the_vectors(server: Live, vectors: Any) -> None:
    from openai import BadRequestError, OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key=SECRET, max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=DOCUMENTS)  # which asks for base64
        np.testing.assert_array_equal([item.embedding for item in answer.data], vectors)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
        numbers = client.embeddings.create(model=MODEL, input=DOCUMENTS, encoding_format="float")
        np.testing.assert_allclose([item.embedding for item in numbers.data], vectors, atol=1e-7)
        cut = client.embeddings.create(model=MODEL, input=[[5, 6]], dimensions=4, user="someone")
        assert len(cut.data[0].embedding) == 4
        with pytest.raises(BadRequestError, match="dimensions is 5"):
            client.embeddings.create(model=MODEL, input="a", dimensions=5)
        with pytest.raises(BadRequestError, match="cannot generate"):
            client.completions.create(model=MODEL, prompt="a")


async def test_async_openai_client_gets_the_vectors(server: Live, vectors: Any) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=SECRET) as client:
        answer = await client.embeddings.create(model=MODEL, input=DOCUMENTS)
        np.testing.assert_array_equal([item.embedding for item in answer.data], vectors)


# ---- cohere ----


@its_own
def test_cohere_client_gets_the_ranking(server: Live, ranking: list[tuple[int, float]]) -> None:
    import cohere

    client = cohere.ClientV2(api_key=SECRET, base_url=server.url)
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=100)
    assert [(item.index, item.relevance_score) for item in answer.results] == ranking
    assert answer.meta is not None
    assert answer.meta.tokens is not None
    assert (answer.meta.tokens.input_tokens or 0) > 0
    best = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [item.index for item in best.results] == [index for index, _ in ranking[:2]]
    with pytest.raises(cohere.BadRequestError):
        client.rerank(model=MODEL, query=QUERY, documents=[])
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2(api_key="wrong", base_url=server.url).rerank(
            model=MODEL, query=QUERY, documents=DOCUMENTS
        )


@its_own
def test_older_cohere_client_gets_the_ranking(server: Live, ranking: list[tuple[int, float]]) -> None:
    import cohere

    client = cohere.Client(api_key=SECRET, base_url=server.url)
    documents: Any = [{"text": text} for text in DOCUMENTS]
    answer = client.rerank(model=MODEL, query=QUERY, documents=documents, return_documents=True)
    assert [item.index for item in answer.results] == [index for index, _ in ranking]
    texts = [item.document.text for item in answer.results if item.document is not None]
    assert texts == [DOCUMENTS[index] for index, _ in ranking]


# ---- langchain ----


@pytest.fixture
def _no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")  # nothing leaves this machine


@its_own
@pytest.mark.usefixtures("_no_tracing")
def test_langchain_gets_the_vectors(server: Live, vectors: Any) -> None:
    from langchain_openai import OpenAIEmbeddings

    client = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SECRET,
        check_embedding_ctx_length=False,  # else it sends ids of OpenAI's vocabulary
        max_retries=0,
    )
    np.testing.assert_array_equal(client.embed_documents(DOCUMENTS), vectors)
    np.testing.assert_array_equal(client.embed_query(DOCUMENTS[0]), vectors[0])


@its_own
@pytest.mark.usefixtures("_no_tracing")
def test_langchain_gets_the_ranking(server: Live, ranking: list[tuple[int, float]]) -> None:
    from langchain_cohere import CohereRerank
    from langchain_core.documents import Document

    client = CohereRerank(model=MODEL, cohere_api_key=SECRET, base_url=server.url, top_n=3)
    answer = client.compress_documents([Document(text) for text in DOCUMENTS], QUERY)
    expected = [(DOCUMENTS[index], score) for index, score in ranking[:3]]
    assert [(item.page_content, item.metadata["relevance_score"]) for item in answer] == expected


# ---- llama-index ----


@its_own
def test_llama_index_gets_vectors_and_ranking(
    server: Live, vectors: Any, ranking: list[tuple[int, float]]
) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.embeddings.openai import OpenAIEmbedding
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    embedder = OpenAIEmbedding(model_name=MODEL, api_base=f"{server.url}/v1", api_key=SECRET, max_retries=0)
    np.testing.assert_array_equal(embedder.get_text_embedding_batch(DOCUMENTS), vectors)
    np.testing.assert_array_equal(embedder.get_query_embedding(DOCUMENTS[0]), vectors[0])
    reranker = CohereRerank(model=MODEL, api_key=SECRET, base_url=server.url, top_n=3, max_retries=1)
    nodes = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in DOCUMENTS]
    answer = reranker.postprocess_nodes(nodes, query_str=QUERY)
    expected = [(DOCUMENTS[index], score) for index, score in ranking[:3]]
    assert [(item.node.get_content(), item.score) for item in answer] == expected
