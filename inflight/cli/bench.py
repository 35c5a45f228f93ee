"""The `inflight bench serve` command."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console

from inflight.cli.command import InflightCommand, InflightGroup, check_writable, needs_extra, progress_bar
from inflight.cli.option_sources import with_flags
from inflight.cli.vllm_flags import BENCH_RULES
from inflight.errors import ConfigError, EngineError, ParameterError, shown
from inflight.option import check, option, options_of

if TYPE_CHECKING:
    from inflight.bench.load_generator import Progress as Advance
    from inflight.bench.report import Run
    from inflight.bench.server import ServerAddress
    from inflight.bench.workload import ServingWorkload

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
DEFAULT_REQUESTS = 400
MAX_ID = 10_000  # nearly every vocabulary contains the token ids below this
KEY_VARIABLE = "INFLIGHT_BENCH_API_KEY"
SERVER, LOAD, OUTPUT = "Server", "Load", "Output"  # panels of the help

app = typer.Typer(cls=InflightGroup, help="Measure the performance of a server.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Measure the performance of a server."""


class BenchCommand(InflightCommand):
    compat_rules = BENCH_RULES


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """The options of `inflight bench serve`."""

    url: str | None = option(None, SERVER, "Base URL of the server.", unset=DEFAULT_URL)
    host: str | None = option(None, SERVER, "Host name or address of the server, instead of --url.")
    port: int | None = option(
        None, SERVER, "Port of the server, instead of --url.", at_least=1, at_most=65535
    )
    model: str | None = option(None, SERVER, "Name of the model.", unset="the first model the server lists")
    endpoint: Literal["completions", "chat"] = option(
        "completions",
        SERVER,
        "Send token ids as prompts, or conversations of random words.",
        choices=("completions", "chat"),
    )
    api_key: str | None = option(
        None, SERVER, f"API key, sent as a bearer token. Prefer {KEY_VARIABLE}, which ps does not show."
    )
    timeout: float = option(600.0, SERVER, "Timeout of a request in seconds.", at_least=0.001)

    rate: tuple[str, ...] = option(
        ("inf",),
        LOAD,
        "Requests per second, or inf for all at once; several rates are measured one after the other.",
    )
    num_requests: int | None = option(
        None, LOAD, "Number of requests.", at_least=1, unset="400, or the number of lines of the dataset"
    )
    prompt_len: str | None = option(
        None, LOAD, "Prompt length in tokens, LOW:HIGH.", unset="100:1024; 1024 with --random-range-ratio"
    )
    output_len: str | None = option(
        None,
        LOAD,
        "Answer length in tokens, LOW:HIGH.",
        unset="32:256; 128 with --random-range-ratio; as in a ShareGPT file",
    )
    random_range_ratio: float | None = option(
        None, LOAD, "Make lengths vary by up to this share: 0.2 means 20% shorter to 20% longer."
    )
    dataset: Path | None = option(
        None,
        LOAD,
        "JSON Lines file; each line has prompt or messages, and optionally max_tokens. Or a ShareGPT file, of whose "
        "conversations the first turns are sent.",
    )
    seed: int = option(0, LOAD, "Seed for lengths, prompts and arrival times.")
    concurrency: int | None = option(
        None, LOAD, "Maximum number of requests in flight (closed loop).", at_least=1
    )
    burstiness: float = option(
        1.0, LOAD, "How evenly requests arrive: 1 is a Poisson process, less comes in bursts."
    )
    ramp: float = option(0.0, LOAD, "Seconds over which the rate grows from zero.", at_least=0)
    warmup: int = option(8, LOAD, "Number of warm-up requests, which are not measured.", at_least=0)
    temperature: float = option(0.0, LOAD, "Sampling temperature; 0 is greedy.")
    ignore_eos: bool = option(
        True, LOAD, "Generate the full answer length instead of stopping at the end token."
    )
    parameters: str | None = option(
        None, LOAD, "Additional parameters of every request, as JSON: '{\"top_p\": 0.9}'."
    )
    processes: int = option(
        1, LOAD, "Number of load generator processes; each uses up to one core.", at_least=1, at_most=256
    )

    json: str | None = option(None, OUTPUT, "Write the figures to this file; - prints them.")
    plot: Path | None = option(None, OUTPUT, "Plot latency over rate to this .svg file.")
    goodput: tuple[str, ...] = option(
        (), OUTPUT, "Also count the requests that meet all these objectives: ttft:MS, tpot:MS, e2el:MS."
    )
    save_result: bool = option(False, OUTPUT, "Write the figures of each rate to a file, with vLLM's names.")
    result_dir: Path | None = option(None, OUTPUT, "Folder for --save-result.")
    result_filename: str | None = option(None, OUTPUT, "Name of the file; implies --save-result.")
    quiet: bool = option(False, OUTPUT, "Do not print the table.", short="-q")

    def __post_init__(self) -> None:
        check(self)


