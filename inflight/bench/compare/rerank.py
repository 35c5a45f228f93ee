"""Score the same pairs of texts one at a time, in padded static batches, and packed at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np

from inflight.bench.compare.arrivals import Arrival
from inflight.bench.compare.measure import MAX_RECORD_BYTES, Recording, serve, with_origin
from inflight.bench.compare.report import Progress
from inflight.bench.compare.timeline import (
    LegendEntry,
    RequestInfo,
    Span,
    StrategyComparison,
    Timeline,
    join_words,
    request_label,
    results_of,
)
from inflight.bench.compare.workload import draw_pairs
from inflight.errors import EngineError, ParameterError
from inflight.execution.encoder_runner import TextRunner
from inflight.loading.engine import LoadedEngine
from inflight.request import Request
from inflight.timeline.chunks import SlotKind
from inflight.timeline.steps import RecordedStep

PADDED = "static"  # the strategy whose batches are padded to their longest text


@dataclass(frozen=True, slots=True)
class PairWorkload:
    """The pairs that every strategy scores."""

    num_pairs: int
    arrival: Arrival
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_pairs < 1:
            raise ParameterError(f"num_requests is {self.num_pairs}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class PairInfo(RequestInfo):
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RerankFigures:
    """A run in numbers; times are seconds."""

    total_time: float
    pairs_per_second: float
    first_result: float
    last_result: float
    p50_latency: float
    p99_latency: float
    padding: float  # share of the computed positions
    num_steps: int


@dataclass(frozen=True)
class RerankComparison(StrategyComparison[RerankFigures, PairInfo]):
    workload: PairWorkload
    identical_scores: bool

    legend = (
        LegendEntry(SlotKind.PREFILL, "computing a pair", "compute"),
        LegendEntry(SlotKind.PADDING, "computing padding", "padding"),
        LegendEntry(None, "empty slot", ""),
    )
    definitions = (
        ("first and last result", "Time from the arrival of the first pair to the first and the last score."),
        ("latency", "Time from a pair's arrival to its score."),
        ("padding", "Share of the computed token positions that held no text."),
        (
            "the picture",
            "Each row is a slot and each colour a pair. In a padded step, a bar is as long as its text.",
        ),
    )
    table: ClassVar[tuple[tuple[str, Callable[[RerankFigures], str]], ...]] = (
        ("total time", lambda figures: f"{figures.total_time:,.2f} s"),
        ("pairs/s", lambda figures: f"{figures.pairs_per_second:,.0f}"),
        ("first result", lambda figures: f"{figures.first_result:,.3f} s"),
        ("last result", lambda figures: f"{figures.last_result:,.3f} s"),
        ("latency, p50", lambda figures: f"{figures.p50_latency:,.3f} s"),
        ("latency, p99", lambda figures: f"{figures.p99_latency:,.3f} s"),
        ("padding", lambda figures: f"{figures.padding:.1%}"),
        ("steps", lambda figures: f"{figures.num_steps:,}"),
    )
    padded = (PADDED,)
    throughput = "scores {} times as many pairs per second as {}"

    @property
    def title(self) -> str:
        return f"The same pairs of texts under {join_words(list(self.results))}"

    @property
    def subtitle(self) -> str:
        lengths = sorted(request.num_tokens for request in self.requests)
        tokens = f"{lengths[0]} to {lengths[-1]} tokens, median {median(lengths):g}"
        return f"{self.setting('pairs', self.workload.arrival)}; {tokens}"

    @property
    def verdict(self) -> str:
        if self.identical_scores:
            return "Every pair has the same score under every strategy: only the scheduling differs."
        return "WARNING: the strategies produced different scores."

    def summary(self, strategy: str) -> str:
        figures = self.results[strategy].figures
        return f"{figures.total_time:.2f} s, {figures.pairs_per_second:,.0f} pairs/s"

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "workload": "rerank",
            "num_requests": len(self.requests),
            "arrival": str(self.workload.arrival),
            "batch_size": self.num_slots,
            "seed": self.workload.seed,
            "identical_scores": self.identical_scores,
            **self.results_json(),
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
    processor = engine.frontend.scoring_processor("rerank")
    if processor.facts.scores != "pair" or processor.facts.splittable:
        raise ParameterError(
            "the rerank workload needs a cross-encoder, which reads a question and a passage together in one step: "
            "this model is not one"
        )
    pairs = draw_pairs(workload.num_pairs, workload.seed)
    queries, passages = (list(texts) for texts in zip(*pairs, strict=True))
    (group,) = processor.score(queries, passages, {"truncate": True}).groups
    texts = processor.inputs.encode(group, 0, len(pairs))
    infos = [
        PairInfo(request_label(index), f"{query} / {passage[:60]}", len(text.ids))
        for index, ((query, passage), text) in enumerate(zip(pairs, texts, strict=True))
    ]
    times = workload.arrival.times(len(pairs), workload.seed)
    runs = []
    for strategy in strategies:
        requests = [
            with_origin(processor.request(str(index), text), index, info.title)
            for index, (text, info) in enumerate(zip(texts, infos, strict=True))
        ]
        advance = None if progress is None else lambda count, name=strategy: progress(name, count)
        runs.append(measure_pairs(engine, requests, times, strategy, num_slots, advance))
    return _summarise(runs, infos, workload, num_slots, model)


def _summarise(
    runs: Sequence[RerankRun], infos: list[PairInfo], workload: PairWorkload, num_slots: int, model: str
) -> RerankComparison:
    figures = {run.strategy: pair_figures(run) for run in runs}
    timelines = [lay_out_pairs(run, num_slots) for run in runs]
    reference, results = results_of(
        figures, timelines, [run.recording.chunks for run in runs], lambda figures: figures.pairs_per_second
    )
    identical = all(run.vectors == runs[0].vectors for run in runs)
    return RerankComparison(model, num_slots, reference, infos, results, workload, identical)


# ---- one strategy ----


@dataclass(frozen=True, slots=True)
class RerankRun:
    """A recorded run of one strategy."""

    strategy: str
    recording: Recording
    latencies: list[float]
    ended_at: list[float]
    vectors: list[bytes]
    arrivals: list[float]


def measure_pairs(
    engine: LoadedEngine,
    requests: list[Request],
    times: list[float],
    strategy: str,
    num_slots: int,
    progress: Callable[[int], None] | None,
) -> RerankRun:
    """Score the pairs under a strategy, on a fresh engine core with the same weights."""
    longest = max(len(request.token_ids) for request in requests)
    # Every slot can be used in every step, even if all texts are padded to the longest.
    max_tokens = max(num_slots * longest, engine.frontend.max_model_len)
    core = engine.use(policy=strategy, max_num_seqs=num_slots, max_num_batched_tokens=max_tokens)
    runner = core.runner
    assert isinstance(runner, TextRunner)
    runner.warm_up(longest, longest)  # so that no strategy pays for the first step of a process
    runner.padded = strategy == PADDED
    core.record(max_bytes=MAX_RECORD_BYTES)
    origin, deltas = serve(core, times, requests, progress or (lambda _: None))
    last_deltas = {delta.request_id: delta for delta in deltas}
    vectors, ended_at = [], []
    for request in requests:
        vector, finished_at = last_deltas[request.request_id].vector, request.record.finished_at
        if vector is None or finished_at is None:
            reason = request.record.finish_reason
            raise EngineError(f"pair {request.request_id} ended with finish reason {reason!r}")
        vectors.append(vector)
        ended_at.append(finished_at - origin)
    latencies = [end - arrival for end, arrival in zip(ended_at, times, strict=True)]
    recording = Recording.read(core, strategy, origin)
    return RerankRun(strategy, recording, latencies, ended_at, vectors, times)


def pair_figures(run: RerankRun) -> RerankFigures:
    steps = run.recording.steps
    computed = sum(_num_positions(step, run.strategy) for step in steps)
    filled = sum(step.num_tokens for step in steps)
    total = max(run.ended_at)
    return RerankFigures(
        total_time=total,
        pairs_per_second=len(run.latencies) / total,
        first_result=min(run.ended_at) - min(run.arrivals),
        last_result=total - min(run.arrivals),
        p50_latency=float(np.percentile(run.latencies, 50)),
        p99_latency=float(np.percentile(run.latencies, 99)),
        padding=1 - filled / computed,
        num_steps=len(steps),
    )


def _num_positions(step: RecordedStep, strategy: str) -> int:
    sizes = [slot.num_tokens for slot in step.slots]
    return max(sizes) * len(sizes) if strategy == PADDED else sum(sizes)


def lay_out_pairs(run: RerankRun, num_slots: int) -> Timeline:
    """Build the timeline of a run.

    In a padded step, a bar's length is that of its text relative to the longest one, and padding follows.
    """
    spans = []
    for number, step in enumerate(run.recording.steps):
        longest = max(slot.num_tokens for slot in step.slots)
        for row, slot in enumerate(step.slots):
            request, share = int(slot.request.request_id), slot.num_tokens / longest
            if run.strategy != PADDED:
                share = 1.0
            spans.append(Span(row, request, SlotKind.PREFILL, number, number + 1, 1, 0.0, share))
            if share < 1:
                spans.append(Span(row, request, SlotKind.PADDING, number, number + 1, 0, share, 1.0))
    spans.sort(key=lambda span: (span.slot, span.first, span.begin))
    return Timeline(run.strategy, num_slots, run.recording.begins, run.recording.ends, spans)
