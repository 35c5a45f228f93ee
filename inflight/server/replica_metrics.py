"""What Prometheus reads of each replica; the totals of all are among the other metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inflight.engine import EngineStats
from inflight.router import Replica

_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Requests in the batch", lambda stats: stats.num_running),
    ("num_requests_waiting", "Requests in the queue", lambda stats: stats.num_waiting),
    (
        "kv_cache_usage_perc",
        "Used share of the KV blocks, 1 is all",
        lambda stats: stats.kv.num_used / max(1, stats.kv.num_blocks),
    ),
)
_TOTALS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens", lambda stats: stats.num_prompt_tokens),
    ("generation_tokens", "Output tokens", lambda stats: stats.num_output_tokens),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache", lambda stats: stats.num_prefix_queries),
    ("prefix_cache_hits", "Tokens found there", lambda stats: stats.num_prefix_hits),
)
_LABELS = ("model_name", "replica")


def replica_families(model: str, replicas: Sequence[Replica]) -> Iterator[Metric]:
    """`inflight:replica_...`, with a label for each replica. Totals are those of its engine: a restart begins anew."""
    if not replicas:
        return
    up = GaugeMetricFamily("inflight:replica_up", "1: it takes requests", labels=_LABELS)
    queued = GaugeMetricFamily("inflight:replica_queued_tokens", "Prompt tokens to compute", labels=_LABELS)
    restarts = CounterMetricFamily(
        "inflight:replica_restarts", "Restarts of an engine that died", labels=_LABELS
    )
    for replica in replicas:
        labels = [model, replica.replica_id]
        up.add_metric(labels, float(replica.available))
        queued.add_metric(labels, replica.num_queued_tokens)
        restarts.add_metric(labels, replica.health.num_restarts)
    yield from (up, queued, restarts)
    heard = [(replica.replica_id, replica.stats) for replica in replicas if replica.stats is not None]
    for family, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _TOTALS)):
        for name, text, value in figures:
            found = family(f"inflight:replica_{name}", f"{text}, by replica", labels=_LABELS)
            for replica_id, stats in heard:
                found.add_metric([model, replica_id], value(stats))
            yield found
