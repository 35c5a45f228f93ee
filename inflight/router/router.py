"""An engine client over several replicas: it places requests, and moves them when an engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial

from inflight.engine.client import (
    Command,
    DeltaStream,
    Health,
    History,
    MemoryState,
    ModelFacts,
    RequestState,
    TimelineObserver,
    id_in_use,
    not_added,
    wait_while,
)
from inflight.engine.runner import asleep
from inflight.engine.stats import EngineStats
from inflight.errors import EngineDeadError, EngineError, QueueFullError
from inflight.events import CACHE_HASH_LENGTH, Delta
from inflight.kv.prefix_cache import BlockHasher
from inflight.request import Request
from inflight.router.replica import RECENT_TOKENS, BlockMarks, KnownTokens, Replica, choose
from inflight.router.replicas import Replicas, StartReplica
from inflight.router.routed import RoutedRequest, share_blame
from inflight.timeline.chunks import TimelinePage, TimelineQuery

logger = logging.getLogger(__name__)

RETRY = 1.0  # seconds after which requests waiting for a replica try again without a notification
POISON = "poison_request"


class Router:
    """Implements `EngineClient`. Used in the event loop that started it."""

    def __init__(
        self,
        start: StartReplica,
        routing: str = "prefix_aware",
        patience: float = 60.0,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Create a router without replicas.

        `patience` is how long a running request waits for a replica when none is left, in seconds. `on_close` is called
        when all replicas are closed.
        """
        self._on_close = on_close
        self.replicas = Replicas(start, self._on_loss, self._notify_waiting)
        self._routing = routing
        self._patience = patience
        self._clock = time.monotonic
        self._requests: dict[str, RoutedRequest] = {}  # by request id, until their stream has ended
        self._history = History()
        self._hasher: BlockHasher
        self._marks = BlockMarks()
        self._changed = asyncio.Event()
        self._num_placed = 0
        self._num_waiting = 0  # for a replica
        self._closing = False

    @classmethod
    async def start(
        cls,
        start: StartReplica,
        count: int,
        routing: str = "prefix_aware",
        patience: float = 60.0,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> Router:
        """Start a router with `count` replicas and wait until all are ready. Raises the error of one that fails."""
        router = cls(start, routing, patience, on_close)
        await router.replicas.open(count)
        router._hasher = BlockHasher(router.facts.block_size)
        return router

    def runs(self, request_id: str) -> bool:
        """Return whether there is such a request."""
        return request_id in self._requests

    @property
    def facts(self) -> ModelFacts:
        return self.replicas.facts

    # ---- placing ----

    async def add(self, request: Request) -> None:
        if self._closing:
            raise EngineDeadError("the engines are closing")
        if self.replicas.are_asleep:
            raise asleep()
        if request.request_id in self._requests:
            raise id_in_use(request.request_id)
        routed = self._requests[request.request_id] = RoutedRequest(request, self._clock())
        try:
            try:
                await self._place(routed, request)
            except EngineDeadError as error:
                if not routed.num_failovers:
                    raise
                final_delta = await self._resume(routed, error)
                if final_delta is not None:
                    raise EngineError(
                        final_delta.error or "the request was aborted", code=final_delta.error_code
                    ) from None
        except BaseException:
            self._forget(routed)
            raise

    async def _place(self, routed: RoutedRequest, request: Request) -> None:
        """Send a request to a replica that accepts it.

        Raises QueueFullError if all queues are full, EngineDeadError if no replica is available or the chosen one died.
        """
        tried: list[Replica] = []
        is_full = False
        while True:
            candidates = [replica for replica in self.replicas.available if replica not in tried]
            if routed.suspicion.is_tried_alone:
                candidates = [replica for replica in candidates if replica.on_trial is None]
            if not candidates:
                if is_full:
                    raise QueueFullError("the queues of all replicas are full")
                raise EngineDeadError(self.replicas.trouble())
            replica = self._choose(routed, request, candidates)
            tried.append(replica)
            try:
                return await self._send(routed, request, replica)
            except QueueFullError:
                is_full = True
                routed.leave()
            except EngineDeadError:
                with contextlib.suppress(Exception):
                    await self.replicas.check_health(replica)
                if routed.replica is None:
                    raise
                routed.leave()  # the replica did not answer, but it is alive

    def _choose(self, routed: RoutedRequest, request: Request, candidates: list[Replica]) -> Replica:
        tokens = self._known_tokens(request)
        replica = choose(self._routing, tokens, candidates)
        self._num_placed += 1
        replica.chosen_at = self._num_placed
        factor = 0.5 ** (tokens.num_missing(replica) / RECENT_TOKENS)
        for other in self.replicas.members:
            other.recent_tokens *= factor
        routed.enter(replica, tokens)
        return replica

    async def _send(self, routed: RoutedRequest, request: Request, replica: Replica) -> None:
        try:
            await replica.client.add(request)
        except (QueueFullError, EngineDeadError):
            raise
        except BaseException:
            routed.leave()
            raise
        routed.stream, routed.is_accepted = replica.client.stream(request.request_id), True
        if routed.abort_reason is not None:  # meanwhile
            await replica.client.abort(request.request_id, routed.abort_reason)

    def _known_tokens(self, request: Request) -> KnownTokens:
        size = self._hasher.block_size
        num_tokens = len(request.token_ids)
        if not request.splittable or request.params.prompt_logprobs is not None:
            # It is computed without the prefix cache.
            return KnownTokens(num_tokens, size, (), ())
        marks = self._marks.up_to((num_tokens - 1) // size)
        hashes = [block_hash[:CACHE_HASH_LENGTH] for block_hash in self._hasher.hashes_at(request, marks)]
        return KnownTokens(num_tokens, size, hashes, marks)

    # ---- failover ----

    def _on_loss(self, replica: Replica, lost: set[RoutedRequest], on_trial: RoutedRequest | None) -> None:
        if not replica.is_leaving:
            share_blame(lost, on_trial)
            logger.warning(
                "replica %s is lost: its %d requests continue on other replicas",
                replica.replica_id,
                len(lost),
            )
        for routed in lost:
            routed.lost()
        self._notify_waiting()

    async def _resume(self, routed: RoutedRequest, error: EngineDeadError) -> Delta | None:
        """Continue a request whose engine is lost on another replica.

        Returns None once another engine has it, or its last delta if nothing is left to do or it is to blame. Raises
        EngineDeadError if no engine becomes available in time.
        """
        if routed.replica is not None:
            self.replicas.lose(routed.replica)
        alone_since: float | None = None  # when the last replica became unavailable
        while True:
            rest = self._rest(routed)
            if isinstance(rest, Delta):
                return rest
            try:
                await self._place(routed, rest)
                return None
            except QueueFullError:
                alone_since = None
            except EngineDeadError as trouble:
                alone_since = None if self.replicas.available else alone_since or self._clock()
                if alone_since is not None:
                    is_late = self._clock() - alone_since >= self._patience
                    if is_late or not self.replicas.any_to_come:
                        raise trouble
            if self._closing:
                raise error
            await self._wait_for_change()

    def _rest(self, routed: RoutedRequest) -> Request | Delta:
        """Return a request for the remaining tokens, or the last delta if it must not continue."""
        if not routed.suspicion.is_confirmed:
            return routed.rest()
        num_deaths = routed.suspicion.num_deaths
        message = f"{num_deaths} engines died while computing this request: it is not retried"
        logger.error("request %s: %s", routed.request_id, message)
        return Delta(routed.request_id, [], finish_reason="error", error=message, error_code=POISON)

    async def _wait_for_change(self) -> None:
        """Wait until a replica may take another request."""
        self._num_waiting += 1
        try:
            async with asyncio.timeout(RETRY):
                await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._num_waiting -= 1

    def _notify_waiting(self) -> None:
        """Wake the requests that wait for a replica."""
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- reading ----

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        routed = self._requests.get(request_id)
        if routed is None:
            raise not_added(request_id)
        return DeltaStream(partial(self._next, routed), lambda _: self._forget(routed))

    async def _next(self, routed: RoutedRequest) -> Delta:
        """Return the next delta of a request, from whichever engine has it."""
        delta: Delta | None = None
        while delta is None:
            assert routed.stream is not None
            try:
                delta = await routed.stream.asend(None)
            except EngineDeadError as error:
                delta = await self._resume(routed, error)
        self._record(routed, delta)
        return delta

    def _record(self, routed: RoutedRequest, delta: Delta) -> None:
        """Record a delta that the reader of a request gets."""
        routed.take(delta, self._clock())
        if delta.finish_reason is not None:
            routed.complete(delta, self._clock())
            assert delta.record is not None
            self._history.add(delta.record)
        if self._num_waiting:
            self._notify_waiting()

    def _forget(self, routed: RoutedRequest) -> None:
        """Forget a request whose stream has ended or never started."""
        routed.leave()
        routed.stream = None  # aborts it if it still runs
        if self._requests.get(routed.request_id) is routed:
            del self._requests[routed.request_id]
        if self._num_waiting:
            self._notify_waiting()

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        routed = self._requests.get(request_id)
        if routed is None:
            return 0
        routed.abort_reason = reason  # also holds after a failover
        if routed.replica is None:
            self._notify_waiting()
            return 0
        try:
            return await routed.replica.client.abort(request_id, reason)
        except EngineDeadError:
            return 0  # its stream ends anyway

    async def describe(self, request_id: str) -> RequestState | None:
        routed = self._requests.get(request_id)
        if routed is not None:
            return await routed.describe(self._clock())
        return self._history.get(request_id)

    # ---- all replicas ----

    async def command(self, command: Command) -> None:
        await self.replicas.command(command)

    def watch_timeline(self, observer: TimelineObserver) -> Callable[[], None]:
        return self.replicas.watch_timeline(observer)

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        return await self.replicas.read_timeline(query)

    async def read_memory(self, replica: str) -> MemoryState:
        return await self.replicas.find(replica).client.read_memory("0")

    async def stats(self) -> EngineStats:
        return await self.replicas.stats()

    async def health(self) -> Health:
        health = self.replicas.health()
        is_closing = self._closing and health.healthy
        return replace(health, healthy=False, state="closing") if is_closing else health

    async def close(self, drain: float = 0.0) -> None:
        self._closing = True
        await wait_while(lambda: bool(self._requests), drain)
        self._notify_waiting()
        await self.replicas.close()
        if self._on_close is not None:
            await self._on_close()
