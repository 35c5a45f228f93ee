"""Replicas in simulated time: a step takes as long as it has tokens, and nothing is computed."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

from inflight.engine.client import (
    CacheObserver,
    Command,
    DeltaQueue,
    DeltaStream,
    Health,
    ModelFacts,
    RequestState,
)
from inflight.engine.stats import EngineStats
from inflight.events import Delta
from inflight.kv.prefix_cache import CacheChanges
from inflight.request import Request
from inflight.router.router import Router
from inflight.scheduling.batch import Batch, Sampled
from tests.support.fake_runner import FakeRunner
from tests.support.no_timeline import NoTimeline
from tests.support.requests import FakeEngine, make_request

STEP_TOKENS = 16  # that a step takes as long as, beside those that it has


class CountingRunner(FakeRunner):
    """Tokens without any thought."""

    num_last = 0  # tokens of the last step

    def launch(self, batch: Batch) -> Sampled:
        self.num_last = batch.num_tokens
        self.num_computed += batch.num_tokens
        ends = zip(batch.starts, batch.counts, batch.samples, strict=True)
        return Sampled([[(start + count) % 50] if samples else [] for start, count, samples in ends])


class SteppedClient(NoTimeline):
    """Implements `ReplicaClient` over a core that someone else steps."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.facts: ModelFacts = engine.facts
        self.free_at = 0.0  # when its last step is over
        self._queues: dict[str, DeltaQueue] = {}
        self._changes = CacheChanges()
        self._cache_observer: CacheObserver = lambda _: None

    def step(self) -> None:
        for delta in self.engine.core.step():
            self._queues[delta.request_id].put(delta)
        update = self._changes.take()
        if update is not None:
            self._cache_observer(update)

    async def add(self, request: Request) -> None:
        self.engine.core.add(request)
        self._queues[request.request_id] = DeltaQueue()

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        return DeltaStream(self._queues[request_id].take, lambda _: None)

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        raise NotImplementedError

    async def command(self, command: Command) -> None:
        """It has none to give."""

    async def describe(self, request_id: str) -> RequestState | None:
        raise NotImplementedError

    def watch_cache(self, observer: CacheObserver) -> None:
        self._cache_observer = observer
        self.engine.scheduler.blocks.cache.report(self._changes)

    async def stats(self) -> EngineStats:
        return self.engine.core.stats()

    async def health(self) -> Health:
        return Health(True, 0.0)

    async def restart(self) -> None:
        raise NotImplementedError

    async def close(self, drain: float = 0.0) -> None:
        pass


@dataclass
class Simulation:
    """Requests over replicas, and what became of them."""

    router: Router
    clients: list[SteppedClient]
    now: float = 0.0
    first_tokens: list[float] = field(default_factory=list)  # how long each request waited for its first
    _sleeping: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def computed(self) -> list[int]:
        """Tokens that each replica has computed."""
        return [client.engine.runner.num_computed for client in self.clients]

    async def sleep(self, until: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleeping, (until, next(self._numbers), future))
        await future

    async def ask(self, prompt: list[int], count: int, **fields: Any) -> list[int]:
        arrived = self.now
        request = make_request(prompt, count, **fields)
        await self.router.add(request)
        tokens: list[int] = []
        async for delta in self.router.stream(request.request_id):
            if not tokens:
                self.first_tokens.append(self.now - arrived)
            tokens += delta.token_ids
        return tokens

    async def ask_at(self, at: float, prompt: list[int], count: int) -> list[int]:
        await self.sleep(at)
        return await self.ask(prompt, count)

    async def ask_all(self, prompts: list[list[int]], count: int) -> None:
        """All at once, to the end."""
        await self.run(*(self.ask(prompt, count) for prompt in prompts))

    async def run(self, *work: Coroutine[Any, Any, Any]) -> None:
        tasks = [asyncio.create_task(item) for item in work]
        while not all(task.done() for task in tasks):
            for _ in range(5):  # until everyone has done what they can do now
                await asyncio.sleep(0)
            busy = [client for client in self.clients if client.engine.core.has_work]
            client = min(busy, key=lambda client: client.free_at, default=None)
            wakes = self._sleeping[0][0] if self._sleeping else float("inf")
            if client is not None and max(client.free_at, self.now) <= wakes:
                await self._step(client)
            elif self._sleeping:
                self.now = max(self.now, wakes)
                heapq.heappop(self._sleeping)[2].set_result(None)
        await asyncio.gather(*tasks)

    async def _step(self, client: SteppedClient) -> None:
        """Its results are there when it is over: requests that would come meanwhile come to the next one."""
        self.now = max(self.now, client.free_at)
        client.step()
        runner = client.engine.runner
        assert isinstance(runner, CountingRunner)
        client.free_at = self.now + STEP_TOKENS + runner.num_last
        replica = self.router.replicas.members[self.clients.index(client)]
        replica.stats = client.engine.core.stats()


@contextlib.asynccontextmanager
async def simulated(count: int, routing: str, **options: Any) -> AsyncIterator[Simulation]:
    clients: list[SteppedClient] = []
    defaults = {
        "num_blocks": 8192,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "make_runner": CountingRunner,
    }

    async def start(replica_id: str, beside: object = None) -> SteppedClient:  # noqa: ARG001
        clients.append(SteppedClient(FakeEngine(**defaults | options)))  # type: ignore[arg-type]
        return clients[-1]

    router = await Router.start(start, count, routing)
    try:
        yield Simulation(router, clients)
    finally:
        await router.close()
