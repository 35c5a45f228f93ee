"""A whole comparison: the strategies over one workload, as numbers, as timelines and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from inflight.compare.figures import Figures, figures
from inflight.compare.layout import Span, SpanKind, Timeline, lay_out
from inflight.compare.measure import StrategyRun, measure
from inflight.compare.palette import label
from inflight.compare.shown import LegendEntry, listed
from inflight.compare.table import rows
from inflight.compare.workload import Job, Workload, build_jobs
from inflight.loading import LoadedEngine

STRATEGIES = ("sequential", "static", "continuous")
CLOSE_STEPS = 96

Progress = Callable[[str, int], None]  # the strategy that runs, and its requests finished so far


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What a reader of the picture may ask of a request."""

    label: str
    title: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class StrategyResult:
    figures: Figures
    timeline: Timeline
    speedup: float  # how many times its tokens/s the reference strategy reaches


LEGEND = (
    LegendEntry(SpanKind.PREFILL, "computing a prompt (prefill)", "begins"),
    LegendEntry(SpanKind.DECODE, "producing a token a step (decode)", "decodes"),
    LegendEntry(SpanKind.HELD, "finished, but its slot is not given on", "done, slot held"),
    LegendEntry(None, "empty slot", ""),
)
DEFINITIONS = (
    ("time to first token, latency", "From the arrival of a request to its first and to its last token."),
    ("slot use", "Share of slot-steps (steps × slots) that produced a token which the answer keeps."),
    ("KV waste", "Share of the places in used KV blocks that hold no token, mean over steps."),
    (
        "the picture",
        "A row is a slot, a colour is a request. Point at a cell to see which one, or read it in words below.",
    ),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Implements `Shown`."""

    model: str
    workload: Workload
    num_slots: int
    reference: str
    requests: list[RequestInfo]
    results: dict[str, StrategyResult]  # by strategy, in the order of the runs
    identical_tokens: bool  # every request has the same tokens under every strategy

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
        return f"The same requests under {listed(list(self.results))}"

    @property
    def headline(self) -> str:
        others = [
            f"{result.speedup:.1f} times as many tokens a second as {name}"
            for name, result in self.results.items()
            if name != self.reference
        ]
        return f"{self.reference.capitalize()} gives {listed(others)}." if others else ""

    @property
    def verdict(self) -> str:
        if self.identical_tokens:
            return "Every request has the same tokens under every strategy: only the scheduling differs."
        return "WARNING: the strategies gave different tokens."

    def rows(self) -> list[tuple[str, list[str]]]:
        return rows(self)

    def told(self, strategy: str) -> str:
        seen = self.results[strategy].figures
        return (
            f"{self.told_briefly(strategy)}, {seen.num_steps:,} steps, {seen.slot_use:.0%} of slot-steps used"
        )

    def told_briefly(self, strategy: str) -> str:
        seen = self.results[strategy].figures
        return f"{seen.total_time:.2f} s, {seen.tokens_per_second:,.0f} tokens/s"

    def label(self, request: int) -> str:
        return self.requests[request].label

    def told_of(self, request: int) -> str:
        found = self.requests[request]
        return (
            f"{found.label}: {found.title}\n"
            f"{found.num_prompt_tokens} prompt tokens, {found.num_output_tokens} output tokens"
        )

    def about(self, span: Span) -> str:
        steps = (
            f"step {span.first}" if span.last == span.first + 1 else f"steps {span.first} to {span.last - 1}"
        )
        did = {
            SpanKind.PREFILL: "prompt",
            SpanKind.DECODE: f"{span.num_tokens} tokens",
            SpanKind.HELD: "finished, slot held",
        }
        return f"{self.told_of(span.request)}\nslot {span.slot + 1}, {steps}: {did[span.kind]}"

    @property
    def subtitle(self) -> str:
        """What was run, in a line."""
        lengths = sorted(request.num_output_tokens for request in self.requests)
        rate = self.workload.arrival.rate
        come = "in one burst" if rate is None else f"at random moments, {rate:g} a second"
        return (
            f"{len(lengths)} requests {come}, {self.num_slots} slots, {self.model}; "
            f"answers of {lengths[0]} to {lengths[-1]} tokens, median {median(lengths):g}"
        )

    def to_json(self) -> dict[str, Any]:
        """Every figure, and what redraws the picture."""
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
            "reference": self.reference,
            "strategies": {
                name: {**asdict(result.figures), "speedup_of_reference": result.speedup}
                for name, result in self.results.items()
            },
            "requests": [asdict(request) for request in self.requests],
            "timelines": {name: result.timeline.to_json() for name, result in self.results.items()},
        }


def compare(
    engine: LoadedEngine,
    workload: Workload,
    strategies: Sequence[str] = STRATEGIES,
    num_slots: int = 16,
    model: str = "",
    progress: Progress | None = None,
) -> Comparison:
    """Run every strategy over the same requests, one after the other, and put what was seen side by side."""
    jobs = build_jobs(workload, engine)
    runs = []
    for strategy in strategies:
        seen = None if progress is None else lambda count, name=strategy: progress(name, count)
        runs.append(measure(engine, jobs, strategy, num_slots, seen))
    return summarise(runs, jobs, workload, model)


def summarise(runs: Sequence[StrategyRun], jobs: Sequence[Job], workload: Workload, model: str) -> Comparison:
    found = {run.strategy: figures(run) for run in runs}
    reference = "continuous" if "continuous" in found else runs[-1].strategy
    best = found[reference].tokens_per_second
    answers = [[request.token_ids for request in run.requests] for run in runs]
    return Comparison(
        model=model,
        workload=workload,
        num_slots=runs[0].num_slots,
        reference=reference,
        requests=[
            RequestInfo(label(index), job.title, len(job.prompt_ids), len(answers[0][index]))
            for index, job in enumerate(jobs)
        ],
        results={
            run.strategy: StrategyResult(
                found[run.strategy], lay_out(run), best / found[run.strategy].tokens_per_second
            )
            for run in runs
        },
        identical_tokens=all(answer == answers[0] for answer in answers),
    )