@app.command(cls=BenchCommand)
@with_flags(options_of(LoadOptions).values())
def serve(**flags: Any) -> None:
    """Send requests to a server at random times and measure its latency and throughput.

    The load is an open loop: like users, requests arrive at their rate whether or not earlier ones have been answered.
    Works with any server that has OpenAI's streaming API.
    """
    options = LoadOptions(**{"api_key": os.environ.get(KEY_VARIABLE), **flags})
    _check_files(options)
    with needs_extra("server"):
        from inflight.bench.report import parse_goodput
        from inflight.bench.server import ServerAddress
        from inflight.bench.workload import parse_rate

    rates = [parse_rate(text) for item in options.rate for text in item.split(",")]
    results = ResultFiles.from_options(options, len(rates))
    objectives = parse_goodput(options.goodput)
    workload = _workload(options)
    server = ServerAddress.parse(_url(options.url, options.host, options.port), options.api_key)
    server.wait_until_loaded()
    workload = _completed(workload, options, server)
    runs = _measure(server, workload, rates, objectives, options)
    if results is not None:
        results.write(runs, workload, options.concurrency)
    _report(runs, workload, server.url, options)


def _workload(options: LoadOptions) -> ServingWorkload:
    """Return the workload as far as it is known without the server."""
    from inflight.bench.compare.arrivals import arrival_times
    from inflight.bench.workload import Range, ServingWorkload, is_sharegpt, read_dataset

    arrival_times(0, 1.0, options.seed, options.ramp, options.burstiness)  # checks them
    ratio, path = options.random_range_ratio, options.dataset
    defaults = ("100:1024", "32:256") if ratio is None else ("1024", "128")
    prompts = Range.parse("prompt_len", options.prompt_len or defaults[0])
    outputs = Range.parse("output_len", options.output_len or defaults[1])
    if ratio is not None:
        prompts, outputs = prompts.widened("prompt_len", ratio), outputs.widened("output_len", ratio)
    lines = () if path is None or is_sharegpt(path) else read_dataset(path, options.endpoint)
    return ServingWorkload(
        model=options.model or "",
        endpoint=options.endpoint,
        num_requests=options.num_requests or len(lines) or DEFAULT_REQUESTS,
        prompt_len=prompts,
        output_len=outputs,
        seed=options.seed,
        ramp=options.ramp,
        burstiness=options.burstiness,
        ignore_eos=options.ignore_eos,
        parameters={"temperature": options.temperature, **_parse_parameters(options.parameters)},
        dataset=lines,
    )


def _completed(workload: ServingWorkload, options: LoadOptions, server: ServerAddress) -> ServingWorkload:
    """Ask the server for what the workload lacks: its model, its vocabulary, or the lengths of a ShareGPT file."""
    from inflight.bench.workload import read_sharegpt

    workload = replace(workload, model=workload.model or server.model())
    if options.dataset is not None and not workload.dataset:
        lines = read_sharegpt(
            options.dataset,
            workload.endpoint,
            workload.num_requests,
            workload.seed,
            server.token_counter(workload.model),
            keep_lengths=options.output_len is None,
        )
        return replace(workload, num_requests=options.num_requests or len(lines), dataset=lines)
    if workload.endpoint == "completions" and not workload.dataset:
        return replace(workload, vocab_size=server.vocab_size(workload.model, MAX_ID))
    return workload


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
    objectives: dict[str, float],
    options: LoadOptions,
) -> list[Run]:
    from inflight.bench.load_generator import LoadPlan, measure, measure_with_workers
    from inflight.bench.report import summarise
    from inflight.bench.terminal import rate_name
    from inflight.bench.workload import PlannedRequest

    target = server.target(workload.endpoint)
    make_plan = partial(LoadPlan, target, concurrency=options.concurrency, timeout=options.timeout)
    if options.warmup:
        bodies = workload.bodies(options.warmup, "warmup")
        jobs = [PlannedRequest(index, 0.0, body) for index, body in enumerate(bodies)]
        _check_any_completed(summarise(0.0, measure(make_plan(jobs))))
    runs = []
    for index, rate in enumerate(rates):
        plan = make_plan(workload.jobs(rate, str(index)))
        shows = options.processes == 1 and sys.stderr.isatty() and not options.quiet
        with _progress(rate_name(rate), len(plan.jobs), shows) as advance:
            result = measure_with_workers(options.processes, plan, advance)
        runs.append(summarise(rate, result, objectives))
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
    def from_options(cls, options: LoadOptions, num_rates: int) -> ResultFiles | None:
        """Return None if nothing is to be saved. Raises ConfigError if the files could not be written."""
        folder, filename = options.result_dir, options.result_filename
        if not options.save_result and filename is None:
            return None
        if filename is not None and num_rates > 1:
            raise ConfigError(
                f"result_filename is {filename!r}: with {num_rates} rates each has a separate file"
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


def _check_files(options: LoadOptions) -> None:
    """Check the output files before anything is measured."""
    for path in (None if options.json in (None, "-") else Path(str(options.json)), options.plot):
        if path is not None:
            check_writable(path)
    if options.plot is not None and options.plot.suffix != ".svg":
        raise ConfigError(f"plot is {str(options.plot)!r}: its name must end in .svg")


@contextmanager
def _progress(name: str, total: int, show: bool) -> Iterator[Advance | None]:
    if not show:
        yield None
        return
    with progress_bar() as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def _report(runs: list[Run], workload: ServingWorkload, url: str, options: LoadOptions) -> None:
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
    if options.json == "-":
        print(json.dumps(data))
    elif options.json is not None:
        Path(options.json).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        from inflight.bench.plot import write_plot

        write_plot(runs, title, options.plot)
    if not options.quiet and options.json != "-":
        print_runs(runs, title, Console())
