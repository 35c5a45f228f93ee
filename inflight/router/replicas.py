"""The replicas of a router: starting, watching, draining, restarting and removing them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from inflight.engine.client import (
    Command,
    Health,
    ModelFacts,
    ReplicaClient,
    Sleep,
    TimelineObserver,
    WakeUp,
    wait_while,
)
from inflight.engine.stats import EngineStats
from inflight.errors import (
    CheckpointChangedError,
    ConfigError,
    EngineDeadError,
    EngineError,
    RequestError,
    shown,
)
from inflight.processes.child import ProcessNotStartedError
from inflight.router.replica import Replica, facts_of_all, same_model, summed, work_done
from inflight.router.routed import RoutedRequest
from inflight.timeline.chunks import TimelinePage, TimelineQuery

logger = logging.getLogger(__name__)


class StartReplica(Protocol):
    async def __call__(self, replica_id: str, beside: ReplicaClient | None = None) -> ReplicaClient:
        """Start an engine. `beside` is the running engine that it will replace: raises ProcessNotStartedError if there
        is no room for both."""


OnLoss = Callable[[Replica, set[RoutedRequest], RoutedRequest | None], None]

POLL = 0.2  # seconds between health checks
_GONE = ("restarting", "dead", "closed")  # states of a client whose engine is lost


class Replicas:
    """All replicas.

    `on_loss` is called with a replica whose engine is lost, the requests that were on it, and the one that was on trial
    there; `on_change` when requests may retry.
    """

    def __init__(self, start: StartReplica, on_loss: OnLoss, on_change: Callable[[], None]) -> None:
        self.facts: ModelFacts  # of all replicas together
        self._start = start
        self._on_loss = on_loss
        self._on_change = on_change
        self._members: dict[str, Replica] = {}
        self._replaced: list[Replica] = []  # replaced, and finishing their requests
        self._starting: list[str] = []  # ids
        self._num_ids = 0
        self._watches: dict[TimelineObserver, list[Callable[[], None]]] = {}
        self._lost_stats: list[EngineStats] = []  # the summed stats of lost engines, as one item
        self._polling: asyncio.Task[None]
        self._changing = asyncio.Lock()  # one change at a time
        self.are_asleep = False  # all replicas were sent to sleep
        self._is_open = self._is_closed = False

    # ---- members ----

    @property
    def members(self) -> list[Replica]:
        return list(self._members.values())

    @property
    def starting(self) -> list[str]:
        return list(self._starting)

    @property
    def available(self) -> list[Replica]:
        return [replica for replica in self._members.values() if replica.available]

    @property
    def any_to_come(self) -> bool:
        """Whether a replica may become available later."""
        return bool(self._starting) or any(replica.health.state != "dead" for replica in self.members)

    def find(self, replica_id: str) -> Replica:
        replica = self._members.get(replica_id)
        if replica is None:
            raise RequestError(
                f"there is no replica {shown(replica_id)}: there are {', '.join(self._members)}",
                param="replica",
                code="replica_not_found",
            )
        return replica

    # ---- starting and stopping ----

    async def open(self, count: int) -> None:
        """Start `count` replicas concurrently; if one fails, close all."""
        try:
            results = await asyncio.gather(*(self._join() for _ in range(count)), return_exceptions=True)
            for error in results:
                if isinstance(error, BaseException):
                    raise error
        except BaseException:
            await self._close_all()
            raise
        self._is_open = True
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def add(self) -> str:
        """Start one more replica and return its id."""
        async with self._changing:
            return await self._join()

    async def _join(self, replica_id: str | None = None) -> str:
        if replica_id is None:
            replica_id = str(self._num_ids)
            self._num_ids += 1
        self._starting.append(replica_id)
        try:
            client = await self._new_engine(replica_id)
        finally:
            self._starting.remove(replica_id)
        self._enlist(Replica(replica_id, client))
        return replica_id

    async def _new_engine(self, replica_id: str, beside: ReplicaClient | None = None) -> ReplicaClient:
        """Start an engine that can run the requests of the others."""
        client = await self._start(replica_id, beside)
        try:
            if self._is_closed:  # meanwhile
                raise EngineDeadError("the engines are closing")
            self._check_fits(replica_id, client.facts)
        except BaseException:
            await client.close()
            raise
        return client

    def _enlist(self, replica: Replica) -> None:
        """Let a new replica take requests, in place of the one with the same id."""
        self._members[replica.replica_id] = replica
        self._members = {name: self._members[name] for name in sorted(self._members, key=int)}
        for observer, stops in self._watches.items():
            stops.append(self._watch_one(replica, observer))
        self._update_facts()
        self._on_change()

    def _check_fits(self, replica_id: str, facts: ModelFacts) -> None:
        """Check a new replica: it needs the model of the others, and at least the context that they agreed on."""
        others = [replica.client.facts for replica in self.members]
        if any(facts.fingerprint != other.fingerprint for other in others):
            raise CheckpointChangedError(
                f"replica {replica_id} loaded a different checkpoint than the running replicas: to serve other "
                "weights, start another server"
            )
        is_too_short = self._is_open and facts.max_model_len < self.facts.max_model_len
        if is_too_short or not all(same_model(facts, other) for other in others):
            raise ConfigError(
                f"replica {replica_id} has another model or other limits than the running replicas"
            )

    def drain(self, replica_id: str) -> None:
        """Send a replica no new requests."""
        replica = self.find(replica_id)
        self._check_not_last(replica)
        replica.draining = True

    async def remove(self, replica_id: str, seconds: float) -> None:
        """Drain a replica for at most `seconds` and stop it. Its remaining requests continue on other replicas."""
        self._check_not_last(self.find(replica_id))
        async with self._changing:
            replica = self.find(replica_id)
            self._check_not_last(replica)  # others may have been drained or removed meanwhile
            await self._end(replica, seconds)

    async def restart(self, replica_id: str, seconds: float) -> None:
        """Replace the engine of a replica.

        If there is room for both, the new one is ready before the old one is drained, so that a failed start changes
        nothing. Otherwise the old one is drained and stopped first, and a failed start is retried as after a crash. The
        last replica that takes requests is never stopped.
        """
        async with self._changing:
            await self._restart(self.find(replica_id), seconds)

    async def roll(self, seconds: float) -> None:
        """Restart all current replicas one after the other. Stops if another one is unavailable."""
        for replica in self.members:
            async with self._changing:
                if self._members.get(replica.replica_id) is replica:
                    await self._check_others_run(replica)
                    await self._restart(replica, seconds)

    async def _restart(self, replica: Replica, seconds: float) -> None:
        state = (await replica.client.health()).state
        if state == "restarting":  # after a crash: the new engine is on its way
            await replica.client.restart()
            return
        is_gone = state in _GONE
        try:
            client = await self._new_engine(replica.replica_id, None if is_gone else replica.client)
        except ProcessNotStartedError as error:
            if is_gone:
                raise
            logger.info(
                "there is no room to start an engine beside that of replica %s: %s", replica.replica_id, error
            )
            await self._restart_in_place(replica, seconds, error)
            return
        self._replaced.append(replica)
        self._enlist(Replica(replica.replica_id, client))
        try:
            await self._end(replica, seconds)
        finally:
            self._replaced.remove(replica)

    async def _restart_in_place(
        self, replica: Replica, seconds: float, no_room: ProcessNotStartedError
    ) -> None:
        """Drain a replica, stop its engine and start the next one."""
        was_draining = replica.draining
        consequence = (
            f"it is not restarted, as there is no room to start another engine beside it ({no_room})"
        )
        try:
            self._check_not_last(replica, consequence)
            replica.draining = True
            await wait_while(lambda: bool(replica.requests), seconds)
            self._check_not_last(replica, consequence)  # others may have died meanwhile
        except BaseException:
            replica.draining = was_draining
            raise
        replica.is_leaving = True
        self.lose(replica)
        try:
            await replica.client.restart()
        finally:
            replica.is_leaving = replica.draining = False
            await self.check_health(replica)
        self._update_facts()

    async def _check_others_run(self, replica: Replica) -> None:
        others = [other for other in self.members if other is not replica]
        for other in others:
            await self.check_health(other)
        missing = [
            f"replica {other.replica_id} is {other.state}" for other in others if not other.health.healthy
        ]
        if missing:
            raise RequestError(
                f"the rolling restart stops before replica {replica.replica_id}: {', '.join(missing)}",
                param="replica",
                code="replica_missing",
            )

    def _check_not_last(self, replica: Replica, consequence: str = "add another one first") -> None:
        if not any(other is not replica for other in self.available):
            raise RequestError(
                f"replica {replica.replica_id} is the last one that takes requests: {consequence}",
                param="replica",
                code="last_replica",
            )

    async def _end(self, replica: Replica, seconds: float) -> None:
        replica.draining = True
        await wait_while(lambda: bool(replica.requests), seconds)
        replica.is_leaving = True
        self.lose(replica)
        await replica.client.close()
        if self._members.get(replica.replica_id) is replica:
            del self._members[replica.replica_id]
        self._update_facts()

    def _update_facts(self) -> None:
        if self._members:
            self.facts = facts_of_all([replica.client.facts for replica in self.members])

    async def close(self) -> None:
        self._is_closed = True
        self._polling.cancel()
        await asyncio.gather(self._polling, return_exceptions=True)
        for replica in self.members:
            replica.is_leaving = True
        await self._close_all()

    async def _close_all(self) -> None:
        await asyncio.gather(*(replica.client.close() for replica in [*self.members, *self._replaced]))

    # ---- health and stats ----

    async def _poll(self) -> None:
        while True:
            for replica in [*self.members, *self._replaced]:
                try:
                    await self.check_health(replica)
                except Exception:
                    logger.exception("the health check of replica %s failed", replica.replica_id)
            await asyncio.sleep(POLL)

    async def check_health(self, replica: Replica) -> None:
        health = await replica.client.health()
        was_available = replica.available
        has_restarted = health.num_restarts != replica.health.num_restarts  # maybe between two checks
        if health.state in _GONE or has_restarted:
            self.lose(replica)
        replica.health = health
        if health.state not in _GONE:
            replica.is_gone = False
        if health.healthy:
            with contextlib.suppress(EngineError):
                replica.stats = await replica.client.stats()
                if self.are_asleep and not replica.stats.is_sleeping:  # it started later
                    await replica.client.command(Sleep())
        if replica.available and not was_available:
            self._on_change()

    def lose(self, replica: Replica) -> None:
        """Handle the loss of a replica's engine. May be called several times for one loss."""
        if replica.is_gone:
            return
        lost, on_trial = replica.lose_engine()
        if replica.stats is not None:
            self._lost_stats = [summed([*self._lost_stats, work_done(replica.stats)])]
            replica.stats = None
        replica.health = replace(replica.health, healthy=False, state="restarting")
        self._on_loss(replica, lost, on_trial)

    async def stats(self) -> EngineStats:
        all_stats = []
        for replica in [*self.members, *self._replaced]:
            with contextlib.suppress(EngineDeadError):
                all_stats.append(await replica.client.stats())
        if not all_stats:
            raise EngineDeadError(self.trouble())
        return summed([*all_stats, *self._lost_stats])

    def health(self) -> Health:
        """Return the health of all together, which is good as long as one replica is healthy."""
        healths = [replica.health for replica in self.members]
        num_restarts = sum(health.num_restarts for health in healths)
        if self.available:
            since = min(replica.health.seconds_since_step for replica in self.available)
            return Health(True, since, num_restarts=num_restarts)
        states = {health.state for health in healths}
        since = min((health.seconds_since_step for health in healths), default=0.0)
        if not self.any_to_come:
            return Health(False, since, self.trouble(), "dead", num_restarts)
        is_stalled = states == {"stalled"}
        return Health(False, since, self.trouble(), "stalled" if is_stalled else "restarting", num_restarts)

    def trouble(self) -> str:
        """Return why no replica can take requests."""
        states = [f"replica {replica.replica_id} is {replica.state}" for replica in self.members]
        reasons = [health.error for replica in self.members if (health := replica.health).error is not None]
        return f"no engine can take the request: {', '.join(states)}" + (
            f" ({reasons[-1]})" if reasons else ""
        )

    # ---- commands ----

    async def command(self, command: Command) -> None:
        """Send a command to all live replicas. All or none sleep; replicas that start later sleep too."""
        clients = [
            replica.client for replica in self.members if replica.health.healthy and not replica.is_gone
        ]
        if not clients:
            raise EngineDeadError(self.trouble())
        if isinstance(command, WakeUp):
            self.are_asleep = False
        results = await asyncio.gather(
            *(client.command(command) for client in clients), return_exceptions=True
        )
        errors = [error for error in results if isinstance(error, BaseException)]
        if not errors:
            self.are_asleep = self.are_asleep or isinstance(command, Sleep)
            return
        if isinstance(command, Sleep):
            await asyncio.gather(*(client.command(WakeUp()) for client in clients), return_exceptions=True)
        raise errors[0]

    # ---- the timeline ----

    def watch_timeline(self, observer: TimelineObserver) -> Callable[[], None]:
        """Watch all replicas, also those that start later. Return a function that ends it."""
        stops = self._watches[observer] = [self._watch_one(replica, observer) for replica in self.members]

        def stop() -> None:
            self._watches.pop(observer, None)
            for stop_one in stops:
                stop_one()

        return stop

    @staticmethod
    def _watch_one(replica: Replica, observer: TimelineObserver) -> Callable[[], None]:
        return replica.client.watch_timeline(lambda _, data: observer(replica.replica_id, data))

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        """Return the next page of each replica that has more."""
        chunks: list[tuple[str, bytes]] = []
        positions: dict[str, int] = {}
        for replica in [*self.members, *self._replaced]:
            name = replica.replica_id
            if query.replica not in (None, name) or name not in (query.positions or self._members):
                continue
            position = None if query.positions is None else {"0": query.positions[name]}
            with contextlib.suppress(EngineDeadError):
                page = await replica.client.read_timeline(TimelineQuery(query.since, position))
                chunks += [(name, data) for _, data in page.chunks]
                if page.positions:
                    positions[name] = page.positions["0"]
        return TimelinePage(chunks, positions)
