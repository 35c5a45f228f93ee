"""The seam between whoever serves and whoever computes: a handle on an engine, near or far."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from inflight.engine.core import EngineStats
from inflight.engine.sleep import Command
from inflight.engine.step_records import StepObserver
from inflight.events import CacheUpdate, Delta, RequestRecord
from inflight.request import Request
from inflight.scoring import PoolingFacts


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine makes progress: it is idle, or its last step ended a short while ago."""

    healthy: bool
    seconds_since_step: float
    error: str | None = None
    state: Literal["running", "stalled", "restarting", "dead", "closing", "closed"] = "running"
    num_restarts: int = 0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What those who talk to an engine must know of its model: enough to make requests, without the weights."""

    model: str
    vocab_size: int  # the width of the logits
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_params: dict[str, Any]  # fields of SamplingParams that the checkpoint's makers recommend
    tokenizer_folder: str | None
    device: str
    dtype: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    generates: bool = True  # else it has a head alone
    pooling: PoolingFacts | None = None  # of its head, where it has one
    fingerprint: str = ""  # of the checkpoint's files: two engines with the same one have the same model

    @property
    def num_full_requests(self) -> int:
        """How many requests of full length fit into the KV memory at once."""
        blocks_each = -(-self.max_model_len // self.block_size)
        return min(self.num_blocks // blocks_each, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class RequestState:
    """What happened to one request, and why it took so long."""

    record: RequestRecord
    status: Literal["waiting", "running", "finished"]
    num_computed: int = 0  # tokens that have KV now
    num_blocks: int = 0  # that it holds
    num_ahead: int = 0  # waiting requests that came before it, while it waits itself
    # Requests that it waited for: those that ended between its arrival and its admission and, while it
    # waits, those that run. The latest of them.
    waited_for: tuple[str, ...] = ()
    num_waited_for: int = 0


CacheObserver = Callable[[CacheUpdate], None]


class EngineClient(Protocol):
    """Requests go in validated; deltas come out, the last one of each stream with a finish reason.

    An error delta ends one request. When the engine itself ends, every open stream raises EngineDeadError once it
    has given all that had come, and so does everything that is asked of it.
    """

    @property
    def facts(self) -> ModelFacts:
        """Of the engine's model."""

    async def add(self, request: Request) -> None:
        """Queue a request. Raises QueueFullError at once when the queue is at its limit."""

    def stream(self, request_id: str) -> AsyncGenerator[Delta]:
        """The deltas of a request that was added, merged where the reader is slower than the engine. Leaving
        the iterator early aborts the request."""

    async def abort(self, request_id: str, reason: str = "abort") -> int:
        """End a request; its stream ends with `reason` as finish reason. The number of KV blocks freed."""

    async def describe(self, request_id: str) -> RequestState | None:
        """What happened to a request that is there, or was until recently."""

    async def command(self, command: Command) -> None:
        """Do something that is no request, to its end. Raises EngineError where it cannot be done."""

    def watch(self, observer: StepObserver) -> Callable[[], None]:
        """Call `observer` in the event loop with the record of every step; one that raises is called no more.
        Returns what ends it."""

    async def stats(self) -> EngineStats: ...

    async def health(self) -> Health: ...

    async def close(self, drain: float = 0.0) -> None:
        """Stop. New requests are refused at once; those that run may take up to `drain` seconds to end."""


class ReplicaClient(EngineClient, Protocol):
    """A client of one engine, which a router can put beside others."""

    def watch_cache(self, observer: CacheObserver) -> None:
        """Call `observer` in the event loop with what changes in the engine's prefix cache; first, and again when the
        engine was restarted, with all that is in it."""

    async def restart(self) -> None:
        """End the engine and start another one in its place; return when that is ready. Raises EngineError where it
        cannot be started."""
