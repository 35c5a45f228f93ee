"""Calls that embed, classify and score: what they check, and their results against torch in double precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

from inflight.errors import EngineError, ParameterError, PromptError, RequestError
from inflight.events import Delta
from inflight.frontend.scoring import (
    CHUNK_TEXTS,
    CallOptions,
    Matrix,
    PooledVectors,
    ScoringCall,
    ScoringJob,
    ScoringProcessor,
    check_top_n,
    classified,
    cosines,
    embedded,
    ranked,
    scored,
)
from inflight.request import RequestContext
from inflight.scoring import ClassifyParams, EmbedParams, PoolingFacts, ScoreParams, Task, parameter_help

from .scoring_engine import CROSS_ENCODER, EMBEDDER, RERANKER, frontend, inputs

LOGITS: Matrix = np.array([[0.5, -2.0, 3.0], [800.0, -800.0, 1e30], [-1e-9, 0.0, 1e-9]], dtype=np.float32)
WIDE = torch.tensor(LOGITS, dtype=torch.float64)


def near(found: Matrix, expected: torch.Tensor) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-7)


def test_labels_are_scaled_as_requested() -> None:
    near(classified(LOGITS, "logit"), WIDE)
    near(classified(LOGITS, "sigmoid"), torch.sigmoid(WIDE))
    near(classified(LOGITS, "softmax"), torch.softmax(WIDE, 1))


def test_scores_are_scaled_as_requested() -> None:
    near(scored(LOGITS[:, :1], "sigmoid"), torch.sigmoid(WIDE[:, 0]))
    near(scored(LOGITS[:, :1], "logit"), WIDE[:, 0])
    near(scored(LOGITS[:, :2], "softmax"), torch.softmax(WIDE[:, :2], 1)[:, 1])
    near(scored(LOGITS[:, :2], "logit"), WIDE[:, 1] - WIDE[:, 0])


def test_embeddings_are_cut_before_their_length_is_one() -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    vectors[3] = 0
    wide = torch.tensor(vectors, dtype=torch.float64)
    near(embedded(vectors, None, False), wide)
    near(embedded(vectors, 3, True), torch.nn.functional.normalize(wide[:, :3]))


def test_cosines_with_one_query_or_many() -> None:
    vectors = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
    wide = torch.tensor(vectors, dtype=torch.float64)
    near(cosines(vectors[:1], vectors[1:]), torch.cosine_similarity(wide[:1], wide[1:]))
    near(cosines(vectors[:3], vectors[3:]), torch.cosine_similarity(wide[:3], wide[3:]))


def test_best_documents_come_first_and_ties_keep_their_order() -> None:
    scores = np.array([0.5, 2.0, 0.5, -1.0], dtype=np.float32)
    found = ranked(scores, list("abcd"), "logit", None)
    assert [(item.index, item.document) for item in found] == [(1, "b"), (0, "a"), (2, "c"), (3, "d")]
    assert [item.relevance_score for item in found] == [2.0, 0.5, 0.5, -1.0]
    assert [item.index for item in ranked(scores, list("abcd"), "logit", 2)] == [1, 0]
    assert ranked(scores[:0], [], "logit", 3) == []
    for wrong in (0, -1, True, 1.5, "3"):
        with pytest.raises(ParameterError, match="top_n"):
            check_top_n(wrong)


def delta(*numbers: float, error: str | None = None) -> Delta:
    vector = np.array(numbers, dtype=np.float32).tobytes() if numbers else None
    return Delta(
        "0", [], finish_reason="error" if error else "stop", error=error, error_code=error, vector=vector
    )


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (delta(1.0, np.nan), "text 1 has results that are not finite"),
        (delta(1.0), "text 1 got 1 numbers: 2"),
        (delta(error="step_failed"), "text 1 failed: step_failed"),
        (delta(), "text 1 ended without a result: stop"),
    ],
)
def test_unusable_vector_is_an_error(last: Delta, said: str) -> None:
    found = PooledVectors(2, 2)
    found.put(0, delta(1.0, 2.0))
    with pytest.raises(EngineError, match=said):
        found.put(1, last)
    assert found.matrix[0].tolist() == [1.0, 2.0]


PROMPTED = replace(
    EMBEDDER, prompts={"query": "query: ", "passage": "passage: ", "sts": "same? "}, default_prompt="sts"
)


def processor(facts: PoolingFacts) -> ScoringProcessor:
    return ScoringProcessor(facts, inputs(facts, name="byte_level"), generates=False)


def embed(facts: PoolingFacts, texts: Any = "text", **options: Any) -> ScoringJob:
    return processor(facts).embed(texts, cast(EmbedParams, options))


def score(facts: PoolingFacts, query: Any = "q", documents: Any = ("d",), **options: Any) -> ScoringJob:
    return processor(facts).score(query, documents, cast(ScoreParams, options))


@pytest.mark.parametrize(
    ("facts", "task", "can"),
    [
        (EMBEDDER, "classify", "embed, score, rerank"),
        (CROSS_ENCODER, "embed", "classify, score, rerank"),
        (replace(CROSS_ENCODER, scores=None), "score", "classify"),
        (replace(CROSS_ENCODER, size=3), "score", "classify"),
        (RERANKER, "classify", "score, rerank"),
        (EMBEDDER, "generate", "embed, score, rerank"),
        (None, "embed", "generate"),
    ],
)
def test_unsupported_task_is_rejected_and_the_supported_ones_are_named(
    facts: PoolingFacts | None, task: Task, can: str
) -> None:
    front = frontend(facts, generates=facts is None)
    given: dict[str, tuple[Any, ...]] = {
        "embed": ("a", {}),
        "classify": ("a", {}),
        "score": ("a", "b", {}),
    }

    def ask() -> None:
        if task == "generate":
            front.prepare("0", "a", front.default_sampling_params())
        else:
            getattr(front.scoring_processor(task), task)(*given[task])

    with pytest.raises(RequestError, match=f"cannot {task}: it can {can}$") as caught:
        ask()
    assert caught.value.code == "unsupported_task"


def test_prompts_come_from_the_model_or_from_the_caller() -> None:
    def prompt(facts: PoolingFacts = PROMPTED, **options: Any) -> str:
        return embed(facts, **options).groups[0].prompt

    assert prompt() == "same? "
    assert prompt(prompt_name="query") == "query: "
    assert prompt(prompt="") == ""
    assert prompt(EMBEDDER) == ""
    assert [group.prompt for group in score(PROMPTED).groups] == ["query: ", "passage: "]
    assert [group.prompt for group in score(replace(PROMPTED, prompts={"sts": "s "})).groups] == ["s ", "s "]
    with pytest.raises(ParameterError, match="'nosuch': this model has query, passage, sts"):
        prompt(prompt_name="nosuch")
    with pytest.raises(ParameterError, match="this model has no prompts"):
        prompt(EMBEDDER, prompt_name="query")
    with pytest.raises(ParameterError, match="both given"):
        prompt(prompt_name="query", prompt="x")


@pytest.mark.parametrize("make", [embed, partial(score, documents=[" d "]), partial(score, CROSS_ENCODER)])
def test_white_space_around_texts_is_kept(make: Callable[..., ScoringJob]) -> None:
    """sentence-transformers strips texts up to version 5 only."""
    facts = () if isinstance(make, partial) and make.args else (EMBEDDER,)

    def ids(text: str) -> list[list[int]]:
        job = make(*facts, text)
        return [list(one.ids) for group in job.groups for one in job.processor.inputs.encode(group, 0, 1)]

    assert ids(" a\n") != ids("a")


def test_dimensions_are_those_that_the_model_was_trained_for() -> None:
    facts = replace(EMBEDDER, size=8, dimensions=(2, 4))
    for dimensions in (None, 2, 4, 8):
        embed(facts, dimensions=dimensions)
    embed(EMBEDDER, dimensions=2)
    for wrong in (0, -1, 3, 9, True, "2"):
        with pytest.raises(ParameterError, match="trained for 2, 4, 8"):
            embed(facts, dimensions=wrong)
    with pytest.raises(ParameterError, match="have 2, and its files do not say that they may be cut"):
        embed(EMBEDDER, dimensions=1)


@pytest.mark.parametrize(
    ("facts", "allowed", "refused"),
    [
        (CROSS_ENCODER, ("softmax", "logit"), ("sigmoid", "cosine", "x")),
        (replace(CROSS_ENCODER, size=1, scale="sigmoid"), ("sigmoid", "logit"), ("softmax", "cosine")),
        (RERANKER, ("softmax", "logit"), ("sigmoid",)),
        (EMBEDDER, ("cosine",), ("logit", "sigmoid", "softmax")),
    ],
)
def test_scales_are_those_of_the_head(
    facts: PoolingFacts, allowed: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    assert score(facts).scale == allowed[0]
    assert [score(facts, scale=scale).scale for scale in allowed] == list(allowed)
    for scale in refused:
        with pytest.raises(ParameterError, match=f"scale is '{scale}'"):
            score(facts, scale=scale)


def test_one_query_serves_all_documents_or_each_has_its_own() -> None:
    assert score(CROSS_ENCODER, "q", ["a", "b"]).groups[0].items == [("q", "a"), ("q", "b")]
    assert score(CROSS_ENCODER, ["q", "r"], ["a", "b"]).groups[0].items == [("q", "a"), ("r", "b")]
    assert [group.items for group in score(EMBEDDER, "q", ["a", "b"]).groups] == [["q"], ["a", "b"]]
    assert score(CROSS_ENCODER, "q", []).num_texts == 0
    first = score(RERANKER, "why?", ["a"], instruction="Judge.").groups[0].items[0]
    assert first == ("<Instruct>: Judge.\n<Query>: why?\n<Document>:", "a")
    for query, documents, said in (
        (["q", "r"], ["a"], "2 queries for 1 documents"),
        ("q", [1], r"documents\[0\] is 1"),
        ("q", {"a"}, "documents is of type set"),
        (7, ["a"], "query is of type int"),
    ):
        with pytest.raises(PromptError, match=said):
            score(CROSS_ENCODER, query, documents)
    with pytest.raises(ParameterError, match="this model does not take one"):
        score(CROSS_ENCODER, instruction="Judge.")
    for wrong in (0, True, "5"):
        with pytest.raises(ParameterError, match="max_tokens_per_doc"):
            score(CROSS_ENCODER, max_tokens_per_doc=wrong)


def test_texts_may_be_strings_ids_or_pairs() -> None:
    assert [
        len(group.items) for text in ("a", [1, 2], ["a", [1]]) for group in embed(EMBEDDER, text).groups
    ] == [*(1, 1, 2)]
    classify = processor(CROSS_ENCODER).classify
    assert classify(("a", "b"), {}).groups[0].items == [("a", "b")]
    assert classify(["a", "b"], {}).groups[0].items == ["a", "b"]
    mixed: list[Any] = [("a", "b"), "c"]
    assert classify(mixed, {}).groups[0].items == [("a", "b"), "c"]
    for wrong, said in (
        (["a", 1.5], "text 1: a prompt is of type float"),
        (["a", {}], "text 1: it is a mapping"),
    ):
        with pytest.raises(PromptError, match=said):
            embed(EMBEDDER, wrong)


def test_chunks_cover_all_texts_in_order() -> None:
    job = score(EMBEDDER, "q", ["x" * 20_000] * 5 + ["y"] * (CHUNK_TEXTS + 10))
    chunks = [(group.name, start, stop) for group, start, stop in job.chunks()]
    assert chunks == [
        ("query", 0, 1),
        *(("document", start, start + 2) for start in (0, 2)),
        ("document", 4, 5 + CHUNK_TEXTS - 1),
        ("document", 4 + CHUNK_TEXTS, 5 + CHUNK_TEXTS + 10),
    ]
    assert job.num_texts == 1 + 5 + CHUNK_TEXTS + 10


def test_text_becomes_one_request_with_its_context() -> None:
    made = processor(CROSS_ENCODER)
    (text,) = made.inputs.encode(score(CROSS_ENCODER).groups[0], 0, 1)
    request = made.request("r", text, RequestContext(priority=3, tenant="t", cache_salt="s"))
    assert (request.task, request.max_tokens, request.splittable) == ("pool", 0, False)
    assert (request.priority, request.tenant, request.spec.cache_key) == (3, "t", "s")
    assert request.spec.token_ids is text.ids
    assert request.spec.second_segment == text.second_segment > 0


def test_every_parameter_of_a_task_is_described() -> None:
    for params in (EmbedParams, ClassifyParams, ScoreParams):
        described = parameter_help(params)
        assert described.keys() == params.__annotations__.keys()
        assert all(text.endswith(".") for text in described.values())


def test_unknown_parameters_are_rejected_by_name() -> None:
    with pytest.raises(ParameterError, match="unknown argument colour") as caught:
        embed(EMBEDDER, colour="red")
    assert caught.value.param == "colour"
    embed(EMBEDDER, concurrency_limit=3)  # of vLLM, without effect here


def test_context_of_a_call_is_separated_from_its_parameters() -> None:
    options = {"request_id": "r", "priority": 2, "truncate": True}
    call, params = ScoringCall.split(options)
    assert (call.request_id, call.context) == ("r", RequestContext(priority=2))
    assert params == {"truncate": True}
    names = {*ScoringCall.__dataclass_fields__, *RequestContext.__dataclass_fields__} - {"context"}
    assert CallOptions.__annotations__.keys() == names
