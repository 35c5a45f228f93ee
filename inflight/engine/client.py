"""The interface between servers and engines: a client of an engine in this process or another.

`DeltaQueue`, `DeltaStream` and `History` are the parts that clients have in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from inflight.engine.stats import EngineStats
from inflight.errors import RequestError, shown
from inflight.events import CacheUpdate, Delta, RequestRecord
from inflight.kv.layout import KVLayout
from inflight.request import Request
from inflight.scoring import PoolingFacts
from inflight.timeline.chunks import TimelinePage, TimelineQuery

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine makes progress: it is idle, or its last step ended recently."""

    healthy: bool
    seconds_since_step: float
    error: str | None = None
    state: Literal["running", "stalled", "restarting", "dead", "closing", "closed"] = "running"
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about an engine's model that its clients need to make requests."""

    model: str
    vocab_size: int  # the width of the logits
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_params: dict[str, Any]  # fields of SamplingParams from the checkpoint's generation_config.json
    tokenizer_folder: str | None
    device: str
    dtype: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    generates: bool = True  # False: the model only has a pooling head
    pooling: PoolingFacts | None = None  # facts about the pooling head, if there is one
    windows: tuple[int | None, ...] = (None,)  # of each block table, as in `KVLayout`
    snapshot_blocks: int = 0
    fingerprint: str = ""  # hash of the checkpoint's files: engines with equal ones have the same model

    @property
    def num_full_requests(self) -> int:
        """The number of full-length requests that fit into KV memory at once."""
        chunk = self.max_num_batched_tokens
        num_fitting = self.kv_layout.max_requests(self.num_blocks, self.max_model_len, chunk)
        return min(num_fitting, self.max_num_seqs)

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout(self.block_size, self.windows, self.snapshot_blocks)


@dataclass(frozen=True, slots=True)
class RequestState:
    """The state of one request, and what it waited for."""

    record: RequestRecord
    status: Literal["waiting", "running", "finished"]
    num_computed: int = 0  # tokens that have KV now
    num_blocks: int = 0  # blocks that it holds
    num_ahead: int = 0  # waiting requests that arrived before it, while it waits
    # The latest requests that it waited for: those that ended between its arrival and its admission and, while it
    # waits, those that are running.
    waited_for: tuple[str, ...] = ()
    num_waited_for: int = 0
    waiting_reason: str | None = None  # one of QUEUE_CAUSES, while it waits


@dataclass(frozen=True, slots=True)
class MemoryState:
    """The state of every KV block, for those who look at it."""

    at: float
    block_size: int
    refs: bytes  # int32: the number of holders of each block
    empty: bytes  # int32: the blocks without content, in no order
    evict_next: list[int]  # in order
    num_queries: int  # tokens looked up in the prefix cache
    num_hits: int
    num_preemptions: int
    groups: dict[str, int]  # as in `KVUsage`


# ---- commands: the operations of an engine besides requests. Their fields are what they need. ----


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget all prefixes. Running requests keep their blocks."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free the KV memory and move the weights to host memory."""


@dataclass(frozen=True, slots=True)
class WakeUp:
    """Undo `Sleep`."""


Command = ResetPrefixCache | Sleep | WakeUp

# ---- the interface ----

CacheObserver = Callable[[CacheUpdate], None]
TimelineObserver = Callable[[str, bytes], None]  # replica, encoded chunk


def check_only_replica(replica: str) -> None:
    """Raise RequestError unless this names the engine of a client that has only one."""
    if replica != "0":
        raise RequestError(
            f"there is no replica {shown(replica)}: there is 0", param="replica", code="replica_not_found"
        )


