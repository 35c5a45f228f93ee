"""What one process has counted, as plain data, so that several processes' counts can be one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, fields

from inflight.server.access.keys import Caller, KeyUsage
from inflight.server.observability.metrics import Metrics

_COUNTERS = ("requests", "num_texts", "num_pooled_tokens", "finished", "refused")  # by one label
_TOTALS = ("num_disconnects", "num_freed_blocks")


@dataclass(slots=True)
class MetricCounts:
    """Of one process since its start."""

    histograms: list[tuple[list[int], float]] = field(default_factory=list)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    responses: list[tuple[str, str, int]] = field(default_factory=list)  # route, status, how many
    totals: dict[str, int] = field(default_factory=dict)
    usage: dict[str, KeyUsage] = field(default_factory=dict)  # by the key's name


def counts_of(metrics: Metrics, callers: Iterable[Caller]) -> MetricCounts:
    return MetricCounts(
        histograms=[histogram.counts for histogram in metrics.histograms],
        counters={name: dict(getattr(metrics, name)) for name in _COUNTERS},
        responses=[(*labels, count) for labels, count in metrics.responses.items()],
        totals={name: getattr(metrics, name) for name in _TOTALS},
        usage={caller.name: caller.usage for caller in callers},
    )


def add_counts(metrics: Metrics, callers: Iterable[Caller], counts: MetricCounts) -> None:
    """Count here what another process has counted."""
    for histogram, (buckets, total) in zip(metrics.histograms, counts.histograms, strict=True):
        histogram.add_counts(buckets, total)
    for name, labelled in counts.counters.items():
        counter: Counter[str] = getattr(metrics, name)
        counter.update(labelled)
    for route, status, count in counts.responses:
        metrics.responses[route, status] += count
    for name, count in counts.totals.items():
        setattr(metrics, name, getattr(metrics, name) + count)
    for caller in callers:
        used = counts.usage.get(caller.name)
        if used is not None:
            for item in fields(KeyUsage):
                value = getattr(caller.usage, item.name) + getattr(used, item.name)
                setattr(caller.usage, item.name, value)


def with_counts(
    metrics: Metrics, callers: list[Caller], others: Iterable[MetricCounts]
) -> tuple[Metrics, list[Caller]]:
    """Both with others' counts beside their own, as copies."""
    whole, named = metrics.empty_copy(), [_with_own_usage(caller) for caller in dict.fromkeys(callers)]
    for counts in (counts_of(metrics, callers), *others):
        add_counts(whole, named, counts)
    return whole, named


def _with_own_usage(caller: Caller) -> Caller:
    found = copy(caller)
    found.usage = KeyUsage()
    return found
