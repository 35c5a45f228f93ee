"""The cost of recording the timeline: 64 streams of the built-in model, with and without a recorder in turns.

    python -m benchmarks.timeline                 # on this machine's device
    python -m benchmarks.timeline --streams 256 --tokens 512 --turns 10

Two figures are reported: the throughput of turns with and without a recorder, which other work on the machine disturbs
by more than the recorder costs; and the processor time in the recorder as a share of all time, which it hardly does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from inflight import LLM, SamplingParams
from inflight.engine import EngineCore
from inflight.timeline import NoRecorder, Recorder


class TimedRecorder(Recorder):
    """A recorder that measures the processor time spent in it."""

    seconds = 0.0

    def step(self, *args: Any) -> None:
        began = time.thread_time()
        super().step(*args)
        self.seconds += time.thread_time() - began

    def arrive(self, *args: Any) -> None:
        began = time.thread_time()
        super().arrive(*args)
        self.seconds += time.thread_time() - began


def recorder_of(core: EngineCore, kind: Callable[..., Recorder]) -> Recorder:
    blocks = core.scheduler.blocks
    return kind(core.scheduler.limits, blocks.pool.num_blocks, blocks.block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of the longest request")
    parser.add_argument("--turns", type=int, default=10, help="of each kind")
    options = parser.parse_args()
    llm = LLM(options.model, max_num_seqs=options.streams, show_progress=False)
    core = llm._engine.core
    prompts = [[5 + index % 40, 6, 7, 8 + index % 3] for index in range(3 * options.streams)]
    # Requests end at different times, and others take their slots: the general case for the recorder.
    params = [
        SamplingParams(
            max_tokens=max(2, options.tokens - index % (options.tokens // 2)), temperature=0, ignore_eos=True
        )
        for index in range(len(prompts))
    ]
    limits = core.scheduler.limits
    rates: dict[str, list[float]] = {"on": [], "off": []}
    shares, costs, sizes = [], [], []
    for turn in range(2 * options.turns + 2):
        name = ("on", "off")[turn % 2]
        recorder = recorder_of(core, Recorder) if name == "on" else NoRecorder()
        core.recorder = recorder
        steps = core.stats().num_steps
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        if turn >= 2:  # the first of each warm up
            rates[name].append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    for _ in range(3):
        timed = recorder_of(core, TimedRecorder)
        core.recorder = timed
        steps = core.stats().num_steps
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        num_steps = core.stats().num_steps - steps
        shares.append(timed.seconds / seconds)  # type: ignore[attr-defined]
        costs.append(1e6 * timed.seconds / num_steps)  # type: ignore[attr-defined]
        sizes.append(timed.num_bytes / num_steps)
    on, off = (statistics.median(rates[name]) for name in ("on", "off"))
    slots = min(options.streams, limits.max_num_seqs)
    print(f"{options.streams} streams on {slots} slots, {options.turns} turns of each kind")
    print(f"throughput: {on:,.0f} tokens/s with recording, {off:,.0f} without: {on / off - 1:+.2%}")
    spread = statistics.stdev(rates["off"]) / off
    print(f"(one turn without recording differs from another by {spread:.1%})")
    print(
        f"time in the recorder: {statistics.median(shares):.3%} of all time, {statistics.median(costs):.1f} us a step"
    )
    print(f"size: {statistics.median(sizes):.0f} bytes a step")
    llm.close()


if __name__ == "__main__":
    main()
