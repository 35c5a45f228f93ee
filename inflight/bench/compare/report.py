"""Run strategies over the same generation workload and put their figures and timelines side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from inflight.bench.compare.measure import Figures, StrategyRun, compute_figures, measure
from inflight.bench.compare.timeline import (
    LegendEntry,
    RequestInfo,
    StrategyComparison,
    join_words,
    lay_out,
    request_label,
    results_of,
)
from inflight.bench.compare.workload import Job, Workload, build_jobs
from inflight.loading.engine import LoadedEngine
from inflight.timeline.chunks import SlotKind

STRATEGIES = ("sequential", "static", "continuous")

Progress = Callable[[str, int], None]  # called with the strategy and its number of finished requests


@dataclass(frozen=True, slots=True)
class ChatInfo(RequestInfo):
    num_prompt_tokens: int
    num_output_tokens: int


def _seconds(value: float) -> str:
    return f"{value:,.2f} s"


@dataclass(frozen=True)
class Comparison(StrategyComparison[Figures, ChatInfo]):
    workload: Workload
    identical_tokens: bool  # whether every request has the same tokens under every strategy

    legend = (
        LegendEntry(SlotKind.PREFILL, "computing a prompt (prefill)", "prefill"),
        LegendEntry(SlotKind.DECODE, "producing one token per step (decode)", "decode"),
        LegendEntry(SlotKind.HELD, "finished, but its slot is not released", "finished, slot held"),
        LegendEntry(None, "empty slot", ""),
    )
    definitions = (
        ("time to first token, latency", "Time from a request's arrival to its first and its last token."),
        ("slot use", "Share of slot-steps (steps × slots) that produced a token which the answer keeps."),
        ("KV waste", "Share of the positions in used KV blocks that hold no token, averaged over steps."),
        (
            "the picture",
            "Each row is a slot and each colour a request. Select a cell for details, zoom in to see single steps, or "
            "read the text version below.",
        ),
    )
    table: ClassVar[tuple[tuple[str, Callable[[Figures], str]], ...]] = (
        ("total time", lambda figures: _seconds(figures.total_time)),
        ("output tokens/s", lambda figures: f"{figures.tokens_per_second:,.0f}"),
        ("time to first token, mean", lambda figures: _seconds(figures.mean_ttft)),
        ("time to first token, p99", lambda figures: _seconds(figures.p99_ttft)),
        ("latency, p50", lambda figures: _seconds(figures.p50_latency)),
        ("latency, p99", lambda figures: _seconds(figures.p99_latency)),
        ("slot use", lambda figures: f"{figures.slot_use:.1%}"),
        ("KV waste", lambda figures: f"{figures.kv_waste:.1%}"),
        ("steps", lambda figures: f"{figures.num_steps:,}"),
        (
            "GPU utilisation",
            lambda figures: "" if figures.gpu_utilization is None else f"{figures.gpu_utilization:.0%}",
        ),
    )
    throughput = "produces {} times as many tokens per second as {}"

    @property
    def title(self) -> str:
        return f"The same requests under {join_words(list(self.results))}"

    @property
    def verdict(self) -> str:
        if self.identical_tokens:
            return "Every request has the same tokens under every strategy: only the scheduling differs."
        return "WARNING: the strategies produced different tokens."

    def summary(self, strategy: str) -> str:
        figures = self.results[strategy].figures
        return f"{figures.total_time:.2f} s, {figures.tokens_per_second:,.0f} tokens/s"

    def describe_request(self, request: int) -> str:
        info = self.requests[request]
        tokens = f"{info.num_prompt_tokens} prompt tokens, {info.num_output_tokens} output tokens"
        return f"{super().describe_request(request)}; {tokens}"

    @property
    def subtitle(self) -> str:
        lengths = sorted(request.num_output_tokens for request in self.requests)
        answers = f"answers of {lengths[0]} to {lengths[-1]} tokens, median {median(lengths):g}"
        return f"{self.setting('requests', self.workload.arrival)}; {answers}"

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
