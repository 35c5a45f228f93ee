"""What scheduling costs: `schedule()` + `update()` in microseconds, with nothing computed between them.

    python -m benchmarks.scheduler [--json]

Rows vary the batch, the length of the queue behind it and the context: the cost of a request should depend on
neither of the last two. The last ones have several KV groups: all tokens, a window, and a recurrent state.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.report import show
from inflight.kv.block_manager import BlockManager
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import ChainHashCache
from inflight.request import Request
from inflight.sampling_params import SamplingParams
from inflight.scheduling.batch import Sampled
from inflight.scheduling.policy import make_policy
from inflight.scheduling.request_pool import Limits
from inflight.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16


LAYOUTS = {
    "all tokens": KVLayout(BLOCK_SIZE),
    "and a window": KVLayout(BLOCK_SIZE, (None, 128)),
    "and a state": KVLayout(BLOCK_SIZE, (None,), 8),
    "and both": KVLayout(BLOCK_SIZE, (None, 128), 8),
    "and 5 windows": KVLayout(BLOCK_SIZE, (None, *[128] * 5)),  # as Gemma 3 12B
}


def step_seconds(
    policy: str, num_running: int, num_waiting: int, context: int, steps: int, layout: KVLayout
) -> float:
    """Mean time of schedule + update while `num_running` requests decode and `num_waiting` more queue."""
    per_request = layout.blocks_for(context + steps + 64, context) + 5 * layout.snapshot_blocks
    blocks = BlockManager(num_running * per_request, layout, ChainHashCache(layout))
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
    plain = LAYOUTS["all tokens"]
    measured = [("continuous", *case, "all tokens", plain) for case in cases]
    measured += [(policy, 256, 10_000, 300, "all tokens", plain) for policy in ("priority", "fair")]
    measured += [("continuous", 256, 0, 300, name, layout) for name, layout in LAYOUTS.items()]
    rows, data = [], []
    for policy, running, waiting, context, name, layout in measured:
        seconds = step_seconds(policy, running, waiting, context, arguments.steps, layout)
        rows.append((policy, running, waiting, context, name, seconds * 1e6, seconds * 1e6 / running))
        keys = ("policy", "running", "waiting", "context", "layers_keep", "step_us", "request_us")
        data.append(dict(zip(keys, rows[-1], strict=True)))
    columns = ("policy", "decoding", "waiting", "context", "layers keep", "step µs", "µs a request")
    show("schedule() + update()", columns, rows, arguments.json, {"benchmark": "scheduler", "rows": data})


if __name__ == "__main__":
    main()
