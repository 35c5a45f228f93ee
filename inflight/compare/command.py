"""`inflight compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from inflight.command import InflightCommand
from inflight.config import ENGINE_OPTIONS, EngineConfig
from inflight.console import check_writable, progress_bar
from inflight.errors import ConfigError, ParameterError
from inflight.habits.habit import ANY, Habit, Habits
from inflight.habits.serve_flags import SERVE_HABITS
from inflight.interrupts import interrupts_end_at_once
from inflight.option_sources import argument

if TYPE_CHECKING:
    from inflight.compare.report import Comparison
    from inflight.compare.rerank import RerankComparison
    from inflight.compare.shown import Shown


class CompareCommand(InflightCommand):
    """Its options were called otherwise once."""

    habits = Habits(
        (
            *SERVE_HABITS.rows,
            Habit("--requests N", {ANY: "--num-requests {}"}),
            Habit("--batch-size N", {ANY: "--max-num-seqs {}"}),
        )
    )


DEFAULT_STRATEGIES = "sequential,static,continuous"
WORKLOAD = "Workload"
OUTPUT = "Output"


def compare(
    model: Annotated[str | None, argument(ENGINE_OPTIONS["model"])] = None,
    workload: Annotated[
        str,
        typer.Option(
            metavar="chat|rerank",
            rich_help_panel=WORKLOAD,
            help="Answers that are generated, or pairs of a question and a passage that are scored.",
        ),
    ] = "chat",
    num_requests: Annotated[
        int, typer.Option("--num-requests", min=1, rich_help_panel=WORKLOAD, help="Number of requests.")
    ] = 64,
    arrival: Annotated[
        str,
        typer.Option(
            metavar="burst|poisson:RATE",
            rich_help_panel=WORKLOAD,
            help="All at once, or at random moments, RATE a second on average.",
        ),
    ] = "burst",
    max_num_seqs: Annotated[
        int, typer.Option(min=1, rich_help_panel=WORKLOAD, help="Slots: most requests in the running batch.")
    ] = 16,
    lengths: Annotated[
        str,
        typer.Option(
            metavar="real|ragged",
            rich_help_panel=WORKLOAD,
            help="Chat prompts with answers that end by themselves, or random ids and fixed lengths.",
        ),
    ] = "real",
    max_tokens: Annotated[
        int | None,
        typer.Option(rich_help_panel=WORKLOAD, help="Longest answer.", show_default="768, ragged 256"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(rich_help_panel=WORKLOAD, help="0 is greedy.", show_default="the checkpoint's"),
    ] = None,
    seed: Annotated[
        int, typer.Option(rich_help_panel=WORKLOAD, help="Seed of prompts, arrivals and sampling.")
    ] = 0,
    strategies: Annotated[
        str, typer.Option(rich_help_panel=WORKLOAD, help="Names of policies, with commas between.")
    ] = DEFAULT_STRATEGIES,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write a page to this file.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write the picture as SVG.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(rich_help_panel=OUTPUT, help="Write the picture as PNG.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="Print no table, no picture.")
    ] = False,
) -> None:
    """Run the same requests one at a time, in static batches and with continuous batching, and show why it matters."""
    names = _check(strategies, html, svg, png)
    if workload not in ("chat", "rerank"):
        raise ParameterError(f"workload is {workload!r}: allowed are chat and rerank")
    if workload == "rerank" and (lengths, max_tokens, temperature) != ("real", None, None):
        raise ParameterError(
            "lengths, max_tokens and temperature are for answers: the workload rerank has none"
        )
    with interrupts_end_at_once():
        from inflight.compare.report import compare as compare_generating  # torch is loaded only now
        from inflight.compare.rerank import PairWorkload, compare_reranking
        from inflight.compare.workload import Arrival, Workload
        from inflight.loading import load_engine
        from inflight.models.builtin import builtin_folder

    shown = "the built-in model" if model is None else model
    reranks = workload == "rerank"
    if reranks and model is None:
        model, shown = str(builtin_folder("reranker")), "the built-in reranker"
    coming = Arrival.parse(arrival)
    asked = Workload(num_requests, coming, lengths, max_tokens, temperature, seed)
    engine = load_engine(EngineConfig.create(model, max_num_seqs=max_num_seqs, policy=names[0]))
    comparison: Comparison | RerankComparison
    try:
        with _progress(num_requests, show=not quiet and sys.stderr.isatty()) as progress:
            if reranks:
                pairs = PairWorkload(num_requests, coming, seed)
                comparison = compare_reranking(engine, pairs, names, max_num_seqs, shown, progress)
            else:
                comparison = compare_generating(engine, asked, names, max_num_seqs, shown, progress)
    finally:
        engine.close()
    _write(comparison, html, svg, png)
    _show(comparison, as_json, quiet)
    written = [str(file) for file in (html, svg, png) if file is not None]
    if written and not quiet:
        print(f"written: {', '.join(written)}", file=sys.stderr)


def _check(strategies: str, *files: Path | None) -> list[str]:
    """What can be known to be wrong before the model is loaded."""
    from inflight.compare.png import require_pillow
    from inflight.scheduling.policy import make_policy

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ParameterError(f"strategies is {strategies!r}: it must name at least one, and none twice")
    for name in names:
        make_policy(name)
    for path in files:
        if path is not None:
            check_writable(path)
    if files[-1] is not None:
        require_pillow()
    return names


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[str, int], None] | None]:
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


def _write(comparison: Shown, html: Path | None, svg: Path | None, png: Path | None) -> None:
    from inflight.compare.drawing import draw
    from inflight.compare.html import to_html
    from inflight.compare.png import write_png
    from inflight.compare.svg import to_svg

    try:
        if html is not None:
            html.write_text(to_html(comparison), encoding="utf-8")
        if svg is not None:
            svg.write_text(to_svg(draw(comparison)), encoding="utf-8")
        if png is not None:
            write_png(draw(comparison), png)
    except OSError as error:
        raise ConfigError(f"a picture cannot be written: {error}") from error


def _show(comparison: Comparison | RerankComparison, as_json: bool, quiet: bool) -> None:
    from inflight.compare.terminal import print_comparison

    if as_json:
        print(json.dumps(comparison.to_json()))
    elif not quiet:
        print_comparison(comparison, Console())
