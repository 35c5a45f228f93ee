"""What Prometheus reads of each replica; the totals of all are among the other metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from inflight import __version__
from inflight.engine import EngineStats
from inflight.engine.stats import ENGINE_METRICS, STEP_SIZES
from inflight.events import RequestRecord
from inflight.router import Replica
from inflight.server.access.keys import Caller

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


CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_GAP = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.015,
    0.02,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    1,
    2.5,
    5,
    10,
)
_TIME = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_COUNT = (1, 2, 5, 10, 20, 50, 100)


class Histogram:
    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @classmethod
    def of(
        cls, name: str, text: str, bounds: tuple[float, ...], counts: Sequence[int], total: float
    ) -> Histogram:
        """What was counted elsewhere."""
        found = cls(name, text, bounds)
        found._counts, found._sum = list(counts), total
        return found

    @property
    def counts(self) -> tuple[list[int], float]:
        """How many values are in each bucket, and their sum."""
        return self._counts, self._sum

    def add_counts(self, counts: list[int], total: float) -> None:
        self._counts = [mine + more for mine, more in zip(self._counts, counts, strict=True)]
        self._sum += total

    def family(self, prefix: str, labels: Mapping[str, str]) -> Metric:
        total, buckets = 0, []
        for bound, count in zip((*map(float, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((str(bound), float(total)))
        found = HistogramMetricFamily(f"{prefix}:{self.name}", self.text, labels=list(labels))
        found.add_metric(list(labels.values()), buckets, sum_value=self._sum)
        return found


_KEY_COUNTERS = (
    ("key_requests", "Generations, by the name of the key", "num_requests"),
    ("key_prompt_tokens", "Prompt tokens of each key", "num_prompt_tokens"),
    ("key_generation_tokens", "Output tokens of each key", "num_output_tokens"),
    ("key_queue_seconds", "Time that answers of each key waited for admission", "queue_seconds"),
)


class Metrics:
    """Counts, and tells under one prefix or two."""

    def __init__(self, model: str, compat: bool, cache: Mapping[str, object] | None = None) -> None:
        """`cache` is how KV memory is set up, as labels."""
        self._model = model
        self._cache = {name: str(value) for name, value in (cache or {}).items()}
        # Those of vLLM have the number of an engine too. There is one, or a router over several.
        self._prefixes = {"inflight": {"model_name": model}}
        if compat:
            self._prefixes["vllm"] = {"model_name": model, "engine": "0"}
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From a request to its first token", _FIRST
        )
        self.gap = Histogram("inter_token_latency_seconds", "Between two tokens of an answer", _GAP)
        self.request_gap = Histogram(
            "request_time_per_output_token_seconds", "Mean time between tokens of an answer", _GAP
        )
        self.latency = Histogram("e2e_request_latency_seconds", "From a request to its end", _TIME)
        self.queue = Histogram("request_queue_time_seconds", "Waiting for admission", _TIME)
        self.prefill = Histogram("request_prefill_time_seconds", "From admission to the first token", _TIME)
        self.decode = Histogram("request_decode_time_seconds", "From the first token to the last", _TIME)
        self.inference = Histogram(
            "request_inference_time_seconds", "From admission to the last token", _TIME
        )
        self.prompt_tokens = Histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.output_tokens = Histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        self.longest_answer = Histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer of a request", _TOKENS
        )
        self.max_tokens = Histogram("request_params_max_tokens", "Tokens that an answer may have", _TOKENS)
        self.num_answers = Histogram("request_params_n", "Answers that a request asks for", _COUNT)
        self.histograms = [item for item in vars(self).values() if isinstance(item, Histogram)]
        self.requests: Counter[str] = Counter()  # that reached the engine, by task
        self.num_texts: Counter[str] = Counter()  # embedded, classified or scored, by task
        self.num_pooled_tokens: Counter[str] = Counter()  # of these
        self.finished: Counter[str] = Counter()  # by finish reason
        self.refused: Counter[str] = Counter()  # by error code
        self.responses: Counter[tuple[str, str]] = Counter()  # by route and status
        self.num_disconnects = 0
        self.num_freed_blocks = 0

    def empty_copy(self) -> Metrics:
        return Metrics(self._model, len(self._prefixes) > 1, self._cache)

    def ended(self, record: RequestRecord) -> None:
        """An answer is complete, whatever way."""
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

    def pooled(self, task: str, record: RequestRecord) -> None:
        """A text is embedded, classified or scored."""
        self.num_texts[task] += 1
        self.num_pooled_tokens[task] += record.num_prompt_tokens
        self.finished[record.finish_reason or "error"] += 1
        self.prompt_tokens.add(record.num_prompt_tokens)
        if record.admitted_at is not None:
            self.queue.add(record.admitted_at - record.arrived_at)
            if record.finished_at is not None:
                self.inference.add(record.finished_at - record.admitted_at)

    def render(
        self,
        stats: EngineStats | None,
        num_restarts: int,
        callers: list[Caller],
        replicas: Sequence[Replica] = (),
    ) -> bytes:
        """The page; without what the engine knows while it is not there."""
        found = [
            *self._families(stats, num_restarts),
            *self._of_keys(callers),
            *replica_families(self._model, replicas),
        ]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(found))
        return generate_latest(registry)

    def _families(self, stats: EngineStats | None, num_restarts: int) -> Iterator[Metric]:
        for prefix, labels in self._prefixes.items():
            for histogram in self.histograms:
                yield histogram.family(prefix, labels)
            yield self._counter(
                f"{prefix}:request_success",
                "Answers by how they ended",
                "finished_reason",
                self.finished,
                labels,
            )
            info = GaugeMetricFamily(
                f"{prefix}:cache_config_info", "Always 1", labels=[*labels, *self._cache]
            )
            info.add_metric([*labels.values(), *self._cache.values()], 1)
            yield info
            if stats is not None:
                yield from self._engine(prefix, labels, stats)
        for name, text, counts in (
            ("requests", "Requests to the engine, by what they ask for", self.requests),
            ("pooled_texts", "Texts embedded, classified or scored", self.num_texts),
            ("pooled_tokens", "Tokens of these", self.num_pooled_tokens),
        ):
            yield self._counter(f"inflight:{name}", text, "task", counts)
        yield self._counter("inflight:requests_refused", "Requests refused, by code", "code", self.refused)
        responses = CounterMetricFamily("inflight:http_responses", "Responses", labels=["route", "status"])
        for (route, status), count in self.responses.items():
            responses.add_metric([route, status], count)
        yield responses
        yield self._total("inflight:disconnects", "Requests whose client went away", self.num_disconnects)
        yield self._total(
            "inflight:disconnect_freed_blocks", "KV blocks that came back by that", self.num_freed_blocks
        )
        yield self._total("inflight:engine_restarts", "Restarts of an engine that died", num_restarts)
        info = GaugeMetricFamily("inflight:build_info", "Always 1", labels=["version"])
        info.add_metric([__version__], 1)
        yield info

    def _engine(self, prefix: str, labels: Mapping[str, str], stats: EngineStats) -> Iterator[Metric]:
        for item in ENGINE_METRICS:
            family = GaugeMetricFamily if item.kind == "gauge" else CounterMetricFamily
            found = family(f"{prefix}:{item.name}", item.text, labels=list(labels))
            found.add_metric(list(labels.values()), item.read(stats))
            yield found
        steps = Histogram.of(
            "iteration_tokens_total", "Tokens of a step", STEP_SIZES, stats.step_sizes, stats.num_step_tokens
        )
        yield steps.family(prefix, labels)
        if prefix == "inflight":
            yield self._total("inflight:steps", "Steps of the engine", stats.num_steps)
            states = GaugeMetricFamily("inflight:kv_blocks", "KV blocks", labels=["model_name", "state"])
            for state in ("free", "cached", "used"):
                states.add_metric([self._model, state], getattr(stats.kv, f"num_{state}"))
            yield states

    def _of_keys(self, callers: list[Caller]) -> Iterator[Metric]:
        """Counters of those who have a name: as many as the keys file has, so no request can add one."""
        named = [caller for caller in callers if caller.name]
        for name, text, attribute in _KEY_COUNTERS if named else ():
            found = CounterMetricFamily(f"inflight:{name}", text, labels=["model_name", "key"])
            for caller in named:
                found.add_metric([self._model, caller.name], getattr(caller.usage, attribute))
            yield found

    def _total(self, name: str, text: str, value: float) -> Metric:
        found = CounterMetricFamily(name, text, labels=["model_name"])
        found.add_metric([self._model], value)
        return found

    def _counter(
        self, name: str, text: str, label: str, counts: Counter[str], labels: Mapping[str, str] | None = None
    ) -> Metric:
        labels = {"model_name": self._model} if labels is None else labels
        found = CounterMetricFamily(name, text, labels=[*labels, label])
        for value, count in sorted(counts.items()):
            found.add_metric([*labels.values(), value], count)
        return found


class _Families:
    """A collector of what is there already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
