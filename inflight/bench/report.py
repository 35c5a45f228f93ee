"""The figures of a benchmark run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from inflight.bench.load_generator import LoadResult, Record
from inflight.errors import ParameterError, shown

LATE = 0.010  # seconds: with more lag, the client rather than the server may be what is measured
BUSY = 0.9  # share of a core


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of some values, in their own unit."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    std: float = 0.0

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread | None:
        """Return the distribution of the values, or None if there are none."""
        if not values:
            return None
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return cls(float(np.mean(values)), p50, p90, p99, max(values), float(np.std(values)))

    def to_ms(self) -> dict[str, float]:
        return {name: round(getattr(self, name) * 1e3, 4) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Problem:
    """A group of requests that failed in the same way."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one rate. Latencies and token counts cover completed requests only."""

    rate: float
    num_requests: int
    num_complete: int
    seconds: float  # from sending the first request to the end of the last answer
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_events: int  # events that contained tokens
    ttft: Spread | None  # from sending to the first token
    itl: Spread | None  # between two consecutive events of an answer
    tpot: Spread | None  # mean time between the tokens of an answer
    e2e: Spread | None  # from sending to the end of the answer
    lag: Spread | None  # how late requests were sent
    loop_lag: Spread | None  # lag of the client's event loop
    cpu_share: float
    problems: dict[str, Problem]
    num_good: int | None = None  # completed requests that met all objectives; None: there are none

    @property
    def goodput(self) -> float | None:
        """Requests per second that met all objectives."""
        return None if self.num_good is None else self.num_good / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.num_complete / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def num_failed(self) -> int:
        return self.num_requests - self.num_complete

    def warnings(self) -> list[str]:
        """Return reasons to doubt the figures."""
        warnings = []
        if self.lag is not None and self.lag.p99 > LATE and not math.isinf(self.rate):
            warnings.append(f"1% of the requests were sent at least {self.lag.p99 * 1e3:.0f} ms late")
        if self.loop_lag is not None and self.loop_lag.p99 > LATE:
            warnings.append(f"1% of the time the client was at least {self.loop_lag.p99 * 1e3:.0f} ms late")
        if self.cpu_share > BUSY:
            warnings.append(f"the client used {self.cpu_share:.0%} of a core")
        if warnings:
            warnings.append(
                "the client itself may be the bottleneck: try --processes, or run it on another machine"
            )
        return warnings

    def to_json(self) -> dict[str, Any]:
        spreads = {name: getattr(self, name) for name in ("ttft", "itl", "tpot", "e2e", "lag", "loop_lag")}
        return {
            "rate": "inf" if math.isinf(self.rate) else self.rate,
            "num_requests": self.num_requests,
            "num_complete": self.num_complete,
            "errors": {
                category: {"count": p.count, "example": p.example} for category, p in self.problems.items()
            },
            "seconds": self.seconds,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "goodput": self.goodput,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_events": self.num_events,
            **{f"{name}_ms": spread and spread.to_ms() for name, spread in spreads.items()},
            "client_cpu_share": self.cpu_share,
            "warnings": self.warnings(),
        }

    def to_vllm_json(self) -> dict[str, Any]:
        """Return the figures under the names of the file that `vllm bench serve --save-result` writes."""
        fields: dict[str, Any] = {
            "duration": self.seconds,
            "completed": self.num_complete,
            "failed": self.num_failed,
            "total_input_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": self.requests_per_s,
            "request_goodput": self.goodput,
            "output_throughput": self.output_tokens_per_s,
            "total_token_throughput": (self.num_prompt_tokens + self.num_output_tokens) / self.seconds,
        }
        for name, spread in (("ttft", self.ttft), ("tpot", self.tpot), ("itl", self.itl), ("e2el", self.e2e)):
            for field in ("mean", "p50", "std", "p90", "p99"):
                key = "median" if field == "p50" else field
                fields[f"{key}_{name}_ms"] = None if spread is None else getattr(spread, field) * 1e3
        return fields


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Parse objectives such as "ttft:200": the most seconds that a request may take, by metric."""
    objectives = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in ("ttft", "tpot", "e2el") or not limit > 0:
            raise ParameterError(
                f"goodput is {shown(text)}: it must be NAME:MILLISECONDS, and the names are ttft, tpot and e2el"
            )
        objectives[name] = limit / 1e3
    return objectives


def _seconds_per_token(record: Record) -> float:
    return (record.last - record.first) / max(1, record.num_tokens - 1)


def _is_good(record: Record, objectives: Mapping[str, float]) -> bool:
    took = {
        "ttft": record.first - record.sent,
        "tpot": _seconds_per_token(record),
        "e2el": record.ended - record.sent,
    }
    return all(took[name] <= limit for name, limit in objectives.items())


def summarise(rate: float, result: LoadResult, objectives: Mapping[str, float] | None = None) -> Run:
    """Return the figures of a run. `objectives` are the most seconds that a good request takes, by metric."""
    records = result.records
    complete = [record for record in records if record.error is None]
    start = min(record.sent for record in records)
    return Run(
        rate=rate,
        num_requests=len(records),
        num_complete=len(complete),
        seconds=max(record.ended for record in records) - start,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in complete),
        num_cached_tokens=sum(record.num_cached_tokens for record in complete),
        num_output_tokens=sum(record.num_tokens for record in complete),
        num_events=sum(len(record.times) for record in complete),
        ttft=Spread.from_values([record.first - record.sent for record in complete]),
        itl=Spread.from_values(
            [later - earlier for record in complete for earlier, later in pairwise(record.times)]
        ),
        tpot=Spread.from_values([_seconds_per_token(record) for record in complete if record.num_tokens > 1]),
        e2e=Spread.from_values([record.ended - record.sent for record in complete]),
        lag=Spread.from_values([record.lag for record in records if record.lag is not None]),
        loop_lag=Spread.from_values(result.loop_lags),
        cpu_share=result.cpu_share,
        problems=_problems(records),
        num_good=sum(_is_good(record, objectives) for record in complete) if objectives else None,
    )


def _problems(records: list[Record]) -> dict[str, Problem]:
    """Group failed requests by the kind of error, the most frequent kind first."""
    counts = Counter(record.error for record in records if record.error is not None)
    examples = {record.error: record.detail for record in reversed(records)}
    return {category: Problem(count, examples[category]) for category, count in counts.most_common()}
