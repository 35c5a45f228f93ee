"""What a decoder that reranks takes for one query: the part that all documents share is computed once.

    python -m benchmarks.reranking --shape qwen3-0.6b [--documents 100] [--json]

Random weights. Every document is one request of kind "pool": the shared tokens (instruction and query), then its own.
All arrive at once. Told are the times until the first and the last score, and how many tokens were computed, with the
prefix cache and without it, in turns in one run; each round as soon as it is over, on standard error. After `--seconds`
no further round is begun.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass

import torch

from benchmarks.report import Progress, show
from benchmarks.shapes import SHAPES
from inflight.config import EngineConfig
from inflight.loading.engine import LoadedEngine
from inflight.loading.load import load_engine
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.timeline.chunks import TimelineQuery
from inflight.timeline.steps import read_chunks, recorded_steps


@dataclass(frozen=True, slots=True)
class Round:
    first_ms: float
    last_ms: float
    num_computed: int


def load(options: argparse.Namespace, dtype: str, cached: bool) -> LoadedEngine:
    config = {**SHAPES[options.shape], "classifier_from_token": [1, 2]}
    return load_engine(
        EngineConfig.create(
            "random weights",
            hf_config=config,
            load_format="dummy",
            dtype=dtype,
            device=options.device,
            skip_tokenizer_init=True,
            enable_prefix_caching=cached,
            max_model_len=4096,
            kv_cache_memory=16 << 30 if dtype == "bfloat16" else None,  # two engines share a GPU
            # No more slots than documents: fewer shapes to capture at start.
            max_num_seqs=min(256, options.documents),
        )
    )


def run(engine: LoadedEngine, prompts: list[list[int]], name: str) -> Round:
    core = engine.core
    core.record()
    start = core.clock()
    for index, prompt in enumerate(prompts):
        core.add(Request.create(f"{name}/{index}", prompt, SamplingParams(), max_tokens=0, task="pool"))
    ends = []
    while core.has_work:
        for delta in core.step():
            assert delta.vector is not None, delta
            ends.append(core.clock() - start)
    core.scheduler.blocks.drop_cache()
    steps = recorded_steps(read_chunks(core.read_timeline, TimelineQuery(0.0)))
    computed = sum(step.num_tokens for step in steps)
    core.stop_recording()
    return Round(1e3 * min(ends), 1e3 * max(ends), computed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200, help="of each document")
    parser.add_argument("--shared", type=int, default=400, help="tokens before each document")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=45.0, help="after which no round is begun")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    dtype = "bfloat16" if on_gpu else "float32"
    progress = Progress(options.seconds)
    engines: dict[str, LoadedEngine] = {}
    for name, cached in (("prefix cache", True), ("no cache", False)):
        engines[name] = load(options, dtype, cached)
        progress.tell(f"{name}: the engine is ready")
    rounds: dict[str, list[Round]] = {name: [] for name in engines}
    rng, largest = random.Random(0), min(10_000, SHAPES[options.shape]["vocab_size"])
    for number in range(options.repeat + 1):  # the first warms up
        if number > 1 and progress.is_late:
            break
        shared = [rng.randrange(largest) for _ in range(options.shared)]
        own = [[rng.randrange(largest) for _ in range(options.tokens)] for _ in range(options.documents)]
        for name, engine in engines.items():
            found = run(engine, [shared + ids for ids in own], f"{name}/{number}")
            progress.tell(
                f"{name}: first {found.first_ms:.1f} ms, last {found.last_ms:.1f}, {found.num_computed:,} tokens"
            )
            if number:
                rounds[name].append(found)
    rows = [
        (
            name,
            statistics.median(found.first_ms for found in all_found),
            statistics.median(found.last_ms for found in all_found),
            all_found[0].num_computed,
        )
        for name, all_found in rounds.items()
    ]
    ratio = statistics.median(
        without.last_ms / cached.last_ms
        for cached, without in zip(rounds["prefix cache"], rounds["no cache"], strict=True)
    )
    title = (
        f"{options.shape}, {options.documents} documents of {options.tokens} tokens after {options.shared} shared, "
        f"{dtype}: {ratio:.2f} times as fast with the cache"
    )
    told = {
        "benchmark": "reranking",
        "shape": options.shape,
        "ratio": ratio,
        "rows": {row[0]: row[1:] for row in rows},
    }
    show(title, ("", "first ms", "last ms", "tokens computed"), rows, options.json, told)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
