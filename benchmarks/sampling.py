"""What sampling parameters cost a decode step: `python -m benchmarks.sampling [--device cpu] [--json]`.

One engine, one batch of equal requests that decode; who of them wants what differs between the rows. The step of all
greedy requests is what the others are compared with, in the same run. On a GPU 128 requests at a context of about 200,
on a CPU 16.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.dummy import write_checkpoint
from benchmarks.offline import decode_ms
from benchmarks.report import show
from benchmarks.shapes import SHAPES
from benchmarks.workloads import steady
from inflight import LLM, SamplingParams

Parameters = dict[str, Any]
GREEDY: Parameters = {"temperature": 0.0}
TOP_P: Parameters = {"temperature": 0.8, "top_p": 0.95}


def cases(vocab_size: int) -> dict[str, tuple[Parameters, Parameters]]:
    """By name: what the first request of the batch asks for, and what all others do."""
    half = list(range(0, vocab_size, 2))
    words = [f"e{a} {b}" for a in "tao" for b in "inshr"]
    all_at_once = {
        "all greedy": GREEDY,
        "all T=0.8": {"temperature": 0.8},
        "all top_p=0.95": TOP_P,
        "all top_k=50 top_p=0.95": TOP_P | {"top_k": 50},
        "all logprobs=5": GREEDY | {"logprobs": 5},
        "all repetition_penalty, top_p": TOP_P | {"repetition_penalty": 1.1},
        "a mask on every row": GREEDY | {"allowed_token_ids": half},
        "a mask on every row, top_p": TOP_P | {"allowed_token_ids": half},
        "all min_p": {"temperature": 0.8, "min_p": 0.05},
        "all bad_words": GREEDY | {"bad_words": words},
        "all min_tokens": GREEDY
        | {"min_tokens": 1, "stop_token_ids": list(range(8))},  # for all of its steps
    }
    found = {name: (asked, asked) for name, asked in all_at_once.items()}
    found["one logit_bias"] = GREEDY | {"logit_bias": {7: 1.0, 9: -1.0}}, GREEDY
    found["one presence_penalty"] = GREEDY | {"presence_penalty": 1.0}, GREEDY
    found["one logprobs=5"] = GREEDY | {"logprobs": 5}, GREEDY
    found["one presence_penalty, the rest top_p"] = TOP_P | {"presence_penalty": 1.0}, TOP_P
    return found


def measure(llm: LLM, first: Parameters, rest: Parameters, batch: int, context: int, num_steps: int) -> float:
    work = steady(batch, context - num_steps // 2, num_steps, llm.vocab_size)
    common: Parameters = {"max_tokens": num_steps, "ignore_eos": True, "detokenize": False}
    for asked in (first, rest):
        if "min_tokens" in asked:
            asked["min_tokens"] = num_steps
    params = [SamplingParams(**common, **(rest if index else first)) for index in range(batch)]
    with llm.recorded() as steps:
        llm.generate(work.prompts, params, use_tqdm=False)
    return decode_ms(steps, batch)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, help="default: 128 on a GPU, 16 on a CPU")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="rows whose names hold one of these")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    batch = options.batch or (128 if on_gpu else 16)
    context = 200 if on_gpu else 64 + options.steps // 2
    config = SHAPES[options.shape]

    def chosen(name: str) -> bool:
        return not options.only or name == "all greedy" or any(word in name for word in options.only)

    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            write_checkpoint(Path(folder) / "model", config),
            load_format="dummy",
            dtype="bfloat16" if on_gpu else "float32",
            device=options.device,
            enable_prefix_caching=False,
            max_num_seqs=batch,
            max_model_len=2 * context,
            show_progress=False,
        )
        results: dict[str, list[float]] = {}
        with llm:
            for name, (first, rest) in cases(llm.vocab_size).items():
                if chosen(name):
                    measure(llm, first, rest, batch, context, options.steps)  # a warm-up
                    results[name] = [
                        measure(llm, first, rest, batch, context, options.steps)
                        for _ in range(options.repeat)
                    ]
    medians = {name: statistics.median(runs) for name, runs in results.items()}
    greedy = medians["all greedy"]
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    rows = [(name, f"{ms:.3f}", f"{ms / greedy:.3f}") for name, ms in medians.items()]
    data = {
        "benchmark": "sampling",
        "shape": options.shape,
        "batch": batch,
        "step_ms": medians,
        "runs": results,
    }
    title = f"{options.shape}, {batch} requests, context about {context}, {where}"
    show(title, ("who wants what", "ms a step", "times greedy"), rows, options.json, data)


if __name__ == "__main__":
    main()
