"""Statistics of an engine, and their names as metrics (Prometheus and `LLM.get_metrics`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from inflight.events import KVUsage

STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The state of an engine at one moment, and its totals so far."""

    num_running: int
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_failed_steps: int  # not among num_steps
    num_prefix_queries: int  # tokens
    num_prefix_hits: int  # tokens
    kv: KVUsage
    is_sleeping: bool = False
    # A histogram of steps by their tokens: STEP_SIZES are the upper bounds of the buckets, the last has none.
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)
    num_step_tokens: int = 0  # tokens of all these steps


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """A gauge, or a counter since the start."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    read: Callable[[EngineStats], float]


@dataclass(frozen=True, slots=True)
class MetricValue:
    """The value of a metric at one moment."""

    name: str
    kind: Literal["gauge", "counter"]
    value: float


ENGINE_METRICS = (
    EngineMetric("num_requests_running", "gauge", "Requests in the batch", lambda stats: stats.num_running),
    EngineMetric("num_requests_waiting", "gauge", "Requests in the queue", lambda stats: stats.num_waiting),
    EngineMetric(
        "kv_cache_usage_perc",
        "gauge",
        "Used share of the KV blocks (1 means all)",
        lambda stats: stats.kv.num_used / stats.kv.num_blocks if stats.kv.num_blocks else 0.0,
    ),
    EngineMetric("prompt_tokens", "counter", "Prompt tokens", lambda stats: stats.num_prompt_tokens),
    EngineMetric("generation_tokens", "counter", "Output tokens", lambda stats: stats.num_output_tokens),
    EngineMetric(
        "num_preemptions", "counter", "Requests put back into the queue", lambda stats: stats.num_preemptions
    ),
    EngineMetric(
        "prefix_cache_queries",
        "counter",
        "Tokens looked up in the prefix cache",
        lambda stats: stats.num_prefix_queries,
    ),
    EngineMetric(
        "prefix_cache_hits",
        "counter",
        "Tokens found in the prefix cache",
        lambda stats: stats.num_prefix_hits,
    ),
)


def metrics_of(stats: EngineStats) -> list[MetricValue]:
    """Return the current values of all metrics."""
    return [MetricValue(f"inflight:{item.name}", item.kind, item.read(stats)) for item in ENGINE_METRICS]
