"""How fast the engine is without a server: requests submitted at once, EOS ignored, prefix cache off.

    python -m benchmarks.offline --shape qwen3-0.6b --dummy --dtype float32 --workload ragged decode
    python -m benchmarks.offline --shape qwen3-0.6b --dummy --compare transformers --json

ragged: prompts and outputs of uniform random length; output tokens/s from the first submission to the last token.
decode: equal requests; the median time of a step in which all of them decode.

Timings on shared machines are noisy: `--repeat` runs take the median, and `--compare` puts the other engine into the
same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import torch

from benchmarks.report import show
from benchmarks.shapes import SHAPES
from benchmarks.workloads import Workload, ragged, steady
from inflight import LLM, SamplingParams
from inflight.events import StepRecord

DECODE_PROMPT, DECODE_OUTPUT = 64, 64


def run(llm: LLM, work: Workload, temperature: float) -> tuple[float, list[StepRecord]]:
    """Seconds for the whole workload, and what its steps did."""
    records: list[StepRecord] = []
    llm.observe(records.append)
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in work.output_lens
    ]
    start = time.perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == work.output_lens
    llm.unobserve(records.append)
    return seconds, records


def decode_ms(records: list[StepRecord], batch: int) -> float:
    """Median time between the ends of consecutive steps in which `batch` requests decode."""
    pure = [len(record.slots) == batch and all(slot.decodes for slot in record.slots) for record in records]
    gaps = [
        later.finished_at - earlier.finished_at
        for index, (earlier, later) in enumerate(pairwise(records))
        if pure[index] and pure[index + 1]
    ]
    return statistics.median(gaps) * 1e3


def measure_ragged(llm: LLM, work: Workload, options: argparse.Namespace) -> dict[str, Any]:
    runs = [run(llm, work, options.temperature) for _ in range(options.repeat)]
    speeds = [work.num_output / seconds for seconds, _ in runs]
    records = runs[-1][1]
    return {
        "workload": "ragged",
        "batch": len(work.prompts),
        "tokens_in": work.num_input,
        "tokens_out": work.num_output,
        "output_tokens_per_s": statistics.median(speeds),
        "runs": speeds,
        "steps": len(records),
        "preemptions": sum(len(record.preempted_ids) for record in records),
        "kv_waste": statistics.fmean(record.kv.waste for record in records),
    }


def measure_decode(llm: LLM, batch: int, options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    work = steady(batch, DECODE_PROMPT, DECODE_OUTPUT, vocab_size)
    times = [decode_ms(run(llm, work, options.temperature)[1], batch) for _ in range(options.repeat)]
    return {"workload": "decode", "batch": batch, "step_ms": statistics.median(times), "runs": times}


def measure_transformers(config: dict[str, Any], work: Workload) -> dict[str, Any]:
    """The same ragged workload through transformers' own continuous batching."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    settings = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    shape = AutoConfig.for_model(config["model_type"], **settings)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    longest = max(work.output_lens)
    generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    manager = model.init_continuous_batching(generation_config=generation)
    manager.start()
    for prompt, length in zip(work.prompts, work.output_lens, strict=True):
        manager.add_request(prompt, max_new_tokens=length)
    num_done = num_tokens = 0
    while num_done < len(work.prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            num_done += 1
            num_tokens += len(result.generated_tokens)
    seconds = time.perf_counter() - start
    manager.stop(block=True)
    return {
        "workload": "ragged",
        "engine": "transformers continuous batching",
        "batch": len(work.prompts),
        "tokens_out": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a checkpoint instead of a shape with random weights")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dummy", action="store_true", help="random weights: what --shape implies")
    parser.add_argument(
        "--dtype", default="float32", help="how weights are held; the CPU computes in float32"
    )
    parser.add_argument("--workload", nargs="+", choices=("ragged", "decode"), default=["decode", "ragged"])
    parser.add_argument("--requests", type=int, default=16, help="ragged: how many")
    parser.add_argument("--low", type=int, default=32, help="ragged: shortest prompt and output")
    parser.add_argument("--high", type=int, default=128, help="ragged: longest prompt and output")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16], help="decode: batch sizes")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--policy", default="continuous")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--compare", choices=("transformers",), help="run this engine on the ragged workload too"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    config = SHAPES[options.shape]
    source: dict[str, Any] = {"model": options.model, "skip_tokenizer_init": True}
    if options.model is None:
        source = {"model": options.shape, "hf_config": config, "load_format": "dummy"}
    llm = LLM(
        **source,
        dtype=options.dtype,
        max_model_len=max(2 * options.high, DECODE_PROMPT + DECODE_OUTPUT) + 1,
        max_num_seqs=max(options.requests, *options.batch),
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=False,
        policy=options.policy,
        show_progress=False,
    )
    results = []
    if "decode" in options.workload:
        results += [measure_decode(llm, batch, options, llm.vocab_size) for batch in options.batch]
    work = ragged(options.requests, options.low, options.high, llm.vocab_size)
    if "ragged" in options.workload:
        results.append(measure_ragged(llm, work, options))
    for result in results:
        result["engine"] = "inflight"
    if options.compare:
        results.append(measure_transformers(config, work))
        if "ragged" in options.workload:
            ratio = results[-2]["output_tokens_per_s"] / results[-1]["output_tokens_per_s"]
            results[-2]["ratio_to_transformers"] = ratio
    rows = [
        (
            result["engine"],
            result["workload"],
            result["batch"],
            result.get("step_ms", "-"),
            result.get("output_tokens_per_s", "-"),
            result.get("kv_waste", "-"),
        )
        for result in results
    ]
    title = f"{options.model or options.shape}, weights as {options.dtype}, {torch.get_num_threads()} threads"
    columns = ("engine", "workload", "requests", "decode step ms", "output tok/s", "KV waste")
    data = {"benchmark": "offline", "shape": options.shape, "dtype": options.dtype, "results": results}
    show(title, columns, rows, options.json, data)


if __name__ == "__main__":
    main()
