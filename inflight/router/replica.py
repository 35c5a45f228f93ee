"""One of the engines behind a router: how it does, what it has to do, what is known of its memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from inflight.engine import EngineStats, Health, ReplicaClient
from inflight.router.known_blocks import KnownBlocks

if TYPE_CHECKING:
    from inflight.router.routed import RoutedRequest

ReplicaState = Literal[
    "starting", "running", "draining", "stalled", "restarting", "dead", "closing", "closed"
]

# Tokens that a request counts for beside those of its prompt, when replicas are compared: it takes one of each step.
REQUEST_TOKENS = 16
# What a token counts for that does not fit into the KV memory: it waits until another request has ended.
OVERFLOW_WEIGHT = 8


@dataclass(eq=False, slots=True)
class Replica:
    """Written by the router alone, and in its event loop."""

    replica_id: str
    client: ReplicaClient
    stats: EngineStats | None = None  # as last heard
    health: Health = field(default_factory=lambda: Health(True, 0.0))
    draining: bool = False  # it gets no new work
    is_gone: bool = False  # its engine is, and all that it had; another one may be on its way
    is_leaving: bool = False  # its end is wanted
    requests: set[RoutedRequest] = field(default_factory=set)  # that are there
    on_trial: RoutedRequest | None = None  # under suspicion, and the only one of those here
    blocks: KnownBlocks = field(default_factory=KnownBlocks)
    num_queued_tokens: int = 0  # to be computed before requests that are here get their next token
    recent_tokens: float = 0.0  # computed here or to be, of which the latest count most
    chosen_at: int = 0  # how many requests had been placed when it was last chosen

    def __post_init__(self) -> None:
        self.client.watch_cache(self.blocks.update)

    @property
    def available(self) -> bool:
        """Whether it may be given work."""
        return self.health.healthy and not (self.draining or self.is_gone)

    @property
    def state(self) -> ReplicaState:
        return "draining" if self.draining and self.health.healthy else self.health.state

    def load(self, num_tokens: int) -> float:
        """What it has to do before a request of which it must compute so many tokens, in tokens."""
        return (
            self.num_queued_tokens
            + REQUEST_TOKENS * len(self.requests)
            + OVERFLOW_WEIGHT * self._overflow(num_tokens)
        )

    def _overflow(self, num_tokens: int) -> int:
        """By how many tokens the KV memory would be exceeded, as far as is known."""
        if self.stats is None:
            return 0
        kv = self.stats.kv
        free = (kv.num_blocks - kv.num_used) * kv.block_size
        return max(0, self.num_queued_tokens + num_tokens - free)

    def lose_engine(self) -> set[RoutedRequest]:
        """The engine is gone, and all that it had. Those who were there."""
        lost, self.requests = self.requests, set()
        self.is_gone = True
        self.num_queued_tokens = 0
        self.on_trial = None
        self.blocks.clear()
        return lost
