"""Rerank comparisons with the built-in reranker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields

import pytest

from inflight.bench.compare.arrivals import Arrival
from inflight.bench.compare.report import STRATEGIES, compare
from inflight.bench.compare.rerank import PairWorkload, RerankComparison, RerankFigures, compare_reranking
from inflight.bench.compare.workload import Workload, draw_pairs
from inflight.checkpoint.builtin import builtin_folder
from inflight.config import EngineConfig
from inflight.errors import ParameterError, RequestError
from inflight.loading.engine import LoadedEngine
from inflight.loading.load import load_engine
from inflight.timeline.chunks import SlotKind

NUM_PAIRS, NUM_SLOTS = 10, 4


@pytest.fixture(scope="module")
def reranker() -> Iterator[LoadedEngine]:
    loaded = load_engine(EngineConfig.create(builtin_folder("reranker"), max_num_seqs=NUM_SLOTS))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def reranking(reranker: LoadedEngine) -> RerankComparison:
    return compare_reranking(
        reranker, PairWorkload(NUM_PAIRS, Arrival(None)), STRATEGIES, NUM_SLOTS, "a model"
    )


def test_scores_are_identical_and_only_static_batches_are_padded(reranking: RerankComparison) -> None:
    assert reranking.identical_scores
    by_strategy = {name: result.figures for name, result in reranking.results.items()}
    assert [figures.num_steps for figures in by_strategy.values()] == [10, 3, 3]
    sizes = [pair.num_tokens for pair in reranking.requests]
    batches = [sizes[start : start + NUM_SLOTS] for start in range(0, NUM_PAIRS, NUM_SLOTS)]
    num_positions = sum(max(batch) * len(batch) for batch in batches)
    assert by_strategy["static"].padding == pytest.approx(1 - sum(sizes) / num_positions)
    assert by_strategy["static"].padding > 0.3
    assert by_strategy["sequential"].padding == by_strategy["continuous"].padding == 0
    for figures in by_strategy.values():
        assert 0 < figures.first_result <= figures.p99_latency <= figures.last_result
        assert figures.pairs_per_second == pytest.approx(NUM_PAIRS / figures.total_time)
    assert reranking.results["continuous"].speedup == 1


def test_picture_shows_padding_after_texts(reranking: RerankComparison) -> None:
    spans = {timeline.strategy: timeline.spans for timeline in reranking.timelines}
    assert {span.kind for span in spans["continuous"]} == {SlotKind.PREFILL}
    padding = [span for span in spans["static"] if span.kind is SlotKind.PADDING]
    assert len(padding) == NUM_PAIRS - 3  # after all but the longest text of each batch
    texts = {span.request: span for span in spans["static"] if span.kind is SlotKind.PREFILL}
    for span in padding:
        text = texts[span.request]
        assert (span.slot, span.first, span.begin, span.end) == (text.slot, text.first, text.end, 1.0)


def test_json_contains_every_figure(reranking: RerankComparison) -> None:
    report = json.loads(json.dumps(reranking.to_json()))
    assert (report["workload"], report["num_requests"], report["batch_size"]) == (
        "rerank",
        NUM_PAIRS,
        NUM_SLOTS,
    )
    assert report["identical_scores"] is True
    for name in STRATEGIES:
        figures = report["strategies"][name]
        assert set(figures) == {field.name for field in fields(RerankFigures)} | {"speedup_of_reference"}
        assert len(report["timelines"][name]["step_ends"]) == figures["num_steps"]


def test_pairs_depend_only_on_the_seed() -> None:
    assert draw_pairs(20, seed=1) == draw_pairs(20, seed=1) != draw_pairs(20, seed=2)


def test_unsuitable_models_are_rejected(reranker: LoadedEngine, engine: LoadedEngine) -> None:
    with pytest.raises(RequestError, match="cannot generate: it can classify, score, rerank"):
        compare(reranker, Workload(2))
    pairs = PairWorkload(2, Arrival(None))
    with pytest.raises(RequestError, match="cannot rerank: it can generate"):
        compare_reranking(engine, pairs, STRATEGIES, 2)
    embedder = load_engine(EngineConfig.create(builtin_folder("embedder")))
    with pytest.raises(ParameterError, match="needs a cross-encoder"):
        compare_reranking(embedder, pairs, STRATEGIES, 2)
    embedder.close()
