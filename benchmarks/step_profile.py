"""Where the time of a decode step goes: `python -m benchmarks.step_profile --batch 1 256 [--json]`.

Kernels start before those ahead of them have ended, so their own times overlap and say too much. What counts here is by
how much each moves the end of all work forward: these times add up to the step. Time in which the device does nothing
is its own row. Needs a GPU.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import show
from benchmarks.shapes import SHAPES
from benchmarks.workloads import steady
from inflight.config import EngineConfig
from inflight.engine.core import EngineCore
from inflight.loading.engine import LoadedEngine
from inflight.loading.load import load_engine
from inflight.sampling_params import SamplingParams

WARM_UP = 16  # decode steps before those that are measured
NOTHING = "(nothing runs)"


@dataclass(frozen=True, slots=True)
class Interval:
    name: str
    begin: float  # microseconds
    end: float


@dataclass(slots=True)
class Share:
    """A kernel's part of the step."""

    name: str
    microseconds: float = 0.0  # by which it moves the end of all work forward
    own: float = 0.0  # from its begin to its end, which may overlap others
    count: float = 0.0


def shares(intervals: Iterable[Interval], num_steps: int) -> list[Share]:
    """Per step, the largest first."""
    found: dict[str, Share] = {}
    done: float | None = None
    for interval in sorted(intervals, key=lambda interval: (interval.begin, interval.end)):
        if done is not None and interval.begin > done:
            idle = found.setdefault(NOTHING, Share(NOTHING))
            idle.microseconds += interval.begin - done
            idle.count += 1
        since = interval.begin if done is None else max(done, interval.begin)
        share = found.setdefault(interval.name, Share(interval.name))
        share.microseconds += max(0.0, interval.end - since)
        share.own += interval.end - interval.begin
        share.count += 1
        done = interval.end if done is None else max(done, interval.end)
    for share in found.values():
        share.microseconds /= num_steps
        share.own /= num_steps
        share.count /= num_steps
    return sorted(found.values(), key=lambda share: -share.microseconds)


def start_decoding(engine: LoadedEngine, batch: int, context: int, max_tokens: int) -> EngineCore:
    """An engine in which `batch` requests have computed their prompts."""
    core = engine.core
    work = steady(batch, context - WARM_UP, max_tokens, engine.frontend.input_processor.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(work.prompts):
        core.add(engine.frontend.input_processor.requests(str(index), prompt, params)[1][0])
    num_steps = 0
    while num_steps < WARM_UP:
        num_steps += len(core.step()) == batch
    return core


def timed(core: EngineCore, num_steps: int) -> float:
    """Median milliseconds between the ends of two steps."""
    ends = []
    for _ in range(num_steps + 1):
        core.step()
        ends.append(core.clock())
    return statistics.median(b - a for a, b in pairwise(ends)) * 1e3


def profiled(core: EngineCore, num_steps: int) -> list[Share]:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(num_steps):
            core.step()
        torch.cuda.synchronize()
    events = [
        Interval(short_name(event.name), event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return shares(events, num_steps)


def short_name(name: str) -> str:
    """Without template arguments and parameters, which are pages long."""
    while name != (shorter := re.sub(r"<[^<>]*>", "", name)):
        name = shorter
    return re.sub(r"\(.*", "", name.removeprefix("void ")).split("::")[-1][:60]


def measure(engine: LoadedEngine, batch: int, context: int, num_steps: int) -> dict[str, Any]:
    core = start_decoding(engine, batch, context, WARM_UP + 3 * num_steps + 8)
    step_ms = timed(core, num_steps)
    found = profiled(core, num_steps)
    for name in list(core.scheduler.pool.requests):
        core.abort(name)
    while core.has_work:
        core.step()
    return {
        "batch": batch,
        "context": context,
        "step_ms": step_ms,
        "profiled_ms": sum(share.microseconds for share in found) / 1e3,
        "kernels": [{name: getattr(share, name) for name in Share.__slots__} for share in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"))
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=12, help="kernels shown for each batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here to look at")
    config = {
        "hf_config": SHAPES[options.shape],
        "load_format": "dummy",
        "dtype": "bfloat16",
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": max(options.batch),
        "max_model_len": options.context + 3 * options.steps + 4 * WARM_UP,
    }
    engine = load_engine(EngineConfig.create(options.shape, **config))
    results = [measure(engine, batch, options.context, options.steps) for batch in options.batch]
    engine.close()
    if options.json:
        show("", (), (), True, {"benchmark": "step_profile", "shape": options.shape, "results": results})
        return
    for result in results:
        total = result["profiled_ms"] * 1e3
        rows = [
            (kernel["name"], kernel["count"], kernel["microseconds"], kernel["microseconds"] / total * 100)
            for kernel in result["kernels"][: options.rows]
        ]
        title = (
            f"{options.shape}, batch {result['batch']}, context {result['context']}: "
            f"{result['step_ms']:.3f} ms a step, {result['profiled_ms']:.3f} while profiled"
        )
        show(title, ("kernel", "a step", "us a step", "%"), rows, False, {})


if __name__ == "__main__":
    main()
