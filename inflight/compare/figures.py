"""A run in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inflight.compare.measure import StrategyRun


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are seconds. Time to first token and latency count from the arrival, queueing included; latency ends
    with the last token of the answer, even where the policy keeps the finished request longer."""

    total_time: float
    num_output_tokens: int
    tokens_per_second: float
    mean_ttft: float
    p99_ttft: float
    p50_latency: float
    p99_latency: float
    slot_use: float  # share of slot-steps, steps x slots, that produced a kept token
    kv_waste: float  # share of the places in used KV blocks that hold no token, mean over steps
    num_steps: int
    gpu_utilization: float | None


def figures(run: StrategyRun) -> Figures:
    requests = run.requests
    ttft = [request.first_token_at - request.arrived_at for request in requests]
    latency = [request.last_token_at - request.arrived_at for request in requests]
    total_time = max(request.last_token_at for request in requests)
    num_tokens = sum(len(request.token_ids) for request in requests)
    return Figures(
        total_time=total_time,
        num_output_tokens=num_tokens,
        tokens_per_second=num_tokens / total_time,
        mean_ttft=float(np.mean(ttft)),
        p99_ttft=float(np.percentile(ttft, 99)),
        p50_latency=float(np.percentile(latency, 50)),
        p99_latency=float(np.percentile(latency, 99)),
        slot_use=num_tokens / (len(run.steps) * run.num_slots),
        kv_waste=float(np.mean([step.kv.waste for step in run.steps])),
        num_steps=len(run.steps),
        gpu_utilization=run.gpu_utilization,
    )
