"""Prometheus metrics of the server: counted here, merged across API workers, rendered for /metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from inflight import __version__
from inflight.engine.stats import ENGINE_METRICS, STEP_SIZES, EngineStats, MetricKind
from inflight.events import RequestRecord
from inflight.router.replica import Replica
from inflight.server.access.keys import Caller, KeyUsage

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
_TOKEN_GAP_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 1, 2.5, 5, 10),
)
_REQUEST_SECONDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10),
    *(15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
)
_TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_ANSWER_COUNTS = (1, 2, 5, 10, 20, 50, 100)

# Exported under vLLM's names too: what the Kubernetes inference gateway reads, and what replaces older names.
GATEWAY = (
    *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    *("vllm:cache_config_info", "vllm:inter_token_latency_seconds"),
)


class Histogram:
    """Counts of values by bucket, and their sum."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def counts(self) -> tuple[list[int], float]:
        """The number of values in each bucket, and their sum."""
        return self._counts, self._sum

    def add_counts(self, counts: Sequence[int], total: float) -> None:
        self._counts = [mine + more for mine, more in zip(self._counts, counts, strict=True)]
        self._sum += total

    def family(self, prefix: str, labels: Mapping[str, str]) -> Metric:
        total, buckets = 0, []
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        family = HistogramMetricFamily(f"{prefix}:{self.name}", self.text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, sum_value=self._sum)
        return family


_KEY_COUNTERS = (
    ("key_requests", "Generation requests, by API key", "num_requests"),
    ("key_prompt_tokens", "Prompt tokens, by API key", "num_prompt_tokens"),
    ("key_generation_tokens", "Output tokens, by API key", "num_output_tokens"),
    ("key_queue_seconds", "Seconds that answers waited for admission, by API key", "queue_seconds"),
)


