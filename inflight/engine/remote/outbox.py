"""The outgoing messages of an engine process, held back while the client does not keep up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from inflight.engine.delta_queue import merge
from inflight.engine.remote.wire import Reply, StepOutputs
from inflight.engine.stats import EngineStats
from inflight.events import Delta, StepRecord
from inflight.kv.prefix_cache import CacheChanges
from inflight.processes.channel import RemoteError

WINDOW = 64  # unacknowledged StepOutputs; further ones are merged here
STATS_EVERY = 0.05  # seconds between statistics while the engine is busy
MAX_STEPS = 1024  # step records kept for a client that does not read


class Outbox:
    """Sends at once while the client keeps up, and otherwise merges the deltas of each request.

    A client that is stuck therefore costs memory bounded by the outputs, and the engine never waits for it.
    """

    def __init__(
        self,
        send: Callable[[StepOutputs], None],
        stats: Callable[[], EngineStats],
        clock: Callable[[], float],
    ) -> None:
        self._send = send
        self._stats = stats
        self._clock = clock
        self._handles: dict[str, int] = {}  # by request id, for requests in the engine
        self._ids: dict[int, str] = {}  # by handle
        self._deltas: dict[int, Delta] = {}  # by handle
        self._replies: list[Reply] = []
        self._lost: list[tuple[int, RemoteError]] = []
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self.cache_changes: CacheChanges | None = None  # None unless they are observed
        self._stats_at = -STATS_EVERY
        self._num_sent = self._num_taken = 0

    def open(self, request_id: str, handle: int) -> None:
        """Register a request that was added, until its last delta is put here."""
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
        """End a request with this error, after the deltas that were put here."""
        del self._handles[self._ids.pop(handle)]
        self._lost.append((handle, problem))

    def taken(self, num_taken: int) -> None:
        """Note that the client has read this many StepOutputs."""
        self._num_taken = max(self._num_taken, min(num_taken, self._num_sent))

    def flush(self, idle: bool, stepped: bool = False) -> None:
        """Send pending output if the client keeps up.

        A step without output still changes the statistics. These are then sent alone, at a bounded rate, because a long
        prompt takes many such steps.
        """
        has_output = self._deltas or self._replies or self._lost or self._steps or self.cache_changes
        if not has_output and not (stepped and (idle or self._clock() - self._stats_at >= STATS_EVERY)):
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
