"""What windows save: KV memory, requests that fit at once, and the time of a decode step, at long contexts.

    python -m benchmarks.windows --shape gemma-3-12b --context 32768 --batch 8 40 [--json]

Every figure is taken twice: with the model as it is, and with all its layers keeping (and seeing) all tokens. Prompts
are not computed: their blocks are allocated and their tables uploaded, so that decodes read contexts of full length,
which are all zeros.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.offline import decode_ms
from benchmarks.report import show
from benchmarks.shapes import SHAPES
from inflight import LLM, SamplingParams
from inflight.execution.gpu.runner import GpuRunner
from inflight.models.decoders.decoder import Decoder
from inflight.scheduling.batch import Batch, Sampled
from inflight.timeline.steps import RecordedStep

GIB = 1 << 30
NUM_STEPS = 24  # in which all requests decode


class PromptSkippingRunner:
    """Implements `Runner`: computes the decodes, and of other steps only uploads tokens and block tables."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        for lane in runner.cache.lanes:
            lane.zero_()

    def launch(self, batch: Batch) -> Any:
        if not batch.num_prompt_tokens:
            return self._runner.launch(batch)
        self._runner.change_rows(batch)
        self._runner.rows.write_tables()
        return Sampled([[0] if samples else [] for samples in batch.samples])

    def collect(self, handle: Any) -> Sampled:
        return handle if isinstance(handle, Sampled) else self._runner.collect(handle)

    def close(self) -> None:
        self._runner.close()


def all_in_full(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same model with layers that keep all tokens."""
    return config | {"layer_types": ["full_attention"] * config["num_hidden_layers"]}


def measure(config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one model."""
    length = options.context + num_outputs(options, max(options.most, *options.batch)) + 1
    sizes = {"max_num_seqs": options.most, "max_num_batched_tokens": options.chunk, "max_model_len": length}
    with LLM(
        options.shape,
        hf_config=config,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        show_progress=False,
        **sizes,
    ) as llm:
        engine = llm._engine
        decoder, core = engine.model, engine.core
        assert isinstance(decoder, Decoder)
        assert isinstance(core.runner, GpuRunner)
        core.runner = PromptSkippingRunner(core.runner)
        shape, blocks = (
            decoder.kv_shape(core.scheduler.blocks.block_size),
            core.scheduler.blocks.pool.num_blocks,
        )
        result: dict[str, Any] = {
            "windows": shape.windows,
            "kv_gib": blocks * shape.bytes_per_block / GIB,
            "decodes": [],
        }
        steps = run(llm, options, options.most)
        held = [step for step in steps if not any(event.type == "preempt" for event in step.events)]
        result["num_fit"] = max(step.num_running for step in held)
        for batch in options.batch:
            if batch > result["num_fit"]:
                continue
            steps = run(llm, options, batch)
            used = statistics.median(step.num_blocks_used for step in steps if step.all_decode(batch))
            result["decodes"].append(
                {
                    "batch": batch,
                    "kv_gib": used * shape.bytes_per_block / GIB,
                    "step_ms": decode_ms(steps, batch),
                }
            )
    return result


def num_outputs(options: argparse.Namespace, batch: int) -> int:
    """Return enough tokens for the first request to decode until the last prompt is done, and some more."""
    chunks: int = -(-options.context // options.chunk)
    return batch * chunks + NUM_STEPS


def run(llm: LLM, options: argparse.Namespace, batch: int) -> list[RecordedStep]:
    most = num_outputs(options, batch)
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
    with llm.recorded() as steps:
        llm.generate([[1 + index] * options.context for index in range(batch)], params, use_tqdm=False)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="gemma-3-12b", choices=sorted(SHAPES))
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 40])
    parser.add_argument("--chunk", type=int, default=8192, help="most tokens of a step")
    parser.add_argument("--most", type=int, default=64, help="requests to try at once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    config = SHAPES[options.shape]
    kinds = {"as it is": config, "all layers in full": all_in_full(config)}
    results = {name: measure(config, options) for name, config in kinds.items()}
    rows = [
        (name, result["num_fit"], decode["batch"], decode["kv_gib"], decode["step_ms"])
        for name, result in results.items()
        for decode in result["decodes"]
    ]
    columns = ("layers", "requests that fit", "requests", "KV GiB", "decode step ms")
    title = f"{options.shape} at a context of {options.context:,}"
    show(title, columns, rows, options.json, {"benchmark": "windows", **results})


if __name__ == "__main__":
    main()
