"""The replicas of a router: started, watched, drained, removed, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from inflight.engine import Command, EngineStats, Health, ModelFacts, ReplicaClient, StepObserver
from inflight.errors import ConfigError, EngineDeadError, EngineError, RequestError
from inflight.events import StepRecord
from inflight.router.replica import Replica
from inflight.router.totals import facts_of_all, left_behind, same_model, summed

logger = logging.getLogger(__name__)

StartReplica = Callable[[str], Awaitable[ReplicaClient]]  # takes the id that it gets

POLL = 0.2  # seconds between two looks at how replicas do
DRAIN_POLL = 0.02
_GONE = ("restarting", "dead", "closed")


class Replicas:
    """Who is there. `on_loss` is told of a replica whose engine is gone, `on_news` that those who wait may look
    again."""

    def __init__(
        self, start: StartReplica, on_loss: Callable[[Replica], None], on_news: Callable[[], None]
    ) -> None:
        self.facts: ModelFacts  # of all together, once there is one
        self._start = start
        self._on_loss = on_loss
        self._on_news = on_news
        self._members: dict[str, Replica] = {}
        self._starting: list[str] = []  # ids of those on their way
        self._num_ids = 0
        self._observers: dict[StepObserver, list[Callable[[], None]]] = {}
        self._left_behind: list[EngineStats] = []  # by engines that are gone: one, their sum
        self._polling: asyncio.Task[None]
        self._changing = asyncio.Lock()  # one change at a time
        self.are_asleep = False  # all of them were told to
        self._is_open = self._is_closed = False

    # ---- who is there ----

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
        """Whether one that cannot be had now may be later."""
        return bool(self._starting) or any(replica.health.state != "dead" for replica in self.members)

    def find(self, replica_id: str) -> Replica:
        found = self._members.get(replica_id)
        if found is None:
            raise RequestError(
                f"there is no replica {replica_id!r:.100}: there are {', '.join(self._members)}",
                param="replica",
                code="replica_not_found",
            )
        return found

    # ---- coming and going ----

    async def open(self, count: int) -> None:
        """Start so many at once; all of them, or none."""
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
        """One more."""
        async with self._changing:
            return await self._join()

    async def _join(self, replica_id: str | None = None) -> str:
        if replica_id is None:
            replica_id = str(self._num_ids)
            self._num_ids += 1
        self._starting.append(replica_id)
        try:
            client = await self._start(replica_id)
        finally:
            self._starting.remove(replica_id)
        if self._is_closed:  # meanwhile
            await client.close()
            raise EngineDeadError("the engines are closing")
        if not self._fits(client.facts):
            await client.close()
            raise ConfigError(f"replica {replica_id} has another model or other limits than those that run")
        replica = self._members[replica_id] = Replica(replica_id, client)
        self._members = {name: self._members[name] for name in sorted(self._members, key=int)}
        for observer, stops in self._observers.items():
            stops.append(_watch(replica, observer))
        self._count_room()
        self._on_news()
        return replica_id

    def _fits(self, facts: ModelFacts) -> bool:
        """Whether a newcomer can run whatever the others can. Those who come together agree on the shortest context."""
        others = [replica.client.facts for replica in self.members]
        if not all(same_model(facts, other) for other in others):
            return False
        return not self._is_open or facts.max_model_len >= self.facts.max_model_len

    def drain(self, replica_id: str) -> None:
        """Give it no new work."""
        self._check_not_last(replica_id)
        self.find(replica_id).draining = True

    async def remove(self, replica_id: str, seconds: float) -> None:
        """Drain it for so long at most, and end it: what still runs then goes on elsewhere."""
        self._check_not_last(replica_id)
        async with self._changing:
            self._check_not_last(replica_id)  # others may have been drained or removed meanwhile
            await self._end(self.find(replica_id), seconds)

    async def restart(self, replica_id: str, seconds: float) -> None:
        """Another engine in its place, as soon as it is drained."""
        async with self._changing:
            await self._end(self.find(replica_id), seconds)
            await self._join(replica_id)

    async def roll(self, seconds: float) -> None:
        """Restart all that there are now, one after the other."""
        for replica in self.members:
            if self._members.get(replica.replica_id) is replica:
                await self.restart(replica.replica_id, seconds)

    def _check_not_last(self, replica_id: str) -> None:
        self.find(replica_id)
        others = [replica for replica in self.members if replica.replica_id != replica_id]
        if all(replica.draining for replica in others):
            raise RequestError(
                f"replica {replica_id} is the last one that takes requests: add another one before",
                param="replica",
                code="last_replica",
            )

    async def _end(self, replica: Replica, seconds: float) -> None:
        replica.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while replica.requests:
                    await asyncio.sleep(DRAIN_POLL)
        replica.is_leaving = True
        self.lose(replica)
        await replica.client.close()
        self._members.pop(replica.replica_id, None)
        self._count_room()

    def _count_room(self) -> None:
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
        await asyncio.gather(*(replica.client.close() for replica in self.members))

    # ---- how they do ----

    async def _poll(self) -> None:
        while True:
            for replica in self.members:
                try:
                    await self.look_at(replica)
                except Exception:
                    logger.exception("replica %s could not be looked at", replica.replica_id)
            await asyncio.sleep(POLL)

    async def look_at(self, replica: Replica) -> None:
        health = await replica.client.health()
        was_available, missed = replica.available, health.num_restarts != replica.health.num_restarts
        if health.state in _GONE or (missed and not replica.is_gone):
            self.lose(replica)
        replica.health = health
        if health.state not in _GONE:
            replica.is_gone = False
        if health.healthy:
            with contextlib.suppress(EngineError):
                replica.stats = await replica.client.stats()
                if self.are_asleep and not replica.stats.is_sleeping:  # it has come since
                    await replica.client.command("sleep")
        if replica.available and not was_available:
            self._on_news()

    def lose(self, replica: Replica) -> None:
        """The replica's engine is gone. Called once or more often for one loss."""
        if replica.is_gone:
            return
        if replica.stats is not None:
            self._left_behind = [summed([*self._left_behind, left_behind(replica.stats)])]
            replica.stats = None
        replica.health = replace(replica.health, healthy=False, state="restarting")
        self._on_loss(replica)

    async def stats(self) -> EngineStats:
        found = []
        for replica in self.members:
            with contextlib.suppress(EngineDeadError):
                found.append(await replica.client.stats())
        if not found:
            raise EngineDeadError(self.trouble())
        return summed([*found, *self._left_behind])

    def health(self) -> Health:
        """Of all together: it works as long as one does."""
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
        """Why no replica can be given work."""
        told = [f"replica {replica.replica_id} is {replica.state}" for replica in self.members]
        reasons = [health.error for replica in self.members if (health := replica.health).error is not None]
        return f"no engine can take the request: {', '.join(told)}" + (f" ({reasons[-1]})" if reasons else "")

    # ---- what they are told ----

    async def command(self, command: Command) -> None:
        """To all that live. They sleep all or none; and so does, until they are woken, who comes later."""
        told = [replica.client for replica in self.members if replica.health.healthy and not replica.is_gone]
        if not told:
            raise EngineDeadError(self.trouble())
        if command == "wake_up":
            self.are_asleep = False
        results = await asyncio.gather(*(client.command(command) for client in told), return_exceptions=True)
        errors = [error for error in results if isinstance(error, BaseException)]
        if not errors:
            self.are_asleep = self.are_asleep or command == "sleep"
            return
        if command == "sleep":
            await asyncio.gather(*(client.command("wake_up") for client in told), return_exceptions=True)
        raise errors[0]

    # ---- steps ----

    def watch(self, observer: StepObserver) -> Callable[[], None]:
        stops = self._observers[observer] = [_watch(replica, observer) for replica in self.members]

        def stop() -> None:
            self._observers.pop(observer, None)
            for stop_one in stops:
                stop_one()

        return stop


def _watch(replica: Replica, observer: StepObserver) -> Callable[[], None]:
    def named(record: StepRecord) -> None:
        observer(replace(record, engine_id=replica.replica_id))

    return replica.client.watch(named)
