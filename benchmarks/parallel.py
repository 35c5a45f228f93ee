"""Several CPU ranks against one process with as many threads, and what a step's message to the ranks costs.

    python -m benchmarks.parallel [--ranks 2] [--shape qwen3-0.6b] [--requests 16] [--rounds 3] [--json]

Every number of ranks gets all threads together: 2 ranks of one thread each, 1 rank of two. They run in turn, and the
best round of each counts: on a busy machine ranks wait for whichever of them the system has put aside.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from typing import Any, NoReturn

import torch

from benchmarks.offline import run
from benchmarks.report import show
from benchmarks.shapes import SHAPES
from benchmarks.workloads import ragged
from inflight import LLM
from inflight.execution.parallel.layout import RankLayout, RankMemory
from inflight.execution.parallel.messages import RankStep, SampledIds, decode, encode
from inflight.kv.block_manager import TableUpdate
from inflight.layers.native.library import native_library
from inflight.scheduling.batch import Batch

NUM_REQUESTS = 256  # of the step whose message is measured
MESSAGES = 2000
REDUCTIONS = 500


def _lost(code: int) -> NoReturn:
    raise SystemExit(f"a rank was lost: {code}")


def decode_step(step: int, num_stages: int) -> RankStep:
    """256 decodes; one in sixteen gets a new block. Stages also get the tokens of an earlier step."""
    rows = list(range(NUM_REQUESTS))
    starts, counts, samples = [1000 + row for row in rows], [1] * NUM_REQUESTS, [True] * NUM_REQUESTS
    batch = Batch(step, rows, starts, counts, samples, NUM_REQUESTS, NUM_REQUESTS)
    batch.tables = [TableUpdate(row, 63, [row * 7]) for row in rows[::16]]
    sampled = [SampledIds(step - 1, [(row * 7919) % 150_000 for row in rows])]
    return RankStep(batch, sampled if num_stages > 1 else [])


def message_cost(num_stages: int) -> dict[str, Any]:
    """Return the microseconds that rank 0 takes to send a step, and that a rank takes to read it."""
    library = native_library()
    assert library is not None
    layout = RankLayout(2, 1, 1, 4096, 0, ())
    first = RankMemory(library, layout, 0, _lost)
    second = RankMemory(library, layout, 1, _lost, os.dup(first.descriptor))
    to, by = first.steps(), second.steps()
    received: list[float] = []

    def read() -> None:
        for _ in range(MESSAGES):
            data = by.receive(0)
            start = time.perf_counter()
            decode(data)
            received.append(time.perf_counter() - start)

    reader = threading.Thread(target=read)
    reader.start()
    sent = []
    for step in range(MESSAGES):
        message = decode_step(step, num_stages)
        start = time.perf_counter()
        to.send(encode(message))
        sent.append(time.perf_counter() - start)
        time.sleep(0.0005)  # a step: the reader is asleep again, and must be woken
    reader.join()
    size = len(encode(decode_step(1, num_stages)))
    return {
        "bytes": size,
        "send_us": 1e6 * statistics.median(sent),
        "read_us": 1e6 * statistics.median(received),
    }


def reduction_cost(num_tokens: int, hidden_size: int) -> float:
    """Microseconds of one sum over two ranks that come at the same time."""
    library = native_library()
    assert library is not None
    layout = RankLayout(2, 1, 1, 1 << 20, 0, ())
    first = RankMemory(library, layout, 0, _lost)
    second = RankMemory(library, layout, 1, _lost, os.dup(first.descriptor))

    def add(memory: RankMemory) -> list[float]:
        collective, x = memory.collective(), torch.zeros(num_tokens, hidden_size)
        assert collective is not None
        taken = []
        for _ in range(REDUCTIONS):
            start = time.perf_counter()
            collective.sum(x)
            taken.append(time.perf_counter() - start)
        return taken

    torch.set_num_threads(1)
    child = os.fork()
    if not child:
        add(second)
        os._exit(0)
    times = add(first)
    os.waitpid(child, 0)
    return 1e6 * statistics.median(times)


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Output tokens per second on the ragged workload."""
    config = SHAPES[options.shape]
    work = ragged(options.requests, options.low, options.high, config["vocab_size"])
    sizes = {"one": 1, "ranks": options.ranks}
    engines = {
        name: LLM(
            "-",
            show_progress=False,
            load_format="dummy",
            hf_config=config,
            dtype="bfloat16",
            device="cpu",
            max_model_len=1024,
            kv_cache_memory=(1 << 30) // size,
            enable_prefix_caching=False,
            tensor_parallel_size=size,
        )
        for name, size in sizes.items()
    }
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(1 + options.rounds):
        for name, llm in engines.items():
            found[name].append(work.num_output / run(llm, work, 0.0))
    for llm in engines.values():
        llm.close()
    best = {name: max(rounds[1:]) for name, rounds in found.items()}
    return {**best, "all": found, "share": best["ranks"] / best["one"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--low", type=int, default=16)
    parser.add_argument("--high", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    hidden_size = SHAPES[options.shape]["hidden_size"]
    sums = {str(num_tokens): reduction_cost(num_tokens, hidden_size) for num_tokens in (1, 64, 512)}
    messages = {str(num_stages): message_cost(num_stages) for num_stages in (1, 2)}
    rates = throughput(options)
    rows = [
        *(
            [
                f"message of a step with {NUM_REQUESTS} requests, stages: {num_stages}",
                message["send_us"],
                "us, goal: under 50",
            ]
            for num_stages, message in messages.items()
        ),
        ["    read by a rank", messages["1"]["read_us"], "us"],
        *([f"sum of {tokens} tokens over 2 ranks", cost, "us"] for tokens, cost in sums.items()),
        [f"one process, {options.shape}", rates["one"], "tokens/s"],
        [f"{options.ranks} ranks", rates["ranks"], "tokens/s"],
        ["share", rates["share"], "goal: 0.85"],
    ]
    data = {"messages": messages, "sum_us": sums, "throughput": rates}
    show("Ranks on a CPU", ["", "", ""], rows, options.json, data)


if __name__ == "__main__":
    main()
