"""How fast the engine is without a server: requests submitted at once, EOS ignored.

    python -m benchmarks.offline --shape qwen3-0.6b --dtype float32 --workload ragged decode
    python -m benchmarks.offline --shape llama-3.1-8b --workload ragged decode long prefill agent --batch 1 32 128 256
    python -m benchmarks.offline --shape qwen3-0.6b --compare transformers --json

ragged:  prompts and outputs of uniform random length; output tokens/s from the first submission to the last token.
decode:  equal requests; the median time of a step in which all of them decode. On a GPU at a context of about 300.
long:    the same at a context of about 8,300.
prefill: long prompts with one output token each; prompt tokens/s.
agent:   requests that share a long prompt and each add a few tokens; output tokens/s once the shared part is
         cached, and the time to the first token of one such request alone.

The prefix cache is on for agent and off for the others; --prefix-caching and --no-prefix-caching set it for all. Where
nothing is shared it is emptied before every run: what is measured is the cost of filling it.

Sizes are those of a GPU or of a CPU, whichever the engine runs on. Every workload runs once before it is measured.
Timings on shared machines are noisy: `--repeat` runs take the median, and `--compare` puts the other engine into the
same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from benchmarks.report import show
from benchmarks.shapes import SHAPES
from benchmarks.workloads import Workload, agents, ragged, steady
from inflight import LLM, SamplingParams
from inflight.timeline.steps import RecordedStep


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the workloads are."""

    requests: int
    low: int
    high: int
    decode_prompt: int
    decode_output: int
    long_prompt: int
    prefill: tuple[int, int]  # requests, tokens
    agents: tuple[int, int, int, int]  # requests, shared tokens, own tokens, outputs
    batches: tuple[int, ...]
    long_batches: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(
            2 * self.high,
            max(self.decode_prompt, self.long_prompt) + self.decode_output,
            self.prefill[1] + 1,
            sum(self.agents[1:]),
        )


GPU = Sizes(256, 100, 1024, 268, 64, 8268, (16, 8192), (64, 10_000, 64, 200), (1, 8, 32, 128, 256), (1, 32))
CPU = Sizes(16, 32, 128, 64, 64, 512, (2, 512), (8, 512, 16, 32), (1, 8, 16), (1, 4))


def recorded(llm: LLM, work: Workload, temperature: float, hits: bool = False) -> list[RecordedStep]:
    """Return what the steps of the workload did."""
    with llm.recorded() as steps:
        run(llm, work, temperature, hits)
    return steps


def run(llm: LLM, work: Workload, temperature: float, hits: bool = False) -> float:
    """Seconds for the whole workload; with `hits`, after what is cached already."""
    if not hits:
        llm.reset_prefix_cache()
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in work.output_lens
    ]
    start = time.perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == work.output_lens
    return seconds


def decode_ms(steps: list[RecordedStep], batch: int) -> float:
    """Median time between the ends of consecutive steps in which `batch` requests decode."""
    pure = [step.all_decode(batch) for step in steps]
    gaps = [
        later.times.finished_at - earlier.times.finished_at
        for index, (earlier, later) in enumerate(pairwise(steps))
        if pure[index] and pure[index + 1]
    ]
    if not gaps:
        raise ValueError(f"there was no step in which all {batch} requests decoded, and only they")
    return statistics.median(gaps) * 1e3