class Metrics:
    """The metrics of one process, rendered with the prefix `inflight` and some or all of them also with `vllm`."""

    def __init__(self, model: str, compat: str = "none", cache: Mapping[str, object] | None = None) -> None:
        """`compat` is the option of that name; `cache` describes the KV cache, as labels of `cache_config_info`."""
        self._model = model
        self._compat = compat
        self._cache = {name: str(value) for name, value in (cache or {}).items()}
        self.first_token = Histogram(
            "time_to_first_token_seconds", "Time from a request to its first token", _FIRST_TOKEN_SECONDS
        )
        self.gap = Histogram(
            "inter_token_latency_seconds", "Time between two tokens of an answer", _TOKEN_GAP_SECONDS
        )
        self.request_gap = Histogram(
            "request_time_per_output_token_seconds",
            "Mean time between tokens of an answer",
            _TOKEN_GAP_SECONDS,
        )
        self.latency = Histogram(
            "e2e_request_latency_seconds", "Time from a request to its end", _REQUEST_SECONDS
        )
        self.queue = Histogram(
            "request_queue_time_seconds", "Time a request waited for admission", _REQUEST_SECONDS
        )
        self.prefill = Histogram(
            "request_prefill_time_seconds", "Time from admission to the first token", _REQUEST_SECONDS
        )
        self.decode = Histogram(
            "request_decode_time_seconds", "Time from the first token to the last", _REQUEST_SECONDS
        )
        self.inference = Histogram(
            "request_inference_time_seconds", "Time from admission to the last token", _REQUEST_SECONDS
        )
        self.prompt_tokens = Histogram("request_prompt_tokens", "Tokens per prompt", _TOKEN_COUNTS)
        self.output_tokens = Histogram("request_generation_tokens", "Tokens per answer", _TOKEN_COUNTS)
        self.longest_answer = Histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer per request", _TOKEN_COUNTS
        )
        self.max_tokens = Histogram("request_params_max_tokens", "max_tokens per answer", _TOKEN_COUNTS)
        self.num_answers = Histogram("request_params_n", "Answers per request (n)", _ANSWER_COUNTS)
        self.histograms = [item for item in vars(self).values() if isinstance(item, Histogram)]
        self.requests: Counter[str] = Counter()  # sent to the engine, by task
        self.num_texts: Counter[str] = Counter()  # embedded, classified or scored, by task
        self.num_pooled_tokens: Counter[str] = Counter()  # tokens of these texts
        self.finished: Counter[str] = Counter()  # by finish reason
        self.refused: Counter[str] = Counter()  # by error code
        self.responses: Counter[tuple[str, str]] = Counter()  # by route and status
        self.num_disconnects = 0
        self.num_freed_blocks = 0

    def empty_copy(self) -> Metrics:
        return Metrics(self._model, self._compat, self._cache)

    def record_answer(self, record: RequestRecord) -> None:
        """Count an answer that has ended for any reason."""
        self.finished[record.finish_reason or "error"] += 1
        self.prompt_tokens.add(record.num_prompt_tokens)
        self.output_tokens.add(record.num_output_tokens)
        if record.admitted_at is None:
            return
        self.queue.add(record.admitted_at - record.arrived_at)
        if record.first_token_at is None or record.last_token_at is None:
            return
        self.prefill.add(record.first_token_at - record.admitted_at)
        decoding = record.last_token_at - record.first_token_at
        self.decode.add(decoding)
        self.inference.add(record.last_token_at - record.admitted_at)
        if record.num_output_tokens > 1:
            self.request_gap.add(decoding / (record.num_output_tokens - 1))

    def record_text(self, task: str, record: RequestRecord) -> None:
        """Count a text that was embedded, classified or scored."""
        self.num_texts[task] += 1
        self.num_pooled_tokens[task] += record.num_prompt_tokens
        self.finished[record.finish_reason or "error"] += 1
        self.prompt_tokens.add(record.num_prompt_tokens)
        if record.admitted_at is not None:
            self.queue.add(record.admitted_at - record.arrived_at)
            if record.finished_at is not None:
                self.inference.add(record.finished_at - record.admitted_at)

    def families(
        self,
        stats: EngineStats | None,
        num_restarts: int,
        callers: list[Caller],
        replicas: Sequence[Replica] = (),
    ) -> list[Metric]:
        """Return all metrics as they are now. `stats` is None while the engine is not available."""
        return [
            *self._families(stats, num_restarts),
            *self._key_families(callers),
            *replica_families(self._model, replicas),
        ]

    def _families(self, stats: EngineStats | None, num_restarts: int) -> Iterator[Metric]:
        yield from self._shared("inflight", {"model_name": self._model}, stats)
        if self._compat != "none":
            # vLLM's metrics also have an engine number. Here there is one engine, or a router in front of several.
            for family in self._shared("vllm", {"model_name": self._model, "engine": "0"}, stats):
                if self._compat == "vllm" or family.name in GATEWAY:
                    yield family
        yield self._counter("requests", "Requests sent to the engine, by task", "task", self.requests)
        yield self._counter(
            "pooled_texts", "Texts embedded, classified or scored, by task", "task", self.num_texts
        )
        text = "Tokens of embedded, classified or scored texts, by task"
        yield self._counter("pooled_tokens", text, "task", self.num_pooled_tokens)
        yield self._counter("requests_refused", "Refused requests, by error code", "code", self.refused)
        text = "HTTP responses, by route and status"
        yield _family("counter", "inflight:http_responses", text, ("route", "status"), self.responses.items())
        yield self._total("disconnects", "Requests whose client disconnected", self.num_disconnects)
        text = "KV blocks freed when clients disconnected"
        yield self._total("disconnect_freed_blocks", text, self.num_freed_blocks)
        yield self._total("engine_restarts", "Engine restarts after a crash", num_restarts)
        yield _family("gauge", "inflight:build_info", "Always 1", ("version",), [((__version__,), 1)])

    def _shared(self, prefix: str, labels: Mapping[str, str], stats: EngineStats | None) -> Iterator[Metric]:
        """Yield the metrics that vLLM has too."""
        names, values = tuple(labels), tuple(labels.values())
        for histogram in self.histograms:
            yield histogram.family(prefix, labels)
        text = "Finished answers, by finish reason"
        finished = [((*values, reason), count) for reason, count in sorted(self.finished.items())]
        yield _family("counter", f"{prefix}:request_success", text, (*names, "finished_reason"), finished)
        info = [((*values, *self._cache.values()), 1)]
        yield _family("gauge", f"{prefix}:cache_config_info", "Always 1", (*names, *self._cache), info)
        if stats is None:
            return
        for item in ENGINE_METRICS:
            yield _family(item.kind, f"{prefix}:{item.name}", item.text, names, [(values, item.read(stats))])
        steps = Histogram("iteration_tokens_total", "Tokens per engine step", STEP_SIZES)
        steps.add_counts(stats.step_sizes, stats.num_step_tokens)
        yield steps.family(prefix, labels)
        if prefix == "inflight":
            yield from self._engine(stats)

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield the metrics of an engine that vLLM has not."""
        yield self._total("steps", "Engine steps", stats.num_steps)
        kv = stats.kv
        blocks = {"free": kv.num_empty, "cached": kv.num_cached, "used": kv.num_used}
        yield self._labelled("gauge", "kv_blocks", "KV blocks, by state", "state", blocks)
        if kv.groups:
            text = "Used KV blocks by what the layers of a group keep, and blocks of cached snapshots"
            yield self._labelled("gauge", "kv_group_blocks", text, "group", kv.groups)
        experts = stats.experts
        if experts is not None:  # there are as many labels as experts in a layer
            tokens = {str(expert): count for expert, count in enumerate(experts.tokens)}
            yield self._counter("expert_tokens", "Tokens of each expert, over all layers", "expert", tokens)
            text = "Tokens of a layer's busiest expert divided by the average (1 means balanced)"
            imbalance = {"average": experts.imbalance, "worst": experts.worst_imbalance}
            yield self._labelled("gauge", "expert_imbalance", text, "layers", imbalance)

    def _key_families(self, callers: list[Caller]) -> Iterator[Metric]:
        """Yield the counters of named keys, whose number is that of the keys file: no request can add a label."""
        named = [caller for caller in callers if caller.name]
        for name, text, attribute in _KEY_COUNTERS if named else ():
            counts = {caller.name: getattr(caller.usage, attribute) for caller in named}
            yield self._labelled("counter", name, text, "key", counts)

    def _total(self, name: str, text: str, value: float) -> Metric:
        return _family("counter", f"inflight:{name}", text, ("model_name",), [((self._model,), value)])

    def _counter(self, name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
        return self._labelled("counter", name, text, label, dict(sorted(counts.items())))

    def _labelled(
        self, metric_type: MetricKind, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> Metric:
        """Return a metric of the model with a value for each value of a label."""
        samples = [((self._model, item), value) for item, value in values.items()]
        return _family(metric_type, f"inflight:{name}", text, ("model_name", label), samples)


def _family(
    metric_type: MetricKind,
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """Return a metric with a value for each combination of its labels' values."""
    family = (GaugeMetricFamily if metric_type == "gauge" else CounterMetricFamily)(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def replica_families(model: str, replicas: Sequence[Replica]) -> Iterator[Metric]:
    """Yield the `inflight:replica_...` metrics, labelled by replica. Counters restart with the replica's engine."""

    def family(
        metric_type: MetricKind, name: str, text: str, values: Iterable[tuple[Replica, float]]
    ) -> Metric:
        samples = [((model, replica.replica_id), value) for replica, value in values]
        return _family(metric_type, f"inflight:replica_{name}", text, ("model_name", "replica"), samples)

    if not replicas:
        return
    text = "1 if the replica accepts requests"
    yield family("gauge", "up", text, ((replica, float(replica.available)) for replica in replicas))
    text = "Prompt tokens waiting to be computed"
    yield family("gauge", "queued_tokens", text, ((item, item.num_queued_tokens) for item in replicas))
    text = "Engine restarts after a crash"
    yield family("counter", "restarts", text, ((item, item.health.num_restarts) for item in replicas))
    known = [(replica, replica.stats) for replica in replicas if replica.stats is not None]
    for item in ENGINE_METRICS:
        values = [(replica, item.read(stats)) for replica, stats in known]
        yield family(item.kind, item.name, f"{item.text}, by replica", values)


def exposition(families: list[Metric]) -> bytes:
    """Return metrics as text, for Prometheus. It takes milliseconds: not for the event loop."""
    return generate_latest(_Families(families))


class _Families(Collector):
    """A Prometheus collector of ready-made metric families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


_LABELLED = ("requests", "num_texts", "num_pooled_tokens", "finished", "refused")  # by one label
_SUMS = ("num_disconnects", "num_freed_blocks")


@dataclass(slots=True)
class MetricCounts:
    """The counts of one process since its start, as plain data that other processes can add up."""

    histograms: list[tuple[list[int], float]] = field(default_factory=list)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    responses: list[tuple[str, str, int]] = field(default_factory=list)  # route, status, count
    totals: dict[str, int] = field(default_factory=dict)
    usage: dict[str, KeyUsage] = field(default_factory=dict)  # by the key's name


def counts_of(metrics: Metrics, callers: Iterable[Caller]) -> MetricCounts:
    return MetricCounts(
        histograms=[histogram.counts for histogram in metrics.histograms],
        counters={name: dict(getattr(metrics, name)) for name in _LABELLED},
        responses=[(*labels, count) for labels, count in metrics.responses.items()],
        totals={name: getattr(metrics, name) for name in _SUMS},
        usage={caller.name: caller.usage for caller in callers},
    )


def add_counts(metrics: Metrics, callers: Iterable[Caller], counts: MetricCounts) -> None:
    """Add the counts of another process."""
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
        usage = counts.usage.get(caller.name)
        if usage is not None:
            for item in fields(KeyUsage):
                value = getattr(caller.usage, item.name) + getattr(usage, item.name)
                setattr(caller.usage, item.name, value)


def with_counts(
    metrics: Metrics, callers: list[Caller], others: Iterable[MetricCounts]
) -> tuple[Metrics, list[Caller]]:
    """Return copies of both that include the counts of other processes."""
    total = metrics.empty_copy()
    copies = [replace(caller, usage=KeyUsage()) for caller in dict.fromkeys(callers)]
    for counts in (counts_of(metrics, callers), *others):
        add_counts(total, copies, counts)
    return total, copies
