"""Figures of a run, as JSON and for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from inflight.bench.serve import Measured, Record

LATE = 0.010  # seconds of lag from which on the client may be what is measured
BUSY = 0.9  # of a core


@dataclass(frozen=True, slots=True)
class Spread:
    """How values lie, in their own unit."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where there is nothing to tell."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            math.fsum(ordered) / len(ordered),
            percentile(ordered, 0.5),
            percentile(ordered, 0.9),
            percentile(ordered, 0.99),
            ordered[-1],
        )

    def to_ms(self) -> dict[str, float]:
        return {name: round(getattr(self, name) * 1e3, 4) for name in self.__slots__}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, with the way between two of them divided."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Problem:
    """Requests that failed in the same way."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Run:
    """One rate, measured. Latencies and tokens are those of complete answers."""

    rate: float
    num_requests: int
    num_complete: int
    seconds: float  # from the first request to the end of the last
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_events: int  # that brought tokens
    ttft: Spread | None  # from sending to the first token
    itl: Spread | None  # between two successive events of an answer
    tpot: Spread | None  # between two tokens, on average over an answer
    e2e: Spread | None  # from sending to the end of the answer
    lag: Spread | None  # between the moment to send and sending
    loop_lag: Spread | None  # of the client's event loop
    cpu_share: float
    problems: dict[str, Problem]

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
        """Reasons to doubt the figures."""
        found = []
        if self.lag is not None and self.lag.p99 > LATE and not math.isinf(self.rate):
            found.append(f"1% of the requests were sent {self.lag.p99 * 1e3:.0f} ms late or more")
        if self.loop_lag is not None and self.loop_lag.p99 > LATE:
            found.append(f"1% of the time the client was {self.loop_lag.p99 * 1e3:.0f} ms late or more")
        if self.cpu_share > BUSY:
            found.append(f"the client used {self.cpu_share:.0%} of a core")
        if found:
            found.append(
                "the client itself may be the bottleneck: try --processes, or another machine for it"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        spreads = {name: getattr(self, name) for name in ("ttft", "itl", "tpot", "e2e", "lag", "loop_lag")}
        return {
            "rate": "inf" if math.isinf(self.rate) else self.rate,
            "num_requests": self.num_requests,
            "num_complete": self.num_complete,
            "errors": {kind: {"count": p.count, "example": p.example} for kind, p in self.problems.items()},
            "seconds": self.seconds,
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_events": self.num_events,
            **{f"{name}_ms": spread and spread.to_ms() for name, spread in spreads.items()},
            "client_cpu_share": self.cpu_share,
            "warnings": self.warnings(),
        }


def summarise(rate: float, measured: Measured) -> Run:
    records = measured.records
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
        ttft=Spread.of([record.first - record.sent for record in complete]),
        itl=Spread.of([later - earlier for record in complete for earlier, later in pairwise(record.times)]),
        tpot=Spread.of(_per_token(complete)),
        e2e=Spread.of([record.ended - record.sent for record in complete]),
        lag=Spread.of([record.lag for record in records if record.lag is not None]),
        loop_lag=Spread.of(measured.loop_lags),
        cpu_share=measured.cpu_share,
        problems=_problems(records),
    )


def _per_token(records: list[Record]) -> list[float]:
    return [
        (record.last - record.first) / (record.num_tokens - 1) for record in records if record.num_tokens > 1
    ]


def _problems(records: list[Record]) -> dict[str, Problem]:
    """By kind, the most frequent first."""
    counts = Counter(record.error for record in records if record.error is not None)
    examples = {record.error: record.detail for record in reversed(records)}
    return {kind: Problem(count, examples[kind]) for kind, count in counts.most_common()}
