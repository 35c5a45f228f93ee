"""How much KV memory is allocated but holds no token.

    python -m benchmarks.kv_waste [--requests 256 --low 100 --high 1024 --block-size 16] [--json]

The real scheduler and block manager run the ragged workload; only the model is left out, since memory does not
depend on what tokens say. Waste is the share of token places in used blocks that hold nothing: the mean over
all steps, and the worst step. `static` reserves full length for a batch that retires together, as engines did
before paging.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.report import show
from benchmarks.workloads import Workload, ragged
from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import PrefixCache
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Sampled
from inflight.scheduling.policy import make_policy
from inflight.scheduling.request_pool import Limits
from inflight.scheduling.scheduler import Scheduler


def measure(work: Workload, policy: str, options: argparse.Namespace) -> dict[str, object]:
    blocks = BlockManager(
        options.kv_tokens // options.block_size, KVLayout(options.block_size), PrefixCache()
    )
    limits = Limits(options.max_num_seqs, options.max_num_batched_tokens, options.kv_tokens)
    scheduler = Scheduler(limits, make_policy(policy), blocks)
    for index, (prompt, length) in enumerate(zip(work.prompts, work.output_lens, strict=True)):
        params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
        scheduler.add(Request.create(str(index), list(prompt), params, length))
    wastes, running, num_preemptions = [], [], 0
    while scheduler.pool.has_work:
        step = scheduler.schedule(0.0)
        assert step is not None
        wastes.append(step.kv.waste)
        running.append(len(scheduler.pool.running))
        num_preemptions += len(step.preempted)
        scheduler.update(step, Sampled([[0] if samples else [] for samples in step.samples]), 0.0)
    return {
        "policy": policy,
        "block_size": options.block_size,
        "mean_waste": statistics.fmean(wastes),
        "max_waste": max(wastes),
        "mean_running": statistics.fmean(running),
        "steps": len(wastes),
        "preemptions": num_preemptions,
    }


# docs/continuous-batching.md has the same.
COLUMNS = ("policy", "mean waste", "worst step", "running", "steps", "preemptions")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--low", type=int, default=100)
    parser.add_argument("--high", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--kv-tokens", type=int, default=64_000, help="token places in all, less than all need"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    work = ragged(options.requests, options.low, options.high, vocab_size=10_001)
    results = [measure(work, policy, options) for policy in ("continuous", "static")]
    rows = [
        (
            r["policy"],
            f"{r['mean_waste']:.2%}",
            f"{r['max_waste']:.2%}",
            r["mean_running"],
            r["steps"],
            r["preemptions"],
        )
        for r in results
    ]
    title = (
        f"KV waste, {options.requests} requests, blocks of {options.block_size}, {options.kv_tokens:,} places"
    )
    show(title, COLUMNS, rows, options.json, {"benchmark": "kv_waste", "results": results})


if __name__ == "__main__":
    main()
