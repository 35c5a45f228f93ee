"""Benchmark results as tables in a terminal."""

from __future__ import annotations

import math

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from inflight.bench.report import Run, Spread

_SPREADS = (
    ("time to first token (TTFT)", "ttft"),
    ("inter-token latency (ITL)", "itl"),
    ("time per output token (TPOT)", "tpot"),
    ("end-to-end latency (E2E)", "e2e"),
    ("client send delay", "lag"),
)


def rate_name(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g}/s"


def print_runs(runs: list[Run], title: str, console: Console) -> None:
    console.print(Text(title))
    if len(runs) == 1:
        _print_one(runs[0], console)
    else:
        console.print(_side_by_side(runs))
    for run in runs:
        prefix = f"{rate_name(run.rate)}: " if len(runs) > 1 else ""
        for category, problem in run.problems.items():
            message = f"{prefix}{problem.count} failed, {category}: {problem.example}"
            console.print(f"[red]{escape(message)}[/red]", highlight=False)
        for warning in run.warnings():
            console.print(f"[yellow]{escape(prefix + warning)}[/yellow]", highlight=False)


def _print_one(run: Run, console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        ("completed requests", f"{run.num_complete:,} of {run.num_requests:,}"),
        ("time", f"{run.seconds:,.2f} s"),
        ("requests/s", f"{run.requests_per_s:,.2f}"),
        *(() if run.goodput is None else (("goodput, requests/s", f"{run.goodput:,.2f}"),)),
        ("output tokens/s", f"{run.output_tokens_per_s:,.0f}"),
        ("prompt tokens", f"{run.num_prompt_tokens:,} ({run.num_cached_tokens:,} cached)"),
        ("output tokens", f"{run.num_output_tokens:,} in {run.num_events:,} events"),
    ):
        table.add_row(name, value)
    console.print(table)
    spreads = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    spreads.add_column("ms")
    for name in ("mean", "p50", "p90", "p99", "max"):
        spreads.add_column(name, justify="right")
    for name, field in _SPREADS:
        spread: Spread | None = getattr(run, field)
        if spread is not None:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
            spreads.add_row(name, *map(_ms, values))
    console.print(spreads)


def _side_by_side(runs: list[Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rate", no_wrap=True)
    spreads = ("TTFT ms\np50 / p99", "ITL ms\np50 / p99", "E2E ms\np50 / p99")
    has_goodput = any(run.goodput is not None for run in runs)
    for name in ("req/s", *(("good\nreq/s",) if has_goodput else ()), "out\ntok/s", *spreads):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            rate_name(run.rate),
            f"{run.requests_per_s:,.1f}",
            *(() if run.goodput is None else (f"{run.goodput:,.1f}",)),
            f"{run.output_tokens_per_s:,.0f}",
            *(_pair(spread) for spread in (run.ttft, run.itl, run.e2e)),
        )
    return table


def _pair(spread: Spread | None) -> str:
    return "-" if spread is None else f"{_ms(spread.p50)} / {_ms(spread.p99)}"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
