"""The cost of recording the timeline, with and without a recorder in turns.

    python -m benchmarks.timeline                                        # 64 streams of the built-in model
    python -m benchmarks.timeline --shape qwen3-0.6b --streams 256      # on a GPU, with random weights

Two loads are measured: `steady`, where the same requests decode in nearly all steps, and `churn`, where requests end at
different times and others take their slots: some join and leave in every step.

Two figures are reported: the throughput of turns with and without a recorder, which other work on the machine disturbs
by more than the recorder costs; and the processor time in the recorder as a share of all time, which it hardly does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.shapes import SHAPES
from inflight import LLM, SamplingParams
from inflight.engine.core import EngineCore
from inflight.timeline.recorder import NoRecorder, Recorder


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


def output_lengths(load: str, streams: int, tokens: int) -> list[int]:
    """Return the number of output tokens of each request."""
    if load == "steady":
        return [tokens] * streams
    return [max(2, tokens - index % (tokens // 2)) for index in range(3 * streams)]


class Measurement:
    """Turns of one load on one engine."""

    def __init__(self, llm: LLM, load: str, streams: int, tokens: int) -> None:
        self._llm = llm
        self._core = llm._engine.core
        lengths = output_lengths(load, streams, tokens)
        self._prompts = [[5 + index % 40, 6, 7, 8 + index % 3] for index in range(len(lengths))]
        self._params = [
            SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in lengths
        ]
        self._num_tokens = sum(lengths)

    def turn(self, recorder: NoRecorder) -> tuple[float, int]:
        """Run the load once. Return its seconds and number of steps."""
        self._core.recorder = recorder
        num_steps, began = self._core.stats().num_steps, time.perf_counter()
        self._llm.generate(self._prompts, self._params, use_tqdm=False)
        return time.perf_counter() - began, self._core.stats().num_steps - num_steps

    def report(self, load: str, turns: int) -> None:
        rates: dict[str, list[float]] = {"on": [], "off": []}
        shares, costs, sizes = [], [], []
        num_steps, seconds = 0, 0.0
        for turn in range(2 * turns + 2):
            name = ("on", "off")[turn % 2]
            recorder = recorder_of(self._core, Recorder) if name == "on" else NoRecorder()
            seconds, num_steps = self.turn(recorder)
            if turn >= 2:  # the first of each warm up
                rates[name].append(self._num_tokens / seconds)
        for _ in range(max(1, turns // 3)):
            timed = recorder_of(self._core, TimedRecorder)
            seconds, num_steps = self.turn(timed)
            shares.append(timed.seconds / seconds)  # type: ignore[attr-defined]
            costs.append(1e6 * timed.seconds / num_steps)  # type: ignore[attr-defined]
            sizes.append(timed.num_bytes / num_steps)
        on, off = (statistics.median(rates[name]) for name in ("on", "off"))
        spread = statistics.stdev(rates["off"]) / off
        print(f"{load}: {num_steps} steps of {1e3 * seconds / num_steps:.2f} ms")
        print(
            f"  throughput: {on:,.0f} tokens/s with recording, {off:,.0f} without: {on / off - 1:+.2%} "
            f"(turns without recording differ by {spread:.1%})"
        )
        print(
            f"  in the recorder: {statistics.median(shares):.3%} of all time, {statistics.median(costs):.1f} us a "
            f"step; {statistics.median(sizes):.0f} bytes a step",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead of a model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of the longest request")
    parser.add_argument("--turns", type=int, default=10, help="of each kind")
    parser.add_argument("--load", nargs="+", choices=("steady", "churn"), default=["steady", "churn"])
    options = parser.parse_args()
    source: dict[str, Any] = {"model": options.model}
    if options.shape:
        source = {"model": options.shape, "hf_config": SHAPES[options.shape], "load_format": "dummy"}
        source["max_model_len"] = 4096
    llm = LLM(**source, max_num_seqs=options.streams, show_progress=False)
    print(f"{options.shape or options.model or 'the built-in model'}, {options.streams} streams", flush=True)
    for load in options.load:
        Measurement(llm, load, options.streams, options.tokens).report(load, options.turns)
    llm.close()


if __name__ == "__main__":
    main()
