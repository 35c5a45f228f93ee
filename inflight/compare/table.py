"""The figures as rows of text, strategies side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inflight.compare.report import Comparison, StrategyResult

Cell = Callable[["StrategyResult"], str]


def _seconds(value: float) -> str:
    return f"{value:,.2f} s"


ROWS: tuple[tuple[str, Cell], ...] = (
    ("total time", lambda result: _seconds(result.figures.total_time)),
    ("output tokens/s", lambda result: f"{result.figures.tokens_per_second:,.0f}"),
    ("time to first token, mean", lambda result: _seconds(result.figures.mean_ttft)),
    ("time to first token, p99", lambda result: _seconds(result.figures.p99_ttft)),
    ("latency, p50", lambda result: _seconds(result.figures.p50_latency)),
    ("latency, p99", lambda result: _seconds(result.figures.p99_latency)),
    ("slot use", lambda result: f"{result.figures.slot_use:.1%}"),
    ("KV waste", lambda result: f"{result.figures.kv_waste:.1%}"),
    ("steps", lambda result: f"{result.figures.num_steps:,}"),
)


def rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """A name and a cell for every strategy, row by row."""
    results = list(comparison.results.values())
    found = [(name, [cell(result) for result in results]) for name, cell in ROWS]
    use = [result.figures.gpu_utilization for result in results]
    if any(share is not None for share in use):
        found.append(("GPU utilisation", ["" if share is None else f"{share:.0%}" for share in use]))
    found.append((f"{comparison.reference} is faster by", [f"{result.speedup:.2f} x" for result in results]))
    return found
