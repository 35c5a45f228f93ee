"""How fast a model with experts decodes on a CPU, beside transformers in the same run.

    python -m benchmarks.experts --shape qwen3-moe-small --batch 16

Equal requests, all of which decode in every step; both engines take turns, and each reports the median time of a step.
Weights are random, with embeddings so large that tokens are routed to different experts (see `load_format="dummy"`).
transformers computes in float32; inflight holds the weights as `--dtype` and computes in float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import show
from benchmarks.shapes import SHAPES
from inflight import LLM, SamplingParams

EMBEDDING_STD = 10.0


def transformers_step(
    config: dict[str, Any], prompts: list[list[int]], num_steps: int
) -> Callable[[], float]:
    """Return a function that measures the seconds of one step of `generate`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    shape = AutoConfig.for_model(config["model_type"], **settings)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)
    ids = torch.tensor(prompts)

    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - start

    return lambda: (seconds(num_steps + 1) - seconds(1)) / num_steps


def inflight_step(
    config: dict[str, Any], dtype: str, prompts: list[list[int]], num_steps: int
) -> tuple[LLM, Callable[[], float]]:
    """Return an engine, and a function that measures the seconds of one of its steps."""
    llm = LLM(
        "-",
        hf_config=config,
        load_format="dummy",
        dtype=dtype,
        device="cpu",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=len(prompts[0]) + num_steps + 2,
        show_progress=False,
    )

    def seconds(num_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    return llm, lambda: (seconds(num_steps + 1) - seconds(1)) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-moe-small")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = SHAPES[options.shape]
    generator = torch.Generator().manual_seed(0)
    size = options.batch, options.prompt
    prompts = torch.randint(config["vocab_size"], size, generator=generator).tolist()
    theirs = transformers_step(config, prompts, options.steps)
    llm, ours = inflight_step(config, options.dtype, prompts, options.steps)
    pairs = [(ours(), theirs()) for _ in range(options.repeat)]
    llm.close()
    result: dict[str, Any] = {
        "shape": options.shape,
        "dtype": options.dtype,
        "batch": options.batch,
        "inflight_step_ms": 1e3 * statistics.median(pair[0] for pair in pairs),
        "transformers_step_ms": 1e3 * statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(pair[1] / pair[0] for pair in pairs),
    }
    show("Decoding", list(result), [list(result.values())], options.json, result)


if __name__ == "__main__":
    main()
