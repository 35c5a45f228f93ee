"""What can be asked of which model, and what is refused, with what it can do instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inflight.errors import ParameterError, PromptError, RequestError
from inflight.frontend.pooling import CHUNK_TEXTS, PoolingJob, PoolingProcessor, RequestContext
from inflight.pooling import PoolingFacts, Task

from .pooling_engine import CROSS_ENCODER, EMBEDDER, RERANKER, frontend, inputs

PROMPTED = replace(
    EMBEDDER, prompts={"query": "query: ", "passage": "passage: ", "sts": "same? "}, default_prompt="sts"
)


def processor(facts: PoolingFacts) -> PoolingProcessor:
    return PoolingProcessor(facts, inputs(facts, name="byte_level"), generates=False)


def embed(facts: PoolingFacts, texts: Any = "text", **options: Any) -> PoolingJob:
    given = {"prompt_name": None, "prompt": None, "dimensions": None, "normalize": None, "truncate": False}
    return processor(facts).embed(texts, **given | options)


def score(facts: PoolingFacts, query: Any = "q", documents: Any = ("d",), **options: Any) -> PoolingJob:
    given = {"scale": None, "instruction": None, "truncate": False, "max_tokens_per_doc": None}
    return processor(facts).score(query, documents, **given | options)


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
def test_what_a_model_cannot_do_is_refused_with_what_it_can(
    facts: PoolingFacts | None, task: Task, can: str
) -> None:
    front = frontend(facts, generates=facts is None)
    given: dict[str, tuple[Any, ...]] = {
        "embed": ("a", None, None, None, None, False),
        "classify": ("a", None, False),
        "score": ("a", "b", None, None, False, None),
    }

    def ask() -> None:
        if task == "generate":
            front.prepare("0", "a", front.default_sampling_params())
        else:
            getattr(front.pooling_processor(task), task)(*given[task])

    with pytest.raises(RequestError, match=f"cannot {task}: it can {can}$") as caught:
        ask()
    assert caught.value.code == "unsupported_task"


def test_prompts() -> None:
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
    with pytest.raises(ParameterError, match="this model has none"):
        prompt(EMBEDDER, prompt_name="query")
    with pytest.raises(ParameterError, match="both given"):
        prompt(prompt_name="query", prompt="x")


def test_dimensions_are_those_that_the_model_was_trained_for() -> None:
    facts = replace(EMBEDDER, size=8, dimensions=(2, 4))
    for dimensions in (None, 2, 4, 8):
        embed(facts, dimensions=dimensions)
    embed(EMBEDDER, dimensions=2)
    for wrong in (0, -1, 3, 9, True, "2"):
        with pytest.raises(ParameterError, match="trained to give 2, 4, 8"):
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
def test_scales_of_scores(facts: PoolingFacts, allowed: tuple[str, ...], refused: tuple[str, ...]) -> None:
    assert score(facts).scale == allowed[0]
    assert [score(facts, scale=scale).scale for scale in allowed] == list(allowed)
    for scale in refused:
        with pytest.raises(ParameterError, match=f"scale is '{scale}'"):
            score(facts, scale=scale)


def test_queries_and_documents() -> None:
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
    with pytest.raises(ParameterError, match="this model reads none"):
        score(CROSS_ENCODER, instruction="Judge.")
    for wrong in (0, True, "5"):
        with pytest.raises(ParameterError, match="max_tokens_per_doc"):
            score(CROSS_ENCODER, max_tokens_per_doc=wrong)


def test_texts_ids_and_pairs() -> None:
    assert [
        len(group.items) for text in ("a", [1, 2], ["a", [1]]) for group in embed(EMBEDDER, text).groups
    ] == [*(1, 1, 2)]
    classify = processor(CROSS_ENCODER).classify
    assert classify(("a", "b"), None, False).groups[0].items == [("a", "b")]
    assert classify(["a", "b"], None, False).groups[0].items == ["a", "b"]
    mixed: list[Any] = [("a", "b"), "c"]
    assert classify(mixed, None, False).groups[0].items == [("a", "b"), "c"]
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


def test_a_request_of_a_text() -> None:
    made = processor(CROSS_ENCODER)
    (text,) = made.inputs.encode(score(CROSS_ENCODER).groups[0], 0, 1)
    request = made.request("r", text, RequestContext(priority=3, tenant="t", cache_salt="s"))
    assert (request.kind, request.max_tokens, request.splittable) == ("pool", 0, False)
    assert (request.priority, request.tenant, request.spec.cache_salt) == (3, "t", "s")
    assert request.spec.token_ids is text.ids
    assert request.spec.second_segment == text.second_segment > 0
    for wrong in ({"priority": "high"}, {"tenant": 3}, {"cache_salt": "\ud800"}):
        with pytest.raises(ParameterError):
            RequestContext(**wrong)
