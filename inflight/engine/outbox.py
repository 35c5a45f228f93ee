"""What an engine process has to send, until the front takes it in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from inflight.engine.core import EngineStats
from inflight.engine.delta_queue import merge
from inflight.engine.remote.wire import Reply, StepOutputs
from inflight.events import Delta, StepRecord
from inflight.kv.cache_changes import CacheChanges
from inflight.processes.channel import RemoteError

WINDOW = 64  # StepOutputs on their way at any time; more wait here, merged
STATS_EVERY = 0.05  # seconds, while steps follow each other
MAX_STEPS = 1024  # records of steps kept for a front that does not take them


class Outbox:
    """Sends at once while the front keeps up. When it does not, deltas of one request become one, so a front that
    is stuck costs memory bounded by the outputs themselves, and the engine never waits for it."""

    def __init__(
        self,
        send: Callable[[StepOutputs], None],
        stats: Callable[[], EngineStats],
        clock: Callable[[], float],
    ) -> None:
        self._send = send
        self._stats = stats
        self._clock = clock
        self._handles: dict[str, int] = {}  # of the requests in the engine
        self._ids: dict[int, str] = {}  # the other way round
        self._deltas: dict[int, Delta] = {}  # by handle
        self._replies: list[Reply] = []
        self._lost: list[tuple[int, RemoteError]] = []
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self.cache_changes: CacheChanges | None = None  # where someone wants to know of them
        self._stats_at = -STATS_EVERY
        self._num_sent = self._num_taken = 0

    def open(self, request_id: str, handle: int) -> None:
        """A request is in the engine, until its last delta is put here."""
        self._handles[request_id] = handle
        self._ids[handle] = request_id

    def id_of(self, handle: int) -> str | None:
        return self._ids.get(handle)

    def reply(self, reply: Reply) -> None:
        self._replies.append(reply)

    @property
    def has_replies(self) -> bool:
        return bool(self._replies)

    def observe(self, record: StepRecord) -> None:
        self._steps.append(record)

    def put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            handle = self._handles[delta.request_id]
            if delta.finish_reason is not None:
                del self._handles[delta.request_id], self._ids[handle]
            earlier = self._deltas.get(handle)
            self._deltas[handle] = delta if earlier is None else merge(earlier, delta)

    def lose(self, handle: int, problem: RemoteError) -> None:
        """A request ends with this, after what is put here."""
        del self._handles[self._ids.pop(handle)]
        self._lost.append((handle, problem))

    def taken(self, num_taken: int) -> None:
        """The front has taken in so many StepOutputs."""
        self._num_taken = max(self._num_taken, min(num_taken, self._num_sent))

    def flush(self, idle: bool, stepped: bool = False) -> None:
        """Send what is there, if the front keeps up. Steps that brought nothing have changed the statistics: those
        leave alone then, at a bounded rate, since a long prompt takes many such steps."""
        wanted = self._deltas or self._replies or self._lost or self._steps or self.cache_changes
        if not wanted and not (stepped and (idle or self._clock() - self._stats_at >= STATS_EVERY)):
            return
        if self._num_sent - self._num_taken >= WINDOW:
            return
        handles, token_ids, others = [], [], []
        for handle, delta in self._deltas.items():
            plain = delta.finish_reason is None and delta.logprobs is None and delta.prompt_logprobs is None
            if plain and len(delta.token_ids) == 1:
                handles.append(handle)
                token_ids.append(delta.token_ids[0])
            else:
                others.append((handle, delta))
        now, stats = self._clock(), None
        if idle or self._replies or now - self._stats_at >= STATS_EVERY:
            stats, self._stats_at = self._stats(), now
        cache = None if self.cache_changes is None else self.cache_changes.take()
        outputs = StepOutputs(
            handles, token_ids, others, self._replies, list(self._steps), stats, cache, self._lost
        )
        self._send(outputs)
        self._num_sent += 1
        self._deltas, self._replies, self._lost = {}, [], []
        self._steps.clear()
