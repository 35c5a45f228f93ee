"""The interface between servers and engines: a client of an engine in this process or another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from inflight.engine.sleep import Command
from inflight.engine.stats import EngineStats
from inflight.engine.step_records import StepObserver
from inflight.events import CacheUpdate, Delta, RequestRecord
from inflight.request import Request
from inflight.scoring import PoolingFacts


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
    fingerprint: str = ""  # hash of the checkpoint's files: engines with equal ones have the same model

    @property
    def num_full_requests(self) -> int:
        """The number of full-length requests that fit into KV memory at once."""
        blocks_each = -(-self.max_model_len // self.block_size)
        return min(self.num_blocks // blocks_each, self.max_num_seqs)


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


CacheObserver = Callable[[CacheUpdate], None]


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

    def watch(self, observer: StepObserver) -> Callable[[], None]:
        """Call `observer` in the event loop with the record of every step, until it raises.

        Return a function that removes it.
        """

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
