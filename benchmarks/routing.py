"""What a router costs, and what replicas bring. (Whether answers outlive engines: benchmarks/failover.py.)

    python -m benchmarks.routing overhead              time per request and per token that the router adds
    python -m benchmarks.routing throughput            tokens/s of replicas with one thread each: one, then two

The last one runs the built-in model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from benchmarks.report import show
from inflight import AsyncEngine, SamplingParams
from inflight.engine.client import (
    CacheObserver,
    Command,
    DeltaQueue,
    DeltaStream,
    EngineClient,
    Health,
    MemoryState,
    ModelFacts,
    RequestState,
    TimelineObserver,
)
from inflight.engine.stats import EngineStats
from inflight.events import Delta, KVUsage, RequestRecord
from inflight.request import Request
from inflight.router.router import Router
from inflight.timeline.chunks import TimelinePage, TimelineQuery

FACTS = ModelFacts("none", 1000, 1 << 20, (), {}, None, "none", "none", 1 << 16, 16, 256, 8192)


class InstantClient:
    """An engine that has every answer at once: what is left is the cost of asking."""

    facts = FACTS

    def __init__(self) -> None:
        self._queues: dict[str, DeltaQueue] = {}
        self._waiting: dict[str, int] = {}

    async def add(self, request: Request) -> None:
        self._queues[request.request_id] = DeltaQueue()
        self._waiting[request.request_id] = request.max_tokens

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        return DeltaStream(self._queues[request_id].take, lambda _: None)

    def give(self, request_id: str) -> None:
        """The next token."""
        self._waiting[request_id] -= 1
        delta = Delta(request_id, [1])
        if not self._waiting[request_id]:
            delta.finish_reason, delta.record = "length", RequestRecord(request_id, "", 0, 1)
        self._queues[request_id].put(delta)

    async def abort(self, request_id: str, reason: str = "abort") -> int:  # noqa: ARG002
        return 0

    async def command(self, command: Command) -> None:
        """It has none to give."""

    async def describe(self, request_id: str) -> RequestState | None:  # noqa: ARG002
        return None

    def watch_timeline(self, observer: TimelineObserver) -> Callable[[], None]:  # noqa: ARG002
        return lambda: None

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:  # noqa: ARG002
        return TimelinePage([], {})

    async def read_memory(self, replica: str) -> MemoryState:
        raise NotImplementedError(replica)

    def watch_cache(self, observer: CacheObserver) -> None:
        pass

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, KVUsage(1 << 16, 1 << 16, 0, 0, 16, 0))

    async def health(self) -> Health:
        return Health(True, 0.0)

    async def restart(self) -> None:
        """It never needs to."""

    async def close(self, drain: float = 0.0) -> None:
        pass


async def _ask(
    client: EngineClient, give: Callable[[str], None], prompt: list[int], num_tokens: int
) -> float:
    """Seconds for one request from its arrival to its last token."""
    request = Request.create("r", prompt, SamplingParams(max_tokens=num_tokens), num_tokens)
    started = time.perf_counter()
    await client.add(request)
    stream = client.stream("r")
    for _ in range(num_tokens):
        give("r")
        await anext(stream)
    return time.perf_counter() - started


async def overhead(num_replicas: int, repeats: int, as_json: bool) -> None:
    clients: list[InstantClient] = []

    async def start(replica_id: str, beside: object = None) -> InstantClient:  # noqa: ARG001
        clients.append(InstantClient())
        return clients[-1]

    router = await Router.start(start, num_replicas)

    def give(request_id: str) -> None:
        """By whichever replica has it: placing it is the router's business."""
        next(client for client in clients if client._waiting.get(request_id)).give(request_id)

    chance, rows, data = random.Random(0), [], []
    for prompt_length in (16, 1000, 8000):
        prompts = [[chance.randrange(1000) for _ in range(prompt_length)] for _ in range(repeats)]
        alone = InstantClient()
        seconds = {}
        for num_tokens in (1, 101):
            direct = [await _ask(alone, alone.give, prompt, num_tokens) for prompt in prompts]
            routed = [await _ask(router, give, prompt, num_tokens) for prompt in prompts]
            seconds[num_tokens] = statistics.median(routed) - statistics.median(direct)
        per_token = (seconds[101] - seconds[1]) / 100
        rows.append((prompt_length, num_replicas, 1e3 * seconds[1], 1e6 * per_token))
        data.append({"prompt": prompt_length, "request_ms": 1e3 * seconds[1], "token_us": 1e6 * per_token})
    await router.close()
    columns = ("prompt tokens", "replicas", "ms a request", "µs a token")
    show("added by the router", columns, rows, as_json, {"benchmark": "routing overhead", "rows": data})


# ---- the built-in model ----


async def _throughput(num_replicas: int, num_streams: int, num_tokens: int) -> float:
    """Tokens/s of that many streams."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)

    async def read(engine: AsyncEngine, index: int, params: SamplingParams) -> None:
        async for _ in engine.generate([1 + index % 1000, 2, 3], params, output_kind="delta"):
            pass

    async with await AsyncEngine.start(replicas=num_replicas, num_blocks=2048) as engine:
        short = replace(params, max_tokens=4)
        await asyncio.gather(*(read(engine, index, short) for index in range(num_streams)))
        started = time.perf_counter()
        await asyncio.gather(*(read(engine, index, params) for index in range(num_streams)))
        return num_streams * num_tokens / (time.perf_counter() - started)


def throughput(num_streams: int, num_tokens: int, as_json: bool) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    speeds = {count: asyncio.run(_throughput(count, num_streams, num_tokens)) for count in (1, 2)}
    rows = [(count, speed, speed / speeds[1]) for count, speed in speeds.items()]
    data = {"benchmark": "routing throughput", "one": speeds[1], "two": speeds[2]}
    columns = ("replicas of one thread", "tokens/s", "times one")
    show("throughput", columns, rows, as_json, data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "throughput"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replicas", type=int, default=4, help="of overhead")
    parser.add_argument("--repeats", type=int, default=200, help="of overhead")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    given = parser.parse_args()
    if given.what == "overhead":
        asyncio.run(overhead(given.replicas, given.repeats, given.json))
    else:
        throughput(given.streams, given.tokens, given.json)


if __name__ == "__main__":
    main()
