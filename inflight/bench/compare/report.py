"""Run strategies over the same generation workload and put their figures and timelines side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from inflight.bench.compare.measure import Figures, StrategyRun, compute_figures, measure
from inflight.bench.compare.timeline import (
    LegendEntry,
    RequestInfo,
    Span,
    StrategyComparison,
    StrategyResult,
    join_words,
    lay_out,
    request_label,
    results_of,
)
from inflight.bench.compare.workload import Job, Workload, build_jobs
from inflight.loading.engine import LoadedEngine
from inflight.timeline.chunks import SlotKind

STRATEGIES = ("sequential", "static", "continuous")
CLOSE_STEPS = 96

Progress = Callable[[str, int], None]  # called with the strategy and its number of finished requests


@dataclass(frozen=True, slots=True)
class ChatInfo(RequestInfo):
    num_prompt_tokens: int
    num_output_tokens: int


LEGEND = (
    LegendEntry(SlotKind.PREFILL, "computing a prompt (prefill)", "prefill"),
    LegendEntry(SlotKind.DECODE, "producing one token per step (decode)", "decode"),
    LegendEntry(SlotKind.HELD, "finished, but its slot is not released", "finished, slot held"),
    LegendEntry(None, "empty slot", ""),
)
DEFINITIONS = (
    ("time to first token, latency", "Time from a request's arrival to its first and its last token."),
    ("slot use", "Share of slot-steps (steps × slots) that produced a token which the answer keeps."),
    ("KV waste", "Share of the positions in used KV blocks that hold no token, averaged over steps."),
    (
        "the picture",
        "Each row is a slot and each colour a request. Select a cell for details, zoom in to see single steps, or read "
        "the text version below.",
    ),
)


def _seconds(value: float) -> str:
    return f"{value:,.2f} s"


ROWS: tuple[tuple[str, Callable[[StrategyResult[Figures]], str]], ...] = (
    ("total time", lambda result: _seconds(result.figures.total_time)),
    ("output tokens/s", lambda result: f"{result.figures.tokens_per_second:,.0f}"),
    ("time to first token, mean", lambda result: _seconds(result.figures.mean_ttft)),
    ("time to first token, p99", lambda result: _seconds(result.figures.p99_ttft)),
    ("latency, p50", lambda result: _seconds(result.figures.p50_latency)),
    ("latency, p99", lambda result: _seconds(result.figures.p99_latency)),
    ("slot use", lambda result: f"{result.figures.slot_use:.1%}"),
    ("KV waste", lambda result: f"{result.figures.kv_waste:.1%}"),
    ("steps", lambda result: f"{result.figures.num_steps:,}"),
)


@dataclass(frozen=True)
class Comparison(StrategyComparison[Figures, ChatInfo]):
    workload: Workload
    identical_tokens: bool  # whether every request has the same tokens under every strategy

    legend = LEGEND
    definitions = DEFINITIONS
    close_steps = CLOSE_STEPS
    throughput = "produces {} times as many tokens per second as {}"

    @property
    def title(self) -> str:
        return f"The same requests under {join_words(list(self.results))}"

    @property
    def verdict(self) -> str:
        if self.identical_tokens:
            return "Every request has the same tokens under every strategy: only the scheduling differs."
        return "WARNING: the strategies produced different tokens."

    def rows(self) -> list[tuple[str, list[str]]]:
        results = list(self.results.values())
        rows = [(name, [cell(result) for result in results]) for name, cell in ROWS]
        utilization = [result.figures.gpu_utilization for result in results]
        if any(share is not None for share in utilization):
            cells = ["" if share is None else f"{share:.0%}" for share in utilization]
            rows.append(("GPU utilisation", cells))
        rows.append((f"{self.reference} is faster by", [f"{result.speedup:.2f} x" for result in results]))
        return rows

    def summary(self, strategy: str) -> str:
        figures = self.results[strategy].figures
        steps = f"{figures.num_steps:,} steps, {figures.slot_use:.0%} of slot-steps used"
        return f"{self.short_summary(strategy)}, {steps}"

    def short_summary(self, strategy: str) -> str:
        figures = self.results[strategy].figures
        return f"{figures.total_time:.2f} s, {figures.tokens_per_second:,.0f} tokens/s"

    def describe_request(self, request: int) -> str:
        info = self.requests[request]
        tokens = f"{info.num_prompt_tokens} prompt tokens, {info.num_output_tokens} output tokens"
        return f"{super().describe_request(request)}\n{tokens}"

    def describe_span(self, span: Span) -> str:
        steps = (
            f"step {span.first}" if span.last == span.first + 1 else f"steps {span.first} to {span.last - 1}"
        )
        activity = {
            SlotKind.PREFILL: "prompt",
            SlotKind.DECODE: f"{span.num_tokens} tokens",
            SlotKind.HELD: "finished, slot held",
        }
        return f"{self.describe_request(span.request)}\nslot {span.slot + 1}, {steps}: {activity[span.kind]}"

    @property
    def subtitle(self) -> str:
        lengths = sorted(request.num_output_tokens for request in self.requests)
        rate = self.workload.arrival.rate
        arrival = "in one burst" if rate is None else f"arriving at random, {rate:g} per second"
        return (
            f"{len(lengths)} requests {arrival}, {self.num_slots} slots, {self.model}; "
            f"answers of {lengths[0]} to {lengths[-1]} tokens, median {median(lengths):g}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "num_requests": len(self.requests),
            "arrival": str(self.workload.arrival),
            "batch_size": self.num_slots,
            "lengths": self.workload.lengths,
            "max_tokens": self.workload.token_limit,
            "temperature": self.workload.temperature,
            "seed": self.workload.seed,
            "identical_tokens": self.identical_tokens,
            **self.results_json(),
        }


def compare(
    engine: LoadedEngine,
    workload: Workload,
    strategies: Sequence[str] = STRATEGIES,
    num_slots: int = 16,
    model: str = "",
    progress: Progress | None = None,
) -> Comparison:
    """Run the same requests under every strategy, one after the other."""
    jobs = build_jobs(workload, engine)
    runs = []
    for strategy in strategies:
        advance = None if progress is None else lambda count, name=strategy: progress(name, count)
        runs.append(measure(engine, jobs, strategy, num_slots, advance))
    return summarise(runs, jobs, workload, model)


def summarise(runs: Sequence[StrategyRun], jobs: Sequence[Job], workload: Workload, model: str) -> Comparison:
    figures = {run.strategy: compute_figures(run) for run in runs}
    reference, results = results_of(
        figures,
        list(map(lay_out, runs)),
        [run.recording.chunks for run in runs],
        lambda figures: figures.tokens_per_second,
    )
    answers = [[request.token_ids for request in run.requests] for run in runs]
    return Comparison(
        model,
        runs[0].num_slots,
        reference,
        [
            ChatInfo(request_label(index), job.title, len(job.prompt_ids), len(answers[0][index]))
            for index, job in enumerate(jobs)
        ],
        results,
        workload,
        identical_tokens=all(answer == answers[0] for answer in answers),
    )
