"""Decoders with a head against transformers, and against themselves: however they are scheduled, and beside whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight import LLM, SamplingParams
from inflight.errors import RequestError
from inflight.layers.native_kernels import NativeKernels
from inflight.models.heads import Head
from tests.e2e.policies import GREEDY_CONTINUOUS
from tests.support.checkpoints import DENSE_FAMILIES
from tests.support.pooled import (
    PooledEngine,
    random_texts,
    transformers_embeddings,
    transformers_labels,
    transformers_next,
    write_classifier,
    write_embedder,
    write_reranker,
)

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "London is large.", "A fox jumps over the lazy dog."]
# Tight memory and small steps: chunks, hits and preemptions.
SCARCE: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 54,
    "max_num_batched_tokens": 8,
    "policy": GREEDY_CONTINUOUS,
    "max_model_len": 200,
}


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("models") / "Qwen3-Reranker-Tiny")


def model_card_scores(folder: Path) -> NDArray[np.float32]:
    """The probability of yes for each document, as Qwen3-Reranker's card computes it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    bodies = [
        f"<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}" for document in DOCUMENTS
    ]
    before, after, *bodies = (
        tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix, *bodies)
    )
    logits = transformers_next(folder, [before + body + after for body in bodies])
    both = torch.from_numpy(logits[:, [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]])
    scores: NDArray[np.float32] = both.log_softmax(-1)[:, 1].exp().numpy()
    return scores


def test_reranker_scores_as_its_model_card_does(reranker: Path) -> None:
    expected = model_card_scores(reranker)
    assert np.abs(np.diff(expected)).min() > 1e-3  # else documents in a wrong order would pass
    with LLM(reranker, show_progress=False, max_num_batched_tokens=64) as llm:
        outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        best = llm.rerank(QUERY, DOCUMENTS, top_n=1, use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
    assert [result.index for result in best] == [int(expected.argmax())]


def test_generation_and_scoring_share_batches_and_memory(reranker: Path) -> None:
    """Chunked, preempted, hit, beside requests that generate: the same as alone, to the bit, for both."""
    texts = random_texts(200, 61, 90, 5, 90, 61, shared=3)
    prompts = random_texts(30, 9, 17, shared=2)
    alone = PooledEngine.load(reranker)
    one_by_one = [alone.pool([text])[0] for text in texts]
    with LLM(reranker, show_progress=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        answers = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    for depth in (1, 2):
        engine = PooledEngine.load(reranker, pipeline_depth=depth, **SCARCE)
        for name, prompt in enumerate(prompts):
            engine.add(f"generates {name}", prompt, max_tokens=60)
        batched = engine.pool(texts)
        assert [engine.tokens[f"generates {name}"] for name in range(len(prompts))] == answers
        if isinstance(engine.decoder.kernels, NativeKernels):
            assert batched.tolist() == np.array(one_by_one).tolist()
        assert batched == pytest.approx(np.array(one_by_one), abs=1e-4)
        ended = [engine.ended[str(index)].record for index in range(len(texts))]
        assert any(record and record.num_preemptions for record in ended)
        together = [
            {slot.request_id.startswith("generates") for slot in record.slots} for record in engine.records
        ]
        assert {True, False} in together


def test_shared_prefix_of_documents_is_computed_once(reranker: Path) -> None:
    shared, block_size = 40, 8
    texts = random_texts(47, 55, 48, 60, 41, shared=shared)
    engine = PooledEngine.load(reranker, block_size=block_size, max_num_batched_tokens=16)
    engine.pool(texts)
    assert engine.num_computed == shared + sum(len(text) - shared for text in texts)
    engine.pool(texts)  # once more: of each, only the last block is not found
    again = sum(len(text) - (len(text) - 1) // block_size * block_size for text in texts)
    assert engine.num_computed == shared + sum(len(text) - shared for text in texts) + again


def test_non_finite_vector_fails_only_its_request(reranker: Path) -> None:
    class Broken:
        def __init__(self, head: Head) -> None:
            self.size, self.head = head.size, head

        def __call__(self, pooled: Tensor) -> Tensor:
            assert len(pooled) == 2
            vectors = self.head(pooled)
            vectors[0, 1] = torch.nan
            return vectors

    engine = PooledEngine.load(reranker)
    decoder = engine.decoder
    assert decoder.pooling_head is not None
    decoder.pooling_head = Broken(decoder.pooling_head)
    engine.add("generates", [1, 2, 3], max_tokens=4)
    for name, text in enumerate(random_texts(5, 6)):
        engine.add(str(name), text)
    engine.run()
    assert engine.ended["0"].error_code == "logits_not_finite"
    assert "0" not in engine.vectors
    assert np.isfinite(engine.vector("1")).all()
    assert len(engine.tokens["generates"]) == 4


@pytest.mark.parametrize(
    ("family", "num_labels"), [(family, 3) for family in DENSE_FAMILIES] + [("qwen3", 1)]
)
def test_labels_match_transformers(family: str, num_labels: int, tmp_path: Path) -> None:
    folder = write_classifier(tmp_path, family, num_labels)
    texts = random_texts(60, 1, 33, 90, 60, shared=1)
    # Models with windows need blocks for both kinds of layers.
    options = SCARCE | {"max_model_len": 150}
    engine = PooledEngine.load(folder, skip_tokenizer_init=True, **options)
    facts = engine.loaded.facts
    assert not facts.generates
    assert facts.pooling is not None
    assert (facts.pooling.task, facts.pooling.size, facts.pooling.scores) == ("classify", num_labels, None)
    assert facts.pooling.labels == tuple(f"LABEL_{index}" for index in range(num_labels))
    assert facts.pooling.scale == ("softmax" if num_labels > 1 else "sigmoid")
    assert engine.pool(texts) == pytest.approx(transformers_labels(folder, texts), abs=1e-4)


@pytest.mark.parametrize("dense", [0, 24])
def test_embeddings_match_the_last_hidden_state_of_transformers(dense: int, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path, dense)
    texts = random_texts(60, 1, 33, 90, 60, shared=1)
    engine = PooledEngine.load(folder, skip_tokenizer_init=True, **SCARCE | {"max_model_len": None})
    facts = engine.loaded.facts
    assert not facts.generates
    assert facts.max_model_len == 128
    assert facts.pooling is not None
    assert (facts.pooling.task, facts.pooling.size, facts.pooling.normalize) == ("embed", dense or 64, True)
    assert (facts.pooling.scores, facts.pooling.prompts) == ("cosine", {"query": "Query: "})
    assert engine.pool(texts) == pytest.approx(transformers_embeddings(folder, texts), abs=1e-4)
    again = PooledEngine.load(folder, skip_tokenizer_init=True, load_format="dummy")
    assert np.isfinite(again.pool(texts[:1])).all()


def test_model_without_a_language_head_does_not_generate(tmp_path: Path) -> None:
    """The validator refuses such requests; one that reaches the engine nevertheless fails alone."""
    folder = write_classifier(tmp_path, "llama", 2)
    with (
        LLM(folder, skip_tokenizer_init=True, show_progress=False) as llm,
        pytest.raises(RequestError, match="cannot generate: it can classify"),
    ):
        llm.generate([[1, 2, 3]], use_tqdm=False)
    engine = PooledEngine.load(folder, skip_tokenizer_init=True)
    engine.add("generates", [1, 2, 3], max_tokens=4)
    assert np.isfinite(engine.pool([[4, 5]])).all()
    assert engine.ended["generates"].finish_reason == "error"