def measure_ragged(llm: LLM, sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    work = ragged(sizes.requests, sizes.low, sizes.high, llm.vocab_size)
    steps = recorded(llm, work, options.temperature)  # and a warm-up
    speeds = [work.num_output / run(llm, work, options.temperature) for _ in range(options.repeat)]
    return {
        "workload": "ragged",
        "batch": len(work.prompts),
        "temperature": options.temperature,
        "tokens_in": work.num_input,
        "tokens_out": work.num_output,
        "output_tokens_per_s": statistics.median(speeds),
        "runs": speeds,
        "steps": len(steps),
        "preemptions": sum(event.type == "preempt" for step in steps for event in step.events),
        "kv_waste": statistics.fmean(step.kv_waste for step in steps),
    }


def measure_decode(
    llm: LLM, name: str, batch: int, prompt: int, sizes: Sizes, options: argparse.Namespace
) -> dict[str, Any]:
    work = steady(batch, prompt, sizes.decode_output, llm.vocab_size)
    if options.warm_up:
        run(llm, work, options.temperature)
    times = [decode_ms(recorded(llm, work, options.temperature), batch) for _ in range(options.repeat)]
    return {"workload": name, "batch": batch, "step_ms": statistics.median(times), "runs": times}


def measure_prefill(llm: LLM, sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    batch, length = sizes.prefill
    work = steady(batch, length, 1, llm.vocab_size)
    if options.warm_up:
        run(llm, work, 0.0)
    speeds = [work.num_input / run(llm, work, 0.0) for _ in range(options.repeat)]
    return {
        "workload": "prefill",
        "batch": batch,
        "prompt_tokens_per_s": statistics.median(speeds),
        "runs": speeds,
    }


def measure_agents(llm: LLM, sizes: Sizes, options: argparse.Namespace) -> dict[str, Any]:
    """Every run has new tokens, so that only the shared part is ever a hit."""
    count, shared, own, output_len = sizes.agents

    def work(requests: int, seed: int) -> Workload:
        return agents(requests, shared, own, output_len, llm.vocab_size, seed)

    if options.warm_up:
        run(llm, work(1, 1), 0.0, hits=True)
        run(llm, work(count, 2), 0.0, hits=True)
    speeds, firsts = [], []
    for seed in range(3, 3 + options.repeat):
        wave = work(count, seed)
        speeds.append(wave.num_output / run(llm, wave, 0.0, hits=True))
        alone = work(1, 100 + seed)
        start = time.monotonic()  # the engine's clock
        sampled = next(step for step in recorded(llm, alone, 0.0, hits=True) if step.num_outputs)
        firsts.append((sampled.times.finished_at - start) * 1e3)
    return {
        "workload": "agent",
        "batch": count,
        "prefix_caching": options.prefix_caching is not False,
        "output_tokens_per_s": statistics.median(speeds),
        "first_token_ms": statistics.median(firsts),
        "runs": speeds,
        "first_token_runs": firsts,
    }


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
    add = parser.add_argument
    names = ("ragged", "decode", "long", "prefill", "agent")
    add("--model", help="a checkpoint instead of a shape with random weights")
    add("--shape", choices=SHAPES, default="qwen3-0.6b")
    add(
        "--dtype",
        help="how weights are held (default: bfloat16 on a GPU, float32 on a CPU, which computes in it)",
    )
    add("--quantization", choices=("fp8", "int8", "int4"))
    add("--kv-cache-dtype", default="auto")
    add("--device", default="auto")
    add("--workload", nargs="+", choices=names, default=["decode", "ragged"])
    add("--requests", type=int, help="ragged: how many")
    add("--low", type=int, help="ragged: shortest prompt and output")
    add("--high", type=int, help="ragged: longest prompt and output")
    add("--batch", type=int, nargs="+", help="decode: batch sizes")
    add("--long-batch", type=int, nargs="+", help="long: batch sizes")
    add("--temperature", type=float, default=0.0)
    add("--max-num-batched-tokens", type=int)
    add("--max-num-seqs", type=int)
    add("--policy", default="continuous")
    add("--pipeline-depth", type=int)
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--prefix-caching", action=argparse.BooleanOptionalAction, help="default: for agent only")
    add("--no-warm-up", dest="warm_up", action="store_false")
    add("--repeat", type=int, default=3)
    add("--compare", choices=("transformers",), help="run this engine on the ragged workload too")
    add("--json", action="store_true")
    return parser.parse_args()


def measure(
    options: argparse.Namespace, sizes: Sizes, load: Callable[..., LLM]
) -> tuple[list[dict[str, Any]], int]:
    """Results, and the number of failed rows: a failure is reported, and the results of other rows are kept."""
    results: list[dict[str, Any]] = []
    num_failed = 0
    chosen = options.workload

    def take(measured: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        nonlocal num_failed
        try:
            results.append({"engine": "inflight", **measured(*arguments, sizes, options)})
        except Exception:
            traceback.print_exc()
            num_failed += 1

    if any(name != "agent" for name in chosen):
        with load(enable_prefix_caching=options.prefix_caching is True) as llm:
            if "decode" in chosen:
                for batch in options.batch or sizes.batches:
                    take(measure_decode, llm, "decode", batch, sizes.decode_prompt)
            if "long" in chosen:
                for batch in options.long_batch or sizes.long_batches:
                    take(measure_decode, llm, "long", batch, sizes.long_prompt)
            if "prefill" in chosen:
                take(measure_prefill, llm)
            if "ragged" in chosen:
                take(measure_ragged, llm)
        del llm  # two models need not fit
    if "agent" in chosen:
        with load(enable_prefix_caching=options.prefix_caching is not False) as llm:
            take(measure_agents, llm)
    return results, num_failed


def main() -> None:
    options = parse()
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    base = GPU if on_gpu else CPU
    sizes = Sizes(
        options.requests or base.requests,
        options.low or base.low,
        options.high or base.high,
        *(getattr(base, name) for name in Sizes.__slots__[3:]),
    )
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    config = SHAPES[options.shape]
    source: dict[str, Any] = {"model": options.model, "skip_tokenizer_init": True}
    if options.model is None:
        source = {"model": options.shape, "hf_config": config, "load_format": "dummy"}
    batches = (
        *(options.batch or sizes.batches),
        *(options.long_batch or ()),
        sizes.requests if "ragged" in options.workload else 1,
    )

    def load(**more: Any) -> LLM:
        return LLM(
            **source,
            dtype=dtype,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            device=options.device,
            max_model_len=sizes.longest + 1,
            max_num_seqs=options.max_num_seqs or max(batches),
            max_num_batched_tokens=options.max_num_batched_tokens,
            policy=options.policy,
            pipeline_depth=options.pipeline_depth,
            enforce_eager=options.enforce_eager,
            show_progress=False,
            **more,
        )

    results, num_failed = measure(options, sizes, load)
    if options.compare:
        work = ragged(sizes.requests, sizes.low, sizes.high, config["vocab_size"])
        theirs = measure_transformers(config, work)
        for result in results:
            if result["workload"] == "ragged":
                result["ratio_to_transformers"] = (
                    result["output_tokens_per_s"] / theirs["output_tokens_per_s"]
                )
        results.append(theirs)
    rows = [
        (
            result["engine"],
            result["workload"],
            result["batch"],
            result.get("step_ms", "-"),
            result.get("output_tokens_per_s", result.get("prompt_tokens_per_s", "-")),
            result.get("first_token_ms", "-"),
            result.get("kv_waste", "-"),
        )
        for result in results
    ]
    where = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    title = f"{options.model or options.shape}, weights as {dtype}, {where}"
    columns = ("engine", "workload", "requests", "decode step ms", "tok/s", "first token ms", "KV waste")
    data = {"benchmark": "offline", "shape": options.shape, "dtype": dtype, "results": results}
    show(title, columns, rows, options.json, data)
    if num_failed:
        raise SystemExit(f"{num_failed} rows could not be measured")


if __name__ == "__main__":
    main()
