"""The `inflight bench serve` command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from inflight.cli.command import InflightCommand, InflightGroup, check_writable, needs_extra, progress_bar
from inflight.cli.vllm_flags import BENCH_RULES
from inflight.errors import ConfigError, EngineError, ParameterError, shown

if TYPE_CHECKING:
    from inflight.bench.load_generator import Progress as Advance
    from inflight.bench.report import Run
    from inflight.bench.server import ServerAddress
    from inflight.bench.workload import Range, ServingWorkload

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
DEFAULT_REQUESTS = 400
MAX_ID = 10_000  # nearly every vocabulary contains the token ids below this

app = typer.Typer(cls=InflightGroup, help="Measure the performance of a server.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Measure the performance of a server."""


class BenchCommand(InflightCommand):
    compat_rules = BENCH_RULES


def _load(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Load", help=text, **more)


def _target(text: str, **more: Any) -> Any:
    return typer.Option(rich_help_panel="Server", help=text, **more)


def _output(text: str, *names: str) -> Any:
    return typer.Option(*names, rich_help_panel="Output", help=text)


_RATE = _load("Requests per second, or inf for all at once; several rates are measured one after the other.")
_PARAMETERS = _load("Additional parameters of every request, as JSON: '{\"top_p\": 0.9}'.")
_DATASET = _load(
    "JSON Lines file; each line has prompt or messages, and optionally max_tokens. Or a ShareGPT file, of whose "
    "conversations the first turns are sent."
)
_NUMBER = _load("Number of requests.", min=1, show_default="400, or the number of lines of the dataset")
_PROMPT_LEN = _load(
    "Prompt length in tokens, LOW:HIGH.", show_default="100:1024; 1024 with --random-range-ratio"
)
_OUTPUT_LEN = _load(
    "Answer length in tokens, LOW:HIGH.",
    show_default="32:256; 128 with --random-range-ratio; as in a ShareGPT file",
)
_RATIO = _load("Make lengths vary by up to this share: 0.2 means 20% shorter to 20% longer.")
_BURSTINESS = _load("How evenly requests arrive: 1 is a Poisson process, less comes in bursts.")
_GOODPUT = typer.Option(
    rich_help_panel="Output",
    help="Also count the requests that meet all these objectives: ttft:MS, tpot:MS, e2el:MS.",
)


@app.command(cls=BenchCommand)
def serve(
    url: Annotated[str | None, _target("Base URL of the server.", show_default=DEFAULT_URL)] = None,
    host: Annotated[str | None, _target("Host name or address of the server, instead of --url.")] = None,
    port: Annotated[int | None, _target("Port of the server, instead of --url.", min=1, max=65535)] = None,
    model: Annotated[
        str | None, _target("Name of the model.", show_default="the first model the server lists")
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"],
        _target("Send token ids as prompts, or conversations of random words."),
    ] = "completions",
    api_key: Annotated[
        str | None, _target("API key, sent as a bearer token.", envvar="INFLIGHT_BENCH_API_KEY")
    ] = None,
    timeout: Annotated[float, _target("Timeout of a request in seconds.", min=0.001)] = 600.0,
    rate: Annotated[list[str] | None, _RATE] = None,
    num_requests: Annotated[int | None, _NUMBER] = None,
    prompt_len: Annotated[str | None, _PROMPT_LEN] = None,
    output_len: Annotated[str | None, _OUTPUT_LEN] = None,
    random_range_ratio: Annotated[float | None, _RATIO] = None,
    dataset: Annotated[Path | None, _DATASET] = None,
    seed: Annotated[int, _load("Seed for lengths, prompts and arrival times.")] = 0,
    concurrency: Annotated[
        int | None, _load("Maximum number of requests in flight (closed loop).", min=1)
    ] = None,
    burstiness: Annotated[float, _BURSTINESS] = 1.0,
    ramp: Annotated[float, _load("Seconds over which the rate grows from zero.", min=0.0)] = 0.0,
    warmup: Annotated[int, _load("Number of warm-up requests, which are not measured.", min=0)] = 8,
    temperature: Annotated[float, _load("Sampling temperature; 0 is greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, _load("Generate the full answer length instead of stopping at the end token.")
    ] = True,
    parameters: Annotated[str | None, _PARAMETERS] = None,
    processes: Annotated[
        int, _load("Number of load generator processes; each uses up to one core.", min=1, max=256)
    ] = 1,
    as_json: Annotated[
        str | None, _output("Write the figures to this file; - prints them.", "--json")
    ] = None,
    plot: Annotated[Path | None, _output("Plot latency over rate to this .svg or .png file.")] = None,
    goodput: Annotated[list[str] | None, _GOODPUT] = None,
    save_result: Annotated[
        bool, _output("Write the figures of each rate to a file, with vLLM's names.", "--save-result")
    ] = False,
    result_dir: Annotated[Path | None, _output("Folder for --save-result.")] = None,
    result_filename: Annotated[str | None, _output("Name of the file; implies --save-result.")] = None,
    quiet: Annotated[bool, _output("Do not print the table.", "--quiet", "-q")] = False,
) -> None:
    """Send requests to a server at random times and measure its latency and throughput.

    The load is an open loop: like users, requests arrive at their rate whether or not earlier ones have been answered.
    Works with any server that has OpenAI's streaming API.
    """
    _check_files(as_json, plot)
    with needs_extra("server"):
        from inflight.bench.compare.arrivals import arrival_times
        from inflight.bench.report import parse_goodput
        from inflight.bench.server import ServerAddress
        from inflight.bench.workload import (
            ServingWorkload,
            is_sharegpt,
            parse_rate,
            read_dataset,
            read_sharegpt,
        )

    rates = [parse_rate(text) for item in rate or ["inf"] for text in item.split(",")]
    results = ResultFiles.from_options(save_result, result_dir, result_filename, len(rates))
    objectives = parse_goodput(goodput or ())
    arrival_times(0, 1.0, seed, ramp, burstiness)  # checks them before the server is asked
    prompts, outputs = _lengths(prompt_len, output_len, random_range_ratio)
    lines = () if dataset is None or is_sharegpt(dataset) else read_dataset(dataset, endpoint)
    extra = {"temperature": temperature, **_parse_parameters(parameters)}
    server = ServerAddress.parse(_url(url, host, port), api_key)
    server.wait_until_loaded()
    name = model or server.model()
    if dataset is not None and not lines:
        count, counter = num_requests or DEFAULT_REQUESTS, server.token_counter(name)
        lines = read_sharegpt(dataset, endpoint, count, seed, counter, keep_lengths=output_len is None)
    sends_ids = endpoint == "completions" and not lines
    workload = ServingWorkload(
        model=name,
        endpoint=endpoint,
        num_requests=num_requests or len(lines) or DEFAULT_REQUESTS,
        prompt_len=prompts,
        output_len=outputs,
        vocab_size=server.vocab_size(name, MAX_ID) if sends_ids else MAX_ID,
        seed=seed,
        ramp=ramp,
        burstiness=burstiness,
        ignore_eos=ignore_eos,
        parameters=extra,
        dataset=lines,
    )
    limits = {"concurrency": concurrency, "timeout": timeout}
    show = sys.stderr.isatty() and not quiet
    runs = _measure(server, workload, rates, warmup, processes, limits, objectives, show)
    if results is not None:
        results.write(runs, workload, concurrency)
    _report(runs, workload, server.url, as_json, plot, quiet)


def _lengths(prompt_len: str | None, output_len: str | None, ratio: float | None) -> tuple[Range, Range]:
    from inflight.bench.workload import Range

    if ratio is None:
        return Range.parse("prompt_len", prompt_len or "100:1024"), Range.parse(
            "output_len", output_len or "32:256"
        )
    prompts, outputs = (
        Range.parse("prompt_len", prompt_len or "1024"),
        Range.parse("output_len", output_len or "128"),
    )
    return prompts.widened("prompt_len", ratio), outputs.widened("output_len", ratio)


def _url(url: str | None, host: str | None, port: int | None) -> str:
    if url is None:
        name = host or DEFAULT_HOST
        return f"http://{f'[{name}]' if ':' in name else name}:{port or DEFAULT_PORT}"
    if host is not None or port is not None:
        raise ConfigError("url cannot be combined with host or port: give either url, or host and port")
    return url


def _measure(
    server: ServerAddress,
    workload: ServingWorkload,
    rates: list[float],
    warmup: int,
    processes: int,
    limits: dict[str, Any],
    objectives: dict[str, float],
    show: bool,
) -> list[Run]:
    from inflight.bench.load_generator import LoadPlan, measure, measure_with_workers
    from inflight.bench.report import summarise
    from inflight.bench.terminal import rate_name
    from inflight.bench.workload import PlannedRequest

    target = server.target(workload.endpoint)
    if warmup:
        jobs = [
            PlannedRequest(index, 0.0, body) for index, body in enumerate(workload.bodies(warmup, "warmup"))
        ]
        _check_any_completed(summarise(0.0, measure(LoadPlan(target, jobs, **limits))))
    runs = []
    for index, rate in enumerate(rates):
        plan = LoadPlan(target, workload.jobs(rate, str(index)), **limits)
        with _progress(rate_name(rate), len(plan.jobs), show and processes == 1) as advance:
            runs.append(summarise(rate, measure_with_workers(processes, plan, advance), objectives))
        _check_any_completed(runs[-1])
    return runs


def _check_any_completed(run: Run) -> None:
    if not run.num_complete:
        error, problem = next(iter(run.problems.items()))
        raise EngineError(
            f"all {run.num_requests} requests failed; the most frequent error is {error}: {problem.example}"
        )


def _parse_parameters(text: str | None) -> dict[str, Any]:
    try:
        parameters = {} if text is None else json.loads(text)
    except ValueError:
        parameters = None
    if not isinstance(parameters, dict):
        raise ParameterError(f"parameters is {shown(text, 200)}: it must be a JSON object")
    return parameters


@dataclass(frozen=True)
class ResultFiles:
    """The files of `--save-result`, one per rate, with the names that vLLM gives to files and figures."""

    folder: Path
    filename: str | None

    @classmethod
    def from_options(
        cls, save: bool, folder: Path | None, filename: str | None, num_rates: int
    ) -> ResultFiles | None:
        """Return None if nothing is to be saved. Raises ConfigError if the files could not be written."""
        if not save and filename is None:
            return None
        if filename is not None and num_rates > 1:
            raise ConfigError(
                f"result_filename is {filename!r}: with {num_rates} rates each has a file of its own"
            )
        results = cls(folder or Path(), filename)
        try:
            results.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"result_dir is {str(folder)!r}: it cannot be created: {error.strerror}"
            ) from error
        check_writable(results.folder / (filename or "result.json"))
        return results

    def write(self, runs: list[Run], workload: ServingWorkload, concurrency: int | None) -> None:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        backend = "openai" if workload.endpoint == "completions" else "openai-chat"
        limit = "" if concurrency is None else f"-concurrency{concurrency}"
        for run in runs:
            name = f"{backend}-{run.rate}qps{limit}-{workload.model.split('/')[-1]}-{now}.json"
            path = self.folder / (self.filename or name)
            fields = {
                "date": now,
                "backend": backend,
                "endpoint_type": backend,
                "model_id": workload.model,
                "num_prompts": workload.num_requests,
                "request_rate": "inf" if math.isinf(run.rate) else run.rate,
                "burstiness": workload.burstiness,
                "max_concurrency": concurrency,
                **run.to_vllm_json(),
            }
            path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
            print(f"wrote {path}", file=sys.stderr)


def _check_files(as_json: str | None, plot: Path | None) -> None:
    """Check the output files before anything is measured."""
    for path in (None if as_json in (None, "-") else Path(str(as_json)), plot):
        if path is not None:
            check_writable(path)
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise ConfigError(f"plot is {str(plot)!r}: its name must end in .svg or .png")
    if plot is not None and plot.suffix == ".png":
        from inflight.bench.compare.drawing import require_pillow

        require_pillow()


@contextmanager
def _progress(name: str, total: int, show: bool) -> Iterator[Advance | None]:
    if not show:
        yield None
        return
    with progress_bar() as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def _report(
    runs: list[Run], workload: ServingWorkload, url: str, as_json: str | None, plot: Path | None, quiet: bool
) -> None:
    from inflight.bench.terminal import print_runs

    lengths = f"prompts {workload.prompt_len}, answers {workload.output_len} tokens"
    source = "from a file" if workload.dataset else lengths
    title = f"{workload.num_requests:,} requests to {workload.model}, {workload.endpoint}, {source}"
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
