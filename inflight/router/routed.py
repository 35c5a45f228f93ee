"""One request on its way over replicas: where it is, what it has got so far, and what is told of it at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from inflight.engine import RequestState
from inflight.errors import RequestError
from inflight.events import Delta, RequestRecord
from inflight.request import Request
from inflight.router.replica import Replica
from inflight.router.routing import KnownTokens
from inflight.router.suspicion import Suspicion


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
