"""The `inflight compare` command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from inflight.cli import interrupts_end_at_once
from inflight.cli.command import InflightCommand, check_writable, progress_bar
from inflight.cli.option_sources import argument
from inflight.cli.vllm_flags import SERVE_RULES
from inflight.config import ENGINE_OPTIONS, EngineConfig
from inflight.errors import ConfigError, ParameterError
from inflight.vllm_rules import ANY, CompatRule, CompatRules

if TYPE_CHECKING:
    from inflight.bench.compare.report import Comparison
    from inflight.bench.compare.rerank import PairWorkload, RerankComparison
    from inflight.bench.compare.workload import Workload


class CompareCommand(InflightCommand):
    """Accepts vLLM's engine flags and this command's former option names."""

    compat_rules = CompatRules(
        (
            *SERVE_RULES.rows,
            CompatRule("--requests N", {ANY: "--num-requests {}"}),
            CompatRule("--batch-size N", {ANY: "--max-num-seqs {}"}),
        )
    )


DEFAULT_STRATEGIES = "sequential,static,continuous"
Progress = Callable[[str, int], None]  # called with the strategy and its number of finished requests


def _workload(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Workload", help=text, **more)


def _output(text: str, *names: str) -> Any:
    return typer.Option(*names, rich_help_panel="Output", help=text)


_KIND = _workload("Generate answers, or score pairs of a question and a passage.", metavar="chat|rerank")
_ARRIVAL = _workload(
    "All requests at once, or at random times, RATE per second on average.", metavar="burst|poisson:RATE"
)
_LENGTHS = _workload(
    "Chat prompts whose answers end naturally, or random token ids with fixed lengths.", metavar="real|ragged"
)
_MAX_NUM_SEQS = _workload("Number of slots: the maximum number of requests in the running batch.", min=1)
_MAX_TOKENS = _workload("Maximum length of an answer.", show_default="768; 256 for ragged")
_TEMPERATURE = _workload("Sampling temperature; 0 is greedy.", show_default="the checkpoint's")


def compare(
    model: Annotated[str | None, argument(ENGINE_OPTIONS["model"])] = None,
    workload: Annotated[str, _KIND] = "chat",
    num_requests: Annotated[int, _workload("Number of requests.", "--num-requests", min=1)] = 64,
    arrival: Annotated[str, _ARRIVAL] = "burst",
    max_num_seqs: Annotated[int, _MAX_NUM_SEQS] = 16,
    lengths: Annotated[str, _LENGTHS] = "real",
    max_tokens: Annotated[int | None, _MAX_TOKENS] = None,
    temperature: Annotated[float | None, _TEMPERATURE] = None,
    seed: Annotated[int, _workload("Seed for prompts, arrivals and sampling.")] = 0,
    strategies: Annotated[
        str, _workload("Scheduling policies to compare, separated by commas.")
    ] = DEFAULT_STRATEGIES,
    as_json: Annotated[bool, _output("Print the results as one JSON object.", "--json")] = False,
    html: Annotated[Path | None, _output("Write an HTML page to this file.")] = None,
    quiet: Annotated[bool, _output("Print neither table nor picture.", "--quiet", "-q")] = False,
) -> None:
    """Run the same requests one at a time, in static batches and with continuous batching, and show the difference."""
    names = _check(strategies, html)
    if workload not in ("chat", "rerank"):
        raise ParameterError(f"workload is {workload!r}: it must be chat or rerank")
    if workload == "rerank" and (lengths, max_tokens, temperature) != ("real", None, None):
        raise ParameterError(
            "lengths, max_tokens and temperature apply to generated answers: the rerank workload has none"
        )
    with interrupts_end_at_once():
        from inflight.bench.compare.arrivals import Arrival
        from inflight.bench.compare.rerank import PairWorkload  # imports torch
        from inflight.bench.compare.workload import Workload

    arrivals = Arrival.parse(arrival)
    requests: Workload | PairWorkload = Workload(
        num_requests, arrivals, lengths, max_tokens, temperature, seed
    )
    if workload == "rerank":
        requests = PairWorkload(num_requests, arrivals, seed)
    with_progress = partial(_progress, num_requests, not quiet and sys.stderr.isatty())
    comparison = _measure(model, requests, names, max_num_seqs, with_progress)
    if html is not None:
        _write(comparison, html)
    _print(comparison, as_json, quiet)
    if html is not None and not quiet:
        print(f"wrote {html}", file=sys.stderr)


def _measure(
    model: str | None,
    workload: Workload | PairWorkload,
    names: list[str],
    max_num_seqs: int,
    with_progress: Callable[[], AbstractContextManager[Progress | None]],
) -> Comparison | RerankComparison:
    """Run the same requests under every policy, on one engine."""
    from inflight.bench.compare.report import compare as compare_generating
    from inflight.bench.compare.rerank import PairWorkload, compare_reranking
    from inflight.checkpoint.builtin import builtin_folder
    from inflight.loading.load import load_engine

    model_name = "the built-in model" if model is None else model
    if model is None and isinstance(workload, PairWorkload):
        model, model_name = str(builtin_folder("reranker")), "the built-in reranker"
    engine = load_engine(EngineConfig.create(model, max_num_seqs=max_num_seqs, policy=names[0]))
    try:
        with with_progress() as progress:
            if isinstance(workload, PairWorkload):
                return compare_reranking(engine, workload, names, max_num_seqs, model_name, progress)
            return compare_generating(engine, workload, names, max_num_seqs, model_name, progress)
    finally:
        engine.close()


def _check(strategies: str, html: Path | None) -> list[str]:
    """Return the strategies' names, after checking everything that can be checked before the model is loaded."""
    from inflight.scheduling.policy import make_policy

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ParameterError(
            f"strategies is {strategies!r}: it must name at least one policy, and none of them twice"
        )
    for name in names:
        make_policy(name)
    if html is not None:
        check_writable(html)
    return names


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Progress | None]:
    if not show:
        yield None
        return
    tasks: dict[str, Any] = {}
    with progress_bar() as bar:

        def advance(strategy: str, num_done: int) -> None:
            if strategy not in tasks:
                tasks[strategy] = bar.add_task(strategy, total=total)
            bar.update(tasks[strategy], completed=num_done)

        yield advance


def _write(comparison: Comparison | RerankComparison, html: Path) -> None:
    from inflight.bench.compare.page import to_html

    try:
        html.write_text(to_html(comparison), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the page: {error}") from error


def _print(comparison: Comparison | RerankComparison, as_json: bool, quiet: bool) -> None:
    from inflight.bench.compare.terminal import print_comparison

    if as_json:
        print(json.dumps(comparison.to_json()))
    elif not quiet:
        print_comparison(comparison, Console())
