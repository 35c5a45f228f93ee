"""`inflight bench serve`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from inflight.command import InflightCommand, InflightGroup
from inflight.console import check_writable, needs_extra, progress_bar
from inflight.errors import ConfigError, EngineError, ParameterError
from inflight.habits.bench_flags import BENCH_HABITS

if TYPE_CHECKING:
    from inflight.bench.report import Run
    from inflight.bench.serve import Progress as Advance
    from inflight.bench.server import ServerAddress
    from inflight.bench.workload import ServingWorkload

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
DEFAULT_REQUESTS = 400
MAX_ID = 10_000  # ids below it are in nearly every vocabulary

app = typer.Typer(cls=InflightGroup, help="Measure.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Measure."""


class BenchCommand(InflightCommand):
    habits = BENCH_HABITS


def _load(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Load", help=text, **more)


def _target(text: str, **more: Any) -> Any:
    return typer.Option(rich_help_panel="Server", help=text, **more)


def _output(text: str, *names: str) -> Any:
    return typer.Option(*names, rich_help_panel="Output", help=text)


_RATE = _load("Requests per second, or inf for all at once; several are measured one after the other.")
_PARAMETERS = _load("More parameters for every request, as JSON: '{\"top_p\": 0.9}'.")
_DATASET = _load("JSON lines with prompt or messages, and max_tokens if it is fixed.")
_NUMBER = _load("Number of requests.", min=1, show_default="400, or those of the dataset")


@app.command(cls=BenchCommand)
def serve(
    url: Annotated[str | None, _target("Where the server is.", show_default=DEFAULT_URL)] = None,
    host: Annotated[str | None, _target("In place of --url: the server's name or address.")] = None,
    port: Annotated[int | None, _target("In place of --url: its port.", min=1, max=65535)] = None,
    model: Annotated[
        str | None, _target("The model's name there.", show_default="the first that is served")
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], _target("Prompts are ids, or conversations of random words.")
    ] = "completions",
    api_key: Annotated[
        str | None, _target("Sent as a bearer token.", envvar="INFLIGHT_BENCH_API_KEY")
    ] = None,
    timeout: Annotated[float, _target("Seconds for one request.", min=0.001)] = 600.0,
    rate: Annotated[list[str] | None, _RATE] = None,
    num_requests: Annotated[int | None, _NUMBER] = None,
    prompt_len: Annotated[str, _load("Tokens of a prompt, LOW:HIGH.")] = "100:1024",
    output_len: Annotated[str, _load("Tokens of an answer, LOW:HIGH.")] = "32:256",
    dataset: Annotated[Path | None, _DATASET] = None,
    seed: Annotated[int, _load("Seed of lengths, prompts and moments.")] = 0,
    concurrency: Annotated[int | None, _load("Most requests at a time (closed loop).", min=1)] = None,
    ramp: Annotated[float, _load("Seconds in which the rate grows from zero.", min=0.0)] = 0.0,
    warmup: Annotated[int, _load("Requests beforehand that are not counted.", min=0)] = 8,
    temperature: Annotated[float, _load("0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, _load("Answers have the length asked for.")] = True,
    parameters: Annotated[str | None, _PARAMETERS] = None,
    processes: Annotated[int, _load("Processes of the client, one core each.", min=1, max=256)] = 1,
    as_json: Annotated[
        str | None, _output("Write the figures to a file, or - to print them.", "--json")
    ] = None,
    plot: Annotated[Path | None, _output("Draw latency over rate, as .svg or .png.")] = None,
    quiet: Annotated[bool, _output("Print no table.", "--quiet", "-q")] = False,
) -> None:
    """Send requests to a server at random moments and measure how it answers.

    An open loop: requests come at their rate whether or not earlier ones are answered, as users do. Works with any
    server that streams OpenAI's API.
    """
    _check_files(as_json, plot)
    with needs_extra("server"):
        from inflight.bench.server import ServerAddress
        from inflight.bench.workload import Range, ServingWorkload, parse_rate, read_dataset

    rates = [parse_rate(text) for given in rate or ["inf"] for text in given.split(",")]
    prompts, outputs = Range.parse("prompt_len", prompt_len), Range.parse("output_len", output_len)
    lines = () if dataset is None else read_dataset(dataset, endpoint)
    more = {"temperature": temperature, **_parse_parameters(parameters)}
    server = ServerAddress.parse(_url(url, host, port), api_key)
    server.wait_until_loaded()
    name = model or server.model()
    drawn = endpoint == "completions" and not lines
    workload = ServingWorkload(
        model=name,
        endpoint=endpoint,
        num_requests=num_requests or len(lines) or DEFAULT_REQUESTS,
        prompt_len=prompts,
        output_len=outputs,
        vocab_size=server.vocab_size(name, MAX_ID) if drawn else MAX_ID,
        seed=seed,
        ramp=ramp,
        ignore_eos=ignore_eos,
        parameters=more,
        dataset=lines,
    )
    how = {"concurrency": concurrency, "timeout": timeout}
    runs = _measure(server, workload, rates, warmup, processes, how, sys.stderr.isatty() and not quiet)
    _tell(runs, workload, server.url, as_json, plot, quiet)


def _url(url: str | None, host: str | None, port: int | None) -> str:
    if url is None:
        name = host or DEFAULT_HOST
        return f"http://{f'[{name}]' if ':' in name else name}:{port or DEFAULT_PORT}"
    if host is not None or port is not None:
        raise ConfigError("url is given together with host or port: give the one or the others")
    return url


def _measure(
    server: ServerAddress,
    workload: ServingWorkload,
    rates: list[float],
    warmup: int,
    processes: int,
    how: dict[str, Any],
    show: bool,
) -> list[Run]:
    from inflight.bench.crew import measure_with
    from inflight.bench.report import summarise
    from inflight.bench.serve import LoadPlan, measure
    from inflight.bench.terminal import rate_name
    from inflight.bench.workload import PlannedRequest

    target = server.target(workload.endpoint)
    if warmup:
        jobs = [
            PlannedRequest(index, 0.0, body) for index, body in enumerate(workload.bodies(warmup, "warmup"))
        ]
        _check_any(summarise(0.0, measure(LoadPlan(target, jobs, **how))))
    runs = []
    for index, rate in enumerate(rates):
        plan = LoadPlan(target, workload.jobs(rate, str(index)), **how)
        with _progress(rate_name(rate), len(plan.jobs), show and processes == 1) as advance:
            runs.append(summarise(rate, measure_with(processes, plan, advance)))
        _check_any(runs[-1])
    return runs


def _check_any(run: Run) -> None:
    if not run.num_complete:
        kind, problem = next(iter(run.problems.items()))
        raise EngineError(f"all {run.num_requests} requests failed; the first with {kind}: {problem.example}")


def _parse_parameters(text: str | None) -> dict[str, Any]:
    try:
        found = {} if text is None else json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ParameterError(f"parameters is {text!r:.200}: it must be a JSON object")
    return found


def _check_files(as_json: str | None, plot: Path | None) -> None:
    """What can be known to be wrong before anything is measured."""
    for path in (None if as_json in (None, "-") else Path(str(as_json)), plot):
        if path is not None:
            check_writable(path)
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise ConfigError(f"plot is {str(plot)!r}: its name must end in .svg or .png")
    if plot is not None and plot.suffix == ".png":
        from inflight.compare.drawing import require_pillow

        require_pillow()


@contextmanager
def _progress(name: str, total: int, show: bool) -> Iterator[Advance | None]:
    if not show:
        yield None
        return
    with progress_bar() as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def _tell(
    runs: list[Run], workload: ServingWorkload, url: str, as_json: str | None, plot: Path | None, quiet: bool
) -> None:
    from inflight.bench.terminal import print_runs

    lengths = f"prompts {workload.prompt_len}, answers {workload.output_len} tokens"
    asked = "from a file" if workload.dataset else lengths
    title = f"{workload.num_requests:,} requests to {workload.model}, {workload.endpoint}, {asked}"
    data = {
        "benchmark": "serve",
        "url": url,
        "model": workload.model,
        "endpoint": workload.endpoint,
        "num_requests": workload.num_requests,
        "prompt_len": str(workload.prompt_len),
        "output_len": str(workload.output_len),
        "seed": workload.seed,
        "runs": [run.to_json() for run in runs],
    }
    if as_json == "-":
        print(json.dumps(data))
    elif as_json is not None:
        Path(as_json).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        from inflight.bench.plot import write_plot

        write_plot(runs, title, plot)
    if not quiet and as_json != "-":
        print_runs(runs, title, Console())
