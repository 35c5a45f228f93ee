"""The same pairs of texts scored one at a time, in padded static batches and packed at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from inflight.compare.layout import Span, SpanKind, Timeline
from inflight.compare.palette import label
from inflight.compare.passages import draw_pairs
from inflight.compare.report import Progress
from inflight.compare.rerank_run import RerankFigures, RerankRun, lay_out_pairs, measure_pairs, pair_figures
from inflight.compare.shown import LegendEntry, listed
from inflight.compare.workload import Arrival
from inflight.errors import ParameterError
from inflight.frontend import RequestContext
from inflight.loading import LoadedEngine

CLOSE_STEPS = 12  # a step scores many pairs

LEGEND = (
    LegendEntry(SpanKind.PREFILL, "a pair is computed", "computes"),
    LegendEntry(SpanKind.PADDING, "padding is computed", "padding"),
    LegendEntry(None, "empty slot", ""),
)
DEFINITIONS = (
    ("first and last result", "From the arrival of the first pair to the first score, and to the last."),
    ("latency", "From the arrival of a pair to its score."),
    ("padding", "Share of the computed token places that held no text."),
    ("the picture", "A row is a slot, a colour is a pair. In a padded step, a bar is as long as its text."),
)


@dataclass(frozen=True, slots=True)
class PairWorkload:
    num_pairs: int
    arrival: Arrival
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_pairs < 1:
            raise ParameterError(f"the number of requests is {self.num_pairs}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class PairInfo:
    label: str
    title: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RerankStrategyResult:
    figures: RerankFigures
    timeline: Timeline
    speedup: float  # how many times its pairs/s the reference strategy reaches


@dataclass(frozen=True, slots=True)
class RerankComparison:
    """Implements `Shown`."""

    model: str
    workload: PairWorkload
    num_slots: int
    reference: str
    requests: list[PairInfo]
    results: dict[str, RerankStrategyResult]
    identical_scores: bool

    legend = LEGEND
    definitions = DEFINITIONS
    close_steps = CLOSE_STEPS

    @property
    def timelines(self) -> list[Timeline]:
        return [result.timeline for result in self.results.values()]

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    @property
    def title(self) -> str:
        return f"The same pairs of texts under {listed(list(self.results))}"

    @property
    def subtitle(self) -> str:
        lengths = sorted(request.num_tokens for request in self.requests)
        rate = self.workload.arrival.rate
        come = "in one burst" if rate is None else f"at random moments, {rate:g} a second"
        return (
            f"{len(lengths)} pairs {come}, {self.num_slots} slots, {self.model}; "
            f"of {lengths[0]} to {lengths[-1]} tokens, median {median(lengths):g}"
        )

    @property
    def headline(self) -> str:
        others = [
            f"{result.speedup:.1f} times as many pairs a second as {name}"
            for name, result in self.results.items()
            if name != self.reference
        ]
        return f"{self.reference.capitalize()} scores {listed(others)}." if others else ""

    @property
    def verdict(self) -> str:
        if self.identical_scores:
            return "Every pair has the same score under every strategy: only the scheduling differs."
        return "WARNING: the strategies gave different scores."

    def rows(self) -> list[tuple[str, list[str]]]:
        found = [result.figures for result in self.results.values()]
        return [
            ("total time", [f"{figures.total_time:,.2f} s" for figures in found]),
            ("pairs/s", [f"{figures.pairs_per_second:,.0f}" for figures in found]),
            ("first result", [f"{figures.first_result:,.3f} s" for figures in found]),
            ("last result", [f"{figures.last_result:,.3f} s" for figures in found]),
            ("latency, p50", [f"{figures.p50_latency:,.3f} s" for figures in found]),
            ("latency, p99", [f"{figures.p99_latency:,.3f} s" for figures in found]),
            ("padding", [f"{figures.padding:.1%}" for figures in found]),
            ("steps", [f"{figures.num_steps:,}" for figures in found]),
            (
                f"{self.reference} is faster by",
                [f"{result.speedup:.2f} x" for result in self.results.values()],
            ),
        ]

    def told(self, strategy: str) -> str:
        figures = self.results[strategy].figures
        return f"{self.told_briefly(strategy)}, {figures.num_steps:,} steps, {figures.padding:.0%} padding"

    def told_briefly(self, strategy: str) -> str:
        figures = self.results[strategy].figures
        return f"{figures.total_time:.2f} s, {figures.pairs_per_second:,.0f} pairs/s"

    def label(self, request: int) -> str:
        return self.requests[request].label

    def told_of(self, request: int) -> str:
        return f"{self.requests[request].label}: {self.requests[request].title}"

    def about(self, span: Span) -> str:
        pair = self.requests[span.request]
        did = "padding" if span.kind is SpanKind.PADDING else f"{pair.num_tokens} tokens"
        return f"{self.told_of(span.request)}\nslot {span.slot + 1}, step {span.first}: {did}"

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "workload": "rerank",
            "num_requests": len(self.requests),
            "arrival": str(self.workload.arrival),
            "batch_size": self.num_slots,
            "seed": self.workload.seed,
            "identical_scores": self.identical_scores,
            "reference": self.reference,
            "strategies": {
                name: {**asdict(result.figures), "speedup_of_reference": result.speedup}
                for name, result in self.results.items()
            },
            "requests": [asdict(request) for request in self.requests],
            "timelines": {name: result.timeline.to_json() for name, result in self.results.items()},
        }


def compare_reranking(
    engine: LoadedEngine,
    workload: PairWorkload,
    strategies: Sequence[str],
    num_slots: int,
    model: str = "",
    progress: Progress | None = None,
) -> RerankComparison:
    """Score the same pairs under every strategy, one after the other."""
    processor = engine.pooling_processor("rerank")
    if processor.facts.scores != "pair" or processor.facts.splittable:
        raise ParameterError(
            "the workload rerank is for cross-encoders, which read a question and a passage in one step: "
            "this model is none"
        )
    pairs = draw_pairs(workload.num_pairs, workload.seed)
    queries, passages = (list(texts) for texts in zip(*pairs, strict=True))
    (group,) = processor.score(queries, passages, None, None, truncate=True, max_tokens_per_doc=None).groups
    texts = processor.inputs.encode(group, 0, len(pairs))
    times = workload.arrival.times(len(pairs), workload.seed)
    runs = []
    for strategy in strategies:
        requests = [processor.request(str(index), text, RequestContext()) for index, text in enumerate(texts)]
        seen = None if progress is None else lambda count, name=strategy: progress(name, count)
        runs.append(measure_pairs(engine, requests, times, strategy, num_slots, seen))
    infos = [
        PairInfo(label(index), f"{query} / {passage[:60]}", len(text.ids))
        for index, ((query, passage), text) in enumerate(zip(pairs, texts, strict=True))
    ]
    return _summarise(runs, infos, workload, num_slots, model)


def _summarise(
    runs: Sequence[RerankRun], infos: list[PairInfo], workload: PairWorkload, num_slots: int, model: str
) -> RerankComparison:
    found = {run.strategy: pair_figures(run) for run in runs}
    reference = "continuous" if "continuous" in found else runs[-1].strategy
    best = found[reference].pairs_per_second
    return RerankComparison(
        model=model,
        workload=workload,
        num_slots=num_slots,
        reference=reference,
        requests=infos,
        results={
            run.strategy: RerankStrategyResult(
                found[run.strategy],
                lay_out_pairs(run, num_slots),
                best / found[run.strategy].pairs_per_second,
            )
            for run in runs
        },
        identical_scores=all(run.vectors == runs[0].vectors for run in runs),
    )
