"""One request on its way over replicas: its stream, its failovers, and whether it makes engines die.

An engine that dies does not say why, and most requests on it are innocent. But a request that kills engines must not
move from one to the next until none is left. So every request that was on an engine when it died is a suspect until
another engine produces a token for it: a request that kills an engine does so again when it is computed.

Suspicion is shared: each of n suspects gets 1/n. Requests that the engine had accepted but given no token yet are the
likely cause: if they are few, they are tried one at a time on each replica, so that the next death identifies the
cause. The others, which ran on that engine for a while, get an eighth at most and continue all at once. A request is
ended once it was the only suspect after having been one of a few.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field, replace
from typing import Protocol

from inflight.engine.client import RequestState
from inflight.errors import RequestError
from inflight.events import Delta, RequestRecord
from inflight.request import Request
from inflight.router.replica import KnownTokens, Replica

FEW_SUSPECTS = 8  # fewer than this many likely causes are tried one at a time
MAX_DEATHS = 32  # engines that a request may outlive, whatever the cause


@dataclass(slots=True)
class Suspicion:
    """How likely it is that a request kills engines."""

    share: float = 0.0  # 1: responsible for one death
    num_deaths: int = 0  # engines that died while it was on them

    @property
    def is_tried_alone(self) -> bool:
        return self.share > 1 / FEW_SUSPECTS

    @property
    def is_confirmed(self) -> bool:
        return self.share >= 1 + 1 / FEW_SUSPECTS or self.num_deaths >= MAX_DEATHS

    def clear(self) -> None:
        """Clear the suspicion after a token."""
        self.share = 0.0


class Suspect(Protocol):
    @property
    def suspicion(self) -> Suspicion: ...

    @property
    def is_accepted(self) -> bool:
        """Whether the engine has accepted it."""

    @property
    def has_token_here(self) -> bool:
        """Whether that engine has produced a token for it."""


def share_blame(lost: Collection[Suspect], on_trial: Suspect | None = None) -> None:
    """Share the suspicion for a dead engine among its requests. One that was on trial there is the likely cause."""
    accepted = [request for request in lost if request.is_accepted]
    likely = [request for request in accepted if not request.has_token_here]
    if on_trial in likely:
        likely = [request for request in likely if request is on_trial]
    for request in likely or accepted:
        request.suspicion.share += 1 / len(likely) if likely else min(1 / len(accepted), 1 / FEW_SUSPECTS)
    for request in accepted:
        request.suspicion.num_deaths += 1


@dataclass(eq=False, slots=True)
class RoutedRequest:
    """A request and where it runs. The first three fields suffice to continue it elsewhere."""

    request: Request  # as it was added
    arrived_at: float
    output_ids: list[int] = field(default_factory=list)
    replica: Replica | None = None  # None: waiting for one
    stream: AsyncGenerator[Delta] | None = None  # of its current or last engine
    abort_reason: str | None = None  # set once it was aborted
    suspicion: Suspicion = field(default_factory=Suspicion)
    num_failovers: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    is_accepted: bool = False  # by its replica
    has_token_here: bool = False

    # Its share of the replica's load.
    _hashes: tuple[bytes, ...] = ()
    _num_missing: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    # ---- replicas ----

    def enter(self, replica: Replica, tokens: KnownTokens) -> None:
        """Add the request to a replica's books before it is sent there."""
        self.replica = replica
        self.is_accepted = self.has_token_here = False
        self._hashes, self._num_missing = tuple(tokens.hashes), tokens.num_missing(replica)
        replica.requests.add(self)
        replica.blocks.expect(self._hashes)
        replica.num_queued_tokens += self._num_missing
        replica.recent_tokens += self._num_missing
        if self.suspicion.is_tried_alone:
            replica.on_trial = self

    def leave(self) -> None:
        """Remove the request from its replica: it ended or was rejected."""
        replica, self.replica = self.replica, None
        if replica is None:
            return
        replica.requests.discard(self)
        if not self.has_token_here:
            self._started(replica)

    def _started(self, replica: Replica) -> None:
        """Remove its prompt from the replica's queue."""
        replica.blocks.expect_no_more(self._hashes)
        self._hashes = ()
        replica.num_queued_tokens -= self._num_missing
        if replica.on_trial is self:
            replica.on_trial = None

    def take(self, delta: Delta, now: float) -> None:
        """Record a delta that the reader gets."""
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
        """Note that its engine is lost."""
        self.replica = None
        self.num_failovers += 1

    # ---- continuing, and the final record ----

    def rest(self) -> Request | Delta:
        """Return a request for the remaining tokens, or the last delta if there are none."""
        if self.abort_reason is not None:
            return Delta(self.request_id, [], finish_reason=self.abort_reason)
        try:
            return self.request.resumed(self.output_ids)
        except RequestError:  # it has all its tokens, only the final delta was lost
            last_id = self.output_ids[-1]
            if last_id in self.request.stop_ids and len(self.output_ids) > self.request.params.min_tokens:
                return Delta(self.request_id, [], finish_reason="stop", stop_token_id=last_id)
            return Delta(self.request_id, [], finish_reason="length")

    def complete(self, delta: Delta, now: float) -> None:
        """Put the record of the whole request into its last delta, even if no engine is left to provide one."""
        record = delta.record
        if record is None:
            record = self._own_record(now)
            record.finished_at, record.finish_reason = now, delta.finish_reason
            record.stop_token_id = delta.stop_token_id
        delta.record = self._merged(record)

    def _own_record(self, now: float) -> RequestRecord:
        """Return what is known without an engine."""
        request = self.request
        record = RequestRecord(
            self.request_id, request.tenant, request.priority, request.num_prompt_tokens, arrived_at=now
        )
        record.num_output_tokens = len(self.output_ids)
        return record

    def _merged(self, engine_record: RequestRecord) -> RequestRecord:
        """Return an engine's record, completed with what happened on earlier engines."""
        record = replace(engine_record, engine_id="" if self.replica is None else self.replica.replica_id)
        if not self.num_failovers:
            return record
        record.num_failovers = self.num_failovers
        record.breakdown = replace(record.breakdown, lost=record.arrived_at - self.arrived_at)
        record.arrived_at = self.arrived_at
        if self.first_token_at is not None and not self._began_here(record):
            # The admission by the first engine is unknown; it was before the first token.
            record.admitted_at = record.first_token_at = self.first_token_at
        record.last_token_at = record.last_token_at or self.last_token_at
        return record

    def _began_here(self, record: RequestRecord) -> bool:
        return record.first_token_at is not None and record.first_token_at <= (self.first_token_at or 0.0)

    async def describe(self, now: float) -> RequestState | None:
        """Return its state on its engine, or that it waits for one."""
        if self.replica is None:
            return RequestState(self._merged(self._own_record(now)), "waiting")
        state = await self.replica.client.describe(self.request_id)
        return None if state is None else replace(state, record=self._merged(state.record))
