"""How fast the server is: starts `inflight serve`, sends it Poisson traffic, and prints latencies for every rate.

    python -m benchmarks.serving --shape qwen3-0.6b --rate 32 64 inf
    python -m benchmarks.serving --shape llama-3.1-8b --rate 16 32 inf --json
    python -m benchmarks.serving --compare-offline --num-requests 64 --prompt-len 32:128 --output-len 32:128
    python -m benchmarks.serving --shape qwen3-0.6b --compare-offline --num-requests 16 --prompt-len 32:128 \
        --output-len 32:128 -- --dtype float32 --max-num-seqs 16

Without --shape or --model it is the built-in model. What stands after -- goes to the server, and the engine's share of
it to the offline engine too.

`--compare-offline` sends all requests at once over HTTP and, in turn with that, through `LLM`, with the same options in
the same run. It prints the ratio of the medians, and of every round: where those lie far apart, the machine was busy
and the ratio says little. The two engines are in memory together: on a GPU give each its share with
`-- --gpu-memory-utilization 0.4`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.dummy import write_checkpoint
from benchmarks.report import show
from benchmarks.shapes import SHAPES
from inflight.bench.load_generator import LoadPlan, measure_with_workers
from inflight.bench.plot import write_plot
from inflight.bench.report import Run, summarise
from inflight.bench.server import ServerAddress
from inflight.bench.terminal import print_runs
from inflight.bench.workload import Range, ServingWorkload, parse_rate
from inflight.cli.option_sources import with_flags
from inflight.config import ENGINE_OPTIONS
from inflight.server.config import SERVE_OPTIONS

MAX_ID = 10_000
STOP_SECONDS = 30


@contextlib.contextmanager
def running(model: str | None, flags: list[str]) -> Iterator[tuple[ServerAddress, float]]:
    """A server on a free port, and the seconds until it was ready."""
    arguments = [
        sys.executable,
        "-m",
        "inflight.cli.main",
        "serve",
        *([model] if model else []),
        "--port",
        "0",
        *flags,
    ]
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(arguments, stderr=log) as server:
        try:
            yield _when_ready(server, log), time.perf_counter() - start
        finally:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()


def _when_ready(server: subprocess.Popen[bytes], log: Any) -> ServerAddress:
    while server.poll() is None:
        log.seek(0)
        if found := re.search(r"(https?://\S+)/metrics", log.read()):
            return ServerAddress.parse(found[1], None)
        time.sleep(0.05)
    log.seek(0)
    raise SystemExit(f"the server did not start:\n{log.read()}")


def measure(
    address: ServerAddress, workload: ServingWorkload, rate: float, label: str, processes: int
) -> Run:
    plan = LoadPlan(address.target(workload.endpoint), workload.jobs(rate, label))
    run = summarise(rate, measure_with_workers(processes, plan))
    if run.num_failed:
        raise SystemExit(f"{run.num_failed} requests failed: {run.problems}")
    return run


class Offline:
    """The same engine without a server."""

    def __init__(self, model: str | None, options: dict[str, Any]) -> None:
        from inflight import LLM  # torch is needed only for this

        self._llm = LLM(model, show_progress=False, **options)

    def run(self, workload: ServingWorkload, label: str) -> float:
        """Output tokens/s of all requests at once, their texts included, as the server sends them."""
        from inflight import SamplingParams

        bodies = [json.loads(body) for body in workload.bodies(workload.num_requests, label)]
        params = [
            SamplingParams(max_tokens=body["max_tokens"], temperature=body["temperature"], ignore_eos=True)
            for body in bodies
        ]
        start = time.perf_counter()
        outputs = self._llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def compare(
    address: ServerAddress, workload: ServingWorkload, offline: Offline, repeat: int, processes: int
) -> dict[str, Any]:
    """In turn, so that what else the machine does meets both."""
    online_speeds, offline_speeds = [], []
    offline.run(workload, "warmup")
    for index in range(repeat):
        online_speeds.append(
            measure(address, workload, math.inf, f"compare{index}", processes).output_tokens_per_s
        )
        offline_speeds.append(offline.run(workload, f"compare{index}"))
    return {
        "server_tokens_per_s": statistics.median(online_speeds),
        "offline_tokens_per_s": statistics.median(offline_speeds),
        "ratio": statistics.median(online_speeds) / statistics.median(offline_speeds),
        # Of neighbours in time: how far they lie apart says how much the ratio is worth.
        "pair_ratios": [online / alone for online, alone in zip(online_speeds, offline_speeds, strict=True)],
        "server_runs": online_speeds,
        "offline_runs": offline_speeds,
    }


def engine_options(flags: list[str]) -> dict[str, Any]:
    """What the server's flags say to its engine."""
    import typer

    seen: dict[str, Any] = {}
    app = typer.Typer(add_completion=False)

    @app.command()
    @with_flags(SERVE_OPTIONS.values())
    def note(config: str | None = None, **values: Any) -> None:  # noqa: ARG001
        seen.update(values)

    app(flags, standalone_mode=False)
    return {name: seen[name] for name in ENGINE_OPTIONS if name in seen and name != "max_queue"}


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint; without it and --shape: the built-in model")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--rate", nargs="+", default=["inf"], help="requests a second, or inf")
    parser.add_argument("--num-requests", type=int, default=400)
    parser.add_argument("--prompt-len", default="100:1024")
    parser.add_argument("--output-len", default="32:256")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=16, help="requests before, not counted")
    parser.add_argument("--processes", type=int, default=1, help="of the client")
    parser.add_argument("--compare-offline", action="store_true")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of --compare-offline")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:cut]), arguments[cut + 1 :]


