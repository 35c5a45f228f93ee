"""Statistics of an engine, and their names as metrics (Prometheus and `LLM.get_metrics`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import sub
from typing import Literal

from inflight.engine.runner import ExpertCounts
from inflight.events import ExpertUsage, KVUsage

EXPERTS_EVERY = 1.0  # seconds between two readings of the experts' tokens, at least
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """How evenly the tokens of a model are spread over its experts."""

    tokens: tuple[int, ...]  # of each expert since the start, over all layers
    imbalance: float  # as in `ExpertUsage`, at the last reading: the average over all layers
    worst_imbalance: float  # of the layer where it is the largest


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
    num_drafts: int = 0  # of one request in one step, some tokens each
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # among the drafted ones
    experts: ExpertStats | None = None  # of a model that has some, once they have received tokens


MetricKind = Literal["gauge", "counter"]


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """A gauge, or a counter since the start."""

    name: str
    kind: MetricKind
    text: str
    read: Callable[[EngineStats], float]


@dataclass(frozen=True, slots=True)
class MetricValue:
    """The value of a metric at one moment."""

    name: str
    kind: MetricKind
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
    EngineMetric("spec_decode_num_drafts", "counter", "Drafts verified", lambda stats: stats.num_drafts),
    EngineMetric(
        "spec_decode_num_draft_tokens",
        "counter",
        "Tokens of these drafts",
        lambda stats: stats.num_draft_tokens,
    ),
    EngineMetric(
        "spec_decode_num_accepted_tokens",
        "counter",
        "Tokens of these drafts that were sampled",
        lambda stats: stats.num_accepted_tokens,
    ),
)


class ExpertLoads:
    """Follows how the experts of a model are used, in readings that are at least EXPERTS_EVERY apart."""

    def __init__(self, counts: ExpertCounts | None) -> None:
        self.stats: ExpertStats | None = None
        self.has_experts = counts is not None
        self._counts = counts
        self._totals: list[list[int]] = []  # by layer and expert, at the last reading
        self._usage: ExpertUsage | None = None  # what no record has reported yet
        self._read_at = -EXPERTS_EVERY

    def update(self, now: float, is_idle: bool) -> None:
        """Read the counts if it is time, or if the engine is idle, so that nothing has to wait."""
        if self._counts is None or not (is_idle or now - self._read_at >= EXPERTS_EVERY):
            return
        self._read_at = now
        totals = self._counts.read(wait=is_idle)
        if totals is None:
            return
        before = self._totals or [[0] * len(layer) for layer in totals]
        usage = ExpertUsage(tuple(tuple(map(sub, *layers)) for layers in zip(totals, before, strict=True)))
        imbalances = [
            imbalance for imbalance, layer in zip(usage.imbalances, usage.tokens, strict=True) if any(layer)
        ]
        if not imbalances:  # nothing has happened since
            return
        self._totals, self._usage = totals, usage
        self.stats = ExpertStats(
            tuple(map(sum, zip(*totals, strict=True))), sum(imbalances) / len(imbalances), max(imbalances)
        )

    def take(self) -> ExpertUsage | None:
        """Return the last reading, once."""
        usage, self._usage = self._usage, None
        return usage
