"""What scheduling costs: `schedule()` + `update()` in microseconds, with nothing computed between them.

    python -m benchmarks.scheduler [--json]

Rows vary the batch, the length of the queue behind it and the context: the cost of a request should depend on
neither of the last two.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.report import show
from inflight.kv import BlockManager, ChainHashCache, KVLayout
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling import Limits, Sampled, Scheduler, make_policy

BLOCK_SIZE = 16


def step_seconds(policy: str, num_running: int, num_waiting: int, context: int, steps: int) -> float:
    """Mean time of schedule + update while `num_running` requests decode and `num_waiting` more queue."""
    per_request = -(-(context + steps + 64) // BLOCK_SIZE)
    blocks = BlockManager(
        num_running * per_request, KVLayout(BLOCK_SIZE), ChainHashCache(KVLayout(BLOCK_SIZE))
    )
    limits = Limits(num_running, max(num_running * context, 8192), 1 << 60)
    scheduler = Scheduler(limits, make_policy(policy), blocks)
    params = SamplingParams(max_tokens=steps + 32, temperature=0)
    for index in range(num_running + num_waiting):
        prompt = [index, *range(1, context - index % BLOCK_SIZE)]  # block borders at different steps
        scheduler.add(Request.create(str(index), prompt, params, steps + 32, tenant=str(index % 4)))
    times = []
    for step in range(steps + 1):
        start = time.perf_counter()
        batch = scheduler.schedule(0.0)
        scheduled = time.perf_counter()
        assert batch is not None
        assert len(batch) == num_running
        sampled = Sampled([[step] for _ in range(len(batch))])
        resumed = time.perf_counter()
        scheduler.update(batch, sampled, 0.0)
        times.append(scheduled - start + time.perf_counter() - resumed)
    return statistics.fmean(sorted(times[1:])[: int(0.95 * steps)])  # the first admits all; 5% of noise


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    cases = [(running, 0, 300) for running in (1, 16, 64, 256, 1024)]
    cases += [(256, waiting, 300) for waiting in (100, 10_000)]
    cases += [(256, 0, context) for context in (32, 4_000)]
    rows, data = [], []
    for policy in ("continuous", "priority", "fair"):
        for running, waiting, context in cases if policy == "continuous" else [(256, 10_000, 300)]:
            seconds = step_seconds(policy, running, waiting, context, arguments.steps)
            rows.append((policy, running, waiting, context, seconds * 1e6, seconds * 1e6 / running))
            keys = ("policy", "running", "waiting", "context", "step_us", "request_us")
            data.append(dict(zip(keys, rows[-1], strict=True)))
    columns = ("policy", "decoding", "waiting", "context", "step µs", "µs a request")
    show("schedule() + update()", columns, rows, arguments.json, {"benchmark": "scheduler", "rows": data})


if __name__ == "__main__":
    main()