def main() -> None:
    options, flags = parse()
    flags = ["--no-enable-prefix-caching", "--log-level", "warning", *flags]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.shape is not None:
            model = str(write_checkpoint(Path(folder) / options.shape, SHAPES[options.shape]))
            flags += ["--load-format", "dummy"]
        offline = Offline(model, engine_options(flags)) if options.compare_offline else None
        with running(model, flags) as (address, seconds):
            run_all(options, address, seconds, offline)


def run_all(
    options: argparse.Namespace, address: ServerAddress, seconds: float, offline: Offline | None
) -> None:
    name = address.model()
    workload = ServingWorkload(
        model=name,
        num_requests=options.num_requests,
        prompt_len=Range.parse("prompt_len", options.prompt_len),
        output_len=Range.parse("output_len", options.output_len),
        vocab_size=address.vocab_size(name, MAX_ID),
        seed=options.seed,
        parameters={"temperature": options.temperature},
    )
    if options.warmup:
        few = ServingWorkload(**{**vars(workload), "num_requests": options.warmup})
        measure(address, few, math.inf, "warmup", 1)
    data: dict[str, Any] = {"benchmark": "serving", "model": name, "ready_s": seconds, "runs": []}
    if offline is not None:
        data["offline"] = compare(address, workload, offline, options.repeat, options.processes)
    else:
        rates = [parse_rate(text) for text in options.rate]
        runs = [measure(address, workload, rate, str(i), options.processes) for i, rate in enumerate(rates)]
        data["runs"] = [run.to_json() for run in runs]
        title = f"{name}: {workload.num_requests} requests, ready after {seconds:.1f} s"
        if options.plot is not None:
            write_plot(runs, title, options.plot)
        if not options.json:
            print_runs(runs, title, Console())
            return
    found = data.get("offline", {})
    columns = ("server tok/s", "offline tok/s", "ratio", "ratios of the rounds")
    row = [found.get(key, "-") for key in ("server_tokens_per_s", "offline_tokens_per_s", "ratio")]
    rounds = " ".join(f"{ratio:.2f}" for ratio in found.get("pair_ratios", ()))
    show(f"{name}, {options.num_requests} streams", columns, [[*row, rounds]], options.json, data)


if __name__ == "__main__":
    main()
