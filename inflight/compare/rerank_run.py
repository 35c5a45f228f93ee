"""One strategy over pairs of texts, watched: its figures, and its picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from inflight.compare.layout import Span, SpanKind, Timeline
from inflight.compare.measure import StepWatch, serve
from inflight.errors import EngineError
from inflight.events import StepRecord
from inflight.execution.packed_texts import TextRunner
from inflight.loading import LoadedEngine
from inflight.request import Request

PADDED = "static"  # its batches are padded to their longest text


@dataclass(frozen=True, slots=True)
class RerankFigures:
    """Times are seconds."""

    total_time: float
    pairs_per_second: float
    first_result: float
    last_result: float
    p50_latency: float
    p99_latency: float
    padding: float  # share of the computed places
    num_steps: int


@dataclass(frozen=True, slots=True)
class RerankRun:
    """What was seen of one strategy."""

    strategy: str
    watch: StepWatch
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
    longest = max(len(request.token_ids) for request in requests)
    # Every slot can be taken in every step, also when all texts are padded to the longest.
    max_tokens = max(num_slots * longest, engine.max_model_len)
    core = engine.use(policy=strategy, max_num_seqs=num_slots, max_num_batched_tokens=max_tokens)
    runner = core.runner
    assert isinstance(runner, TextRunner)
    runner.warm_up(longest, longest)  # what only the first step of a process pays is no strategy's fault
    runner.padded = strategy == PADDED
    watch = StepWatch()
    core.observers.append(watch)
    ended = {
        delta.request_id: delta for delta in serve(core, times, requests, watch, progress or (lambda _: None))
    }
    vectors, ended_at = [], []
    for request in requests:
        vector, finished_at = ended[request.request_id].vector, request.record.finished_at
        if vector is None or finished_at is None:
            raise EngineError(f"pair {request.request_id} ended with {request.record.finish_reason!r}")
        vectors.append(vector)
        ended_at.append(finished_at - watch.origin)
    latencies = [end - arrival for end, arrival in zip(ended_at, times, strict=True)]
    return RerankRun(strategy, watch, latencies, ended_at, vectors, times)


def pair_figures(run: RerankRun) -> RerankFigures:
    steps = run.watch.steps
    computed = sum(_num_places(step, run.strategy) for step in steps)
    filled = sum(slot.num_tokens for step in steps for slot in step.slots)
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


def _num_places(step: StepRecord, strategy: str) -> int:
    sizes = [slot.num_tokens for slot in step.slots]
    return max(sizes) * len(sizes) if strategy == PADDED else sum(sizes)


def lay_out_pairs(run: RerankRun, num_slots: int) -> Timeline:
    """In a padded step, a bar is as long as its text, beside the longest, and padding follows."""
    spans = []
    for number, step in enumerate(run.watch.steps):
        longest = max(slot.num_tokens for slot in step.slots)
        for place, slot in enumerate(step.slots):
            request, share = int(slot.request_id), slot.num_tokens / longest
            if run.strategy != PADDED:
                share = 1.0
            spans.append(Span(place, request, SpanKind.PREFILL, number, number + 1, 1, 0.0, share))
            if share < 1:
                spans.append(Span(place, request, SpanKind.PADDING, number, number + 1, 0, share, 1.0))
    spans.sort(key=lambda span: (span.slot, span.first, span.begin))
    return Timeline(run.strategy, num_slots, run.watch.begins, run.watch.ends, spans)
