"""Which request made engines die, where one did.

An engine that dies does not say why, and most of those who were on it are innocent: someone pulled a plug. But a
request that kills engines must not go from one to the next until none is left. So whoever was on an engine when it died
is under suspicion, until another engine gives it a token: what kills does so where it is computed, and does so again.

Suspicion is shared: of n suspects, each has 1/n of it. Those that the engine had taken and given no token yet are the
likely cause: where they are few, they are tried one at a time on each replica, so that the next death names its cause.
The others, who got on well with that engine for a while, have an eighth at most, and go on all at once. A request ends
when it was alone under suspicion, and before that one of a few.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from inflight.engine import RequestState
from inflight.errors import EngineDeadError, RequestError
from inflight.events import Delta, RequestRecord
from inflight.request import Request
from inflight.router.replica import Replica
from inflight.router.routing import KnownTokens

FEW = 8
MAX_DEATHS = 32  # engines that a request may outlive, whatever they died of


@dataclass(slots=True)
class Suspicion:
    """Of one request."""

    share: float = 0.0  # 1 is all of one death
    num_deaths: int = 0  # of engines that it was on

    @property
    def is_tried_alone(self) -> bool:
        return self.share > 1 / FEW

    @property
    def is_confirmed(self) -> bool:
        return self.share >= 1 + 1 / FEW or self.num_deaths >= MAX_DEATHS

    def clear(self) -> None:
        """It was given a token."""
        self.share = 0.0


class Suspect(Protocol):
    @property
    def suspicion(self) -> Suspicion: ...

    @property
    def is_taken(self) -> bool:
        """Whether the engine that it is on has said that it has it."""

    @property
    def has_token_here(self) -> bool:
        """Whether that engine has given it a token."""


def share_blame(lost: Collection[Suspect], on_trial: Suspect | None = None) -> None:
    """An engine died, and these were on it. One that was on trial there is the likely cause, whoever was beside it."""
    taken = [request for request in lost if request.is_taken]
    likely = [request for request in taken if not request.has_token_here]
    if on_trial in likely:
        likely = [request for request in likely if request is on_trial]
    for request in likely or taken:
        request.suspicion.share += 1 / len(likely) if likely else min(1 / len(taken), 1 / FEW)
    for request in taken:
        request.suspicion.num_deaths += 1


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """All that is needed to go on elsewhere is in the first three."""

    request: Request  # as it came
    arrived_at: float
    output_ids: list[int] = field(default_factory=list)
    replica: Replica | None = None  # None: it waits for one
    stream: AsyncGenerator[Delta] | None = None  # of the engine that it is on, or was on last
    abort_reason: str | None = None  # it is to end, for this reason
    suspicion: Suspicion = field(default_factory=Suspicion)
    num_failovers: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    is_taken: bool = False  # by the replica that it was sent to
    has_token_here: bool = False

    # What it counts for where it is.
    _names: tuple[bytes, ...] = ()
    _num_missing: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    # ---- coming and going ----

    def enter(self, replica: Replica, tokens: KnownTokens) -> None:
        """It is sent to a replica."""
        self.replica = replica
        self.is_taken = self.has_token_here = False
        self._names, self._num_missing = tuple(tokens.names), tokens.num_missing(replica)
        replica.requests.add(self)
        replica.blocks.expect(self._names)
        replica.num_queued_tokens += self._num_missing
        replica.recent_tokens += self._num_missing
        if self.suspicion.is_tried_alone:
            replica.on_trial = self

    def leave(self) -> None:
        """It is there no more: it has ended, or was refused."""
        replica, self.replica = self.replica, None
        if replica is None:
            return
        replica.requests.discard(self)
        if not self.has_token_here:
            self._started(replica)

    def _started(self, replica: Replica) -> None:
        """Nothing is queued for it any more."""
        replica.blocks.expect_no_more(self._names)
        self._names = ()
        replica.num_queued_tokens -= self._num_missing
        if replica.on_trial is self:
            replica.on_trial = None

    def take(self, delta: Delta, now: float) -> None:
        """Its reader gets this."""
        if not delta.token_ids:
            return
        self.output_ids += delta.token_ids
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
        replica = self.replica
        if replica is not None:
            replica.recent_tokens += len(delta.token_ids)
            if not self.has_token_here:
                self.has_token_here = True
                self._started(replica)
                self.suspicion.clear()

    def lost(self) -> None:
        """Its engine is gone; the replica has forgotten all of it."""
        self.replica = None
        self.num_failovers += 1

    # ---- what is left of it, and what is told ----

    def rest(self) -> Request | Delta:
        """A request for what is left, or its last delta where nothing is."""
        if self.abort_reason is not None:
            return Delta(self.request_id, [], finish_reason=self.abort_reason)
        try:
            return self.request.resumed(self.output_ids)
        except RequestError:  # it had all its tokens, and only its end was not told
            last = self.output_ids[-1]
            if last in self.request.stop_ids and len(self.output_ids) > self.request.params.min_tokens:
                return Delta(self.request_id, [], finish_reason="stop", stop_token_id=last)
            return Delta(self.request_id, [], finish_reason="length")

    def complete(self, delta: Delta, now: float) -> None:
        """A last delta with the record of its whole life, be it that no engine is left to tell of it."""
        record = delta.record
        if record is None:
            record = self._unheard(now)
            record.finished_at, record.finish_reason = now, delta.finish_reason
            record.stop_token_id = delta.stop_token_id
        delta.record = self._told(record)

    def _unheard(self, now: float) -> RequestRecord:
        """What is known of it without an engine."""
        request = self.request
        record = RequestRecord(
            self.request_id, request.tenant, request.priority, request.num_prompt_tokens, arrived_at=now
        )
        record.num_output_tokens = len(self.output_ids)
        return record

    def _told(self, known: RequestRecord) -> RequestRecord:
        """What an engine knows of it, with what was before that engine had it."""
        record = replace(known, engine_id="" if self.replica is None else self.replica.replica_id)
        if not self.num_failovers:
            return record
        record.num_failovers = self.num_failovers
        record.breakdown = replace(record.breakdown, lost=record.arrived_at - self.arrived_at)
        record.arrived_at = self.arrived_at
        if self.first_token_at is not None and not self._began_here(record):
            # When the first engine admitted it is not known: before its first token, at the latest then.
            record.admitted_at = record.first_token_at = self.first_token_at
        record.last_token_at = record.last_token_at or self.last_token_at
        return record

    def _began_here(self, record: RequestRecord) -> bool:
        return record.first_token_at is not None and record.first_token_at <= (self.first_token_at or 0.0)

    async def describe(self, now: float) -> RequestState | None:
        """What the engine that it is on says of it, or that it waits for one."""
        if self.replica is None:
            return RequestState(self._told(self._unheard(now)), "waiting")
        state = await self.replica.client.describe(self.request_id)
        return None if state is None else replace(state, record=self._told(state.record))


class StreamOwner(Protocol):
    """The router."""

    async def go_on(self, routed: RoutedRequest, error: EngineDeadError) -> Delta | None:
        """None once another engine has the request; else its last delta."""

    def took(self, routed: RoutedRequest, delta: Delta) -> None: ...

    def forget(self, routed: RoutedRequest) -> None: ...


class RoutedStream(AsyncGenerator[Delta]):
    """A class, since a generator that was never begun does not notice its end."""

    def __init__(self, routed: RoutedRequest, owner: StreamOwner) -> None:
        self._routed = routed
        self._owner = owner
        self._open = True

    async def asend(self, value: None) -> Delta:  # noqa: ARG002
        if not self._open:
            raise StopAsyncIteration
        try:
            delta = await self._next()
        except BaseException:
            self._end()
            raise
        self._owner.took(self._routed, delta)
        if delta.finish_reason is not None:
            self._end()
        return delta

    async def _next(self) -> Delta:
        while True:
            stream = self._routed.stream
            assert stream is not None
            try:
                return await stream.asend(None)
            except EngineDeadError as error:
                last = await self._owner.go_on(self._routed, error)
                if last is not None:
                    return last

    async def athrow(self, *error: Any) -> Delta:
        self._end()
        return await super().athrow(*error)

    async def aclose(self) -> None:
        stream = self._routed.stream
        self._end()
        if stream is not None:
            await stream.aclose()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._owner.forget(self._routed)