class EngineClient(Protocol):
    """Takes validated requests and streams deltas, the last of each request with a finish reason.

    An error delta ends one request. When the engine itself ends, every open stream yields the deltas that had arrived
    and then raises EngineDeadError, as does every later call.
    """

    @property
    def facts(self) -> ModelFacts:
        """The facts about the engine's model."""

    async def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError if the queue is full."""

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        """Yield the deltas of a request that was added, merged if the reader is slower than the engine.

        Closing the iterator early aborts the request.
        """

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        """End a request with `reason` as its finish reason. Return the number of KV blocks freed."""

    async def describe(self, request_id: str) -> RequestState | None:
        """Return the state of a request that is in the engine or ended recently."""

    async def command(self, command: Command) -> None:
        """Run a command to completion. Raises EngineError if that is impossible."""

    def watch_timeline(self, observer: TimelineObserver) -> Callable[[], None]:
        """Call `observer` in the event loop with what happens from now on, at most 30 times a second.

        Return a function that removes it. While no one watches, nothing is sent.
        """

    async def read_timeline(self, query: TimelineQuery) -> TimelinePage:
        """Return what was recorded, one page at a time."""

    async def read_memory(self, replica: str) -> MemoryState: ...

    async def stats(self) -> EngineStats: ...

    async def health(self) -> Health: ...

    async def close(self, drain: float = 0.0) -> None:
        """Stop. New requests are rejected at once; running ones have up to `drain` seconds to finish."""


class ReplicaClient(EngineClient, Protocol):
    """A client of one engine that a router can use as a replica."""

    def watch_cache(self, observer: CacheObserver) -> None:
        """Call `observer` in the event loop with changes of the engine's prefix cache.

        The first update, also after a restart of the engine, is the whole content of the cache.
        """

    async def restart(self) -> None:
        """Replace the engine by a new one and return when it is ready. Raises EngineError if it cannot be started."""


# ---- streams ----


def id_in_use(request_id: str) -> RequestError:
    return RequestError(
        f"request id {request_id!r} is already in use", param="request_id", code="request_id_in_use"
    )


def not_added(request_id: str) -> RequestError:
    return RequestError(
        f"there is no request {request_id!r} to stream: add it first",
        param="request_id",
        code="request_not_found",
    )


def merge(earlier: Delta, later: Delta) -> Delta:
    """Return two consecutive deltas of one request as one."""
    # The earlier lists are extended in place, so a reader that never comes costs no copy per token.
    earlier.token_ids += later.token_ids
    later.token_ids = earlier.token_ids
    if earlier.logprobs is not None:
        earlier.logprobs += later.logprobs or []
        later.logprobs = earlier.logprobs
    later.vector = later.vector or earlier.vector
    later.prompt_logprobs = later.prompt_logprobs or earlier.prompt_logprobs
    return later


class DeltaQueue:
    """Holds at most one delta for a single reader.

    Deltas that a slow reader has not taken are merged, so memory is bounded by the output and the engine never waits.
    """

    def __init__(self) -> None:
        self._pending: Delta | None = None
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # resolved when there is something to take

    def put(self, delta: Delta) -> None:
        if self._ended:  # a complete output stays complete even if the engine fails
            return
        self._ended = delta.finish_reason is not None
        self._pending = delta if self._pending is None else merge(self._pending, delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the queue: the reader gets the pending delta, then the error."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> Delta:
        if self._pending is None and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        delta, self._pending = self._pending, None
        if delta is None:
            assert self._error is not None
            raise self._error
        return delta


class DeltaStream(AsyncGenerator[Delta]):
    """The deltas of one request. It is a class because a generator that was never started runs no clean-up."""

    def __init__(self, take: Callable[[], Awaitable[Delta]], leave: Callable[[bool], None]) -> None:
        """`take` returns the next delta. `leave` is called once, with whether the request is still running."""
        self._take = take
        self._leave = leave
        self._open = True

    async def asend(self, value: None) -> Delta:  # noqa: ARG002
        if not self._open:
            raise StopAsyncIteration
        try:
            delta = await self._take()
        except BaseException:
            self._end(running=True)
            raise
        if delta.finish_reason is not None:
            self._end(running=False)
        return delta

    async def athrow(self, *error: Any) -> Delta:
        self._end(running=True)
        return await super().athrow(*error)

    async def aclose(self) -> None:
        self._end(running=True)

    def __del__(self) -> None:
        self._end(running=True)

    def _end(self, running: bool) -> None:
        if self._open:
            self._open = False
            self._leave(running)


# ---- draining ----

DRAIN_POLL = 0.02  # seconds


async def wait_while(is_busy: Callable[[], bool], seconds: float) -> None:
    """Wait while `is_busy` returns True, for at most `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while is_busy():
                await asyncio.sleep(DRAIN_POLL)


# ---- requests that have ended ----

MAX_HISTORY = 4096  # requests whose records are kept after their end
MAX_NAMED = 32  # request ids listed in one RequestState


class History:
    """The records of the requests that ended last."""

    def __init__(self, max_records: int = MAX_HISTORY) -> None:
        self._max_records = max_records
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        if len(self._records) > self._max_records:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> RequestState | None:
        record = self._records.get(request_id)
        return None if record is None else self.complete(RequestState(record, "finished"))

    def complete(self, state: RequestState) -> RequestState:
        """Return the state with the requests added that ended while this one waited."""
        mine = state.record
        until = next((time for time in (mine.admitted_at, mine.finished_at) if time is not None), None)
        ended = [
            other.request_id
            for other in self._records.values()
            if other is not mine
            and other.engine_id == mine.engine_id
            and other.admitted_at is not None
            and other.finished_at is not None
            and mine.arrived_at < other.finished_at
            and (until is None or other.finished_at <= until)
        ]
        return replace(
            state,
            waited_for=(*ended, *state.waited_for)[-MAX_NAMED:],
            num_waited_for=len(ended) + state.num_waited_for,
        )
