"""Decoding and prefill of the Qwen3-0.6B shape, and MiniLM, beside transformers by number of threads, on a CPU.

    python -m benchmarks.cpu_server
    python -m benchmarks.cpu_server --threads 2 --encoder-threads 2 --json

The weights are random bf16, written once and read by both engines. Each number of threads has its own process, in
which the two take turns: the decode step with 1 and 16 requests (the median of a run), and prefill of one prompt. The
better of `--repeat` turns counts. One thread is only measured in prefill. MiniLM runs in float32 by
`python -m benchmarks.encoders`. A ratio above 1 means that inflight is faster. Each figure is told on standard error as
soon as it is known. Processes share the time: one begins no further turn once its share is over. After `--seconds` the
process that runs is ended and no other is started; the result lists what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.offline import decode_ms, recorded, run
from benchmarks.report import Progress, show
from benchmarks.shapes import SHAPES
from benchmarks.workloads import Workload, steady
from inflight import LLM

PROMPT = 32  # tokens before a decode step
BATCHES = (1, 16)


def write_model(folder: Path, config: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    shape = AutoConfig.for_model(config["model_type"], **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    # Drawing a number for each weight takes most of a minute: a million of them are repeated.
    numbers = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 0.02
    for weight in model.parameters():
        count = weight.numel()
        filling = numbers.repeat(-(-count // len(numbers)))[:count] if weight.dim() > 1 else torch.ones(count)
        weight.data.copy_(filling.view_as(weight))
    model.save_pretrained(folder)


@torch.inference_mode()
def transformers_decode(model: Any, work: Workload) -> float:
    """Median ms of a greedy decode step."""
    out = model(input_ids=torch.tensor(work.prompts), logits_to_keep=1, use_cache=True)
    times = []
    for _ in range(work.output_lens[0] - 1):
        start = time.perf_counter()
        tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(input_ids=tokens, past_key_values=out.past_key_values, use_cache=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


@torch.inference_mode()
def transformers_prefill(model: Any, work: Workload) -> float:
    """Prompt tokens per second."""
    start = time.perf_counter()
    model(input_ids=torch.tensor(work.prompts), logits_to_keep=1, use_cache=True)
    return work.num_input / (time.perf_counter() - start)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Both engines in this process, with as many threads as its environment names."""
    from transformers import AutoModelForCausalLM

    progress, threads = Progress(options.share), int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    vocab_size = model.config.vocab_size
    batches = BATCHES if threads > 1 else ()
    decodes = {batch: steady(batch, PROMPT, options.steps + 1, vocab_size) for batch in batches}
    prefill = steady(1, options.prefill, 1, vocab_size)
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    with LLM(
        str(folder),
        dtype="bfloat16",
        device="cpu",
        max_model_len=max(options.prefill, PROMPT + options.steps) + 2,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=max(options.prefill, PROMPT * max(BATCHES)),
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        show_progress=False,
    ) as llm:
        warm_up = steady(1, PROMPT, 3, vocab_size)
        run(llm, warm_up, 0.0)
        transformers_decode(model, warm_up)

        def note(name: str, mine: float, other: float) -> None:
            ours.setdefault(name, []).append(mine)
            theirs.setdefault(name, []).append(other)
            progress.tell(f"{threads} threads, {name}: inflight {mine:,.4g}, transformers {other:,.4g}")

        for turn in range(options.repeat):
            if turn and progress.is_late:
                break
            rate = prefill.num_input / run(llm, prefill, 0.0)
            note("prefill_tok_s", rate, transformers_prefill(model, prefill))
            for batch, work in decodes.items():
                mine = decode_ms(recorded(llm, work, 0.0), batch)
                note(f"decode_{batch}_ms", mine, transformers_decode(model, work))
    result: dict[str, Any] = {}
    for name, values in ours.items():
        best = min if name.endswith("_ms") else max
        mine, other = best(values), best(theirs[name])
        ratio = other / mine if best is min else mine / other
        result[name] = {"inflight": mine, "transformers": other, "ratio": ratio}
    return result


def in_process(arguments: list[str], threads: int, seconds: float) -> dict[str, Any]:
    """Return the JSON object that a module of this package prints with this number of threads."""
    command = [sys.executable, "-m", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=max(seconds, 0.1)
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_all(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    progress = Progress(options.seconds)
    results: dict[str, Any] = {"model": {}, "minilm": {}, "missing": []}
    write_model(folder, SHAPES[options.shape])
    progress.tell("the model is written")
    child = ["benchmarks.cpu_server", "--child", str(folder), "--steps", str(options.steps)]
    child += ["--prefill", str(options.prefill), "--repeat", str(options.repeat)]
    encoder = ["benchmarks.encoders", "--json", "--shape", options.encoder, "--texts", str(options.texts)]
    encoder += ["--batch", "16", "32", "--repeat", str(options.repeat)]
    tasks = [("model", child, threads) for threads in options.threads]
    tasks += [("minilm", [*encoder, "--threads", str(n)], n) for n in options.encoder_threads]
    tasks.sort(key=lambda task: -task[2])
    for index, (kind, arguments, threads) in enumerate(tasks):
        if progress.is_late:
            results["missing"].append(f"{kind}, {threads} threads: no time was left")
            continue
        try:
            # Loading the model and the last turn come on top.
            share = f"{progress.seconds_left / (len(tasks) - index) / 2:.0f}"
            arguments = [*arguments, "--seconds" if kind == "minilm" else "--share", share]
            results[kind][threads] = in_process(arguments, threads, progress.seconds_left)
        except (subprocess.SubprocessError, json.JSONDecodeError) as error:
            results["missing"].append(f"{kind}, {threads} threads: {error}")
        progress.tell(f"{kind}, {threads} threads: done")
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b")
    add("--encoder", default="minilm-l6", help="a shape of benchmarks.encoders")
    add("--threads", type=int, nargs="*", default=[1, 4, 16])
    add("--encoder-threads", type=int, nargs="*", default=[2, 16])
    add("--steps", type=int, default=16, help="decode steps of a run")
    add("--prefill", type=int, default=512, help="tokens of the prompt")
    add("--texts", type=int, default=200, help="texts of the encoder")
    add("--repeat", type=int, default=2)
    add("--seconds", type=float, default=145.0, help="after which nothing runs")
    add("--json", action="store_true")
    add("--share", type=float, default=60.0, help=argparse.SUPPRESS)
    add("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.child:
        print(json.dumps(measure(options.child, options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = measure_all(options, Path(folder))
    rows: list[tuple[Any, ...]] = []
    for threads, result in sorted(results["model"].items()):
        for name, cell in result.items():
            rows.append((f"{name}, {threads} threads", cell["inflight"], cell["transformers"], cell["ratio"]))
    for threads, cell in sorted(results["minilm"].items()):
        rates = cell["inflight_texts_per_s"], cell["transformers_texts_per_s"]
        rows.append((f"{options.encoder} texts/s, {threads} threads", *rates, cell["ratio"]))
    rows += [(missing, "-", "-", "-") for missing in results["missing"]]
    title = f"{options.shape} in bf16"
    results["benchmark"] = "cpu_server"
    show(title, ("", "inflight", "transformers", "ratio"), rows, options.json, results)


if __name__ == "__main__":
    main()
