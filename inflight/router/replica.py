"""What a router knows of one replica's prefix cache: what the replica has told, and what is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

from inflight.engine import EngineStats, Health, ModelFacts, ReplicaClient
from inflight.events import CACHE_NAME_LENGTH, CacheUpdate, KVUsage

if TYPE_CHECKING:
    from inflight.router.routed import RoutedRequest


class KnownBlocks:
    """Names of full blocks (`kv/block_names.py`), of which the first bytes."""

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        # Of requests that were sent there and have no token yet: the replica will tell of their blocks only once it has
        # computed them, and those who begin alike often come together.
        self._expected: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def update(self, update: CacheUpdate) -> None:
        if update.cleared:
            self._stored.clear()
        self._stored.update(_split(update.stored))
        self._stored.difference_update(_split(update.evicted))

    def clear(self) -> None:
        """The replica has lost its memory."""
        self._stored.clear()
        self._expected.clear()

    def expect(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._expected[name] = self._expected.get(name, 0) + 1

    def expect_no_more(self, names: Sequence[bytes]) -> None:
        for name in names:
            count = self._expected.get(name, 0) - 1
            if count > 0:
                self._expected[name] = count
            else:
                self._expected.pop(name, None)

    def num_leading(self, names: Sequence[bytes]) -> int:
        """How many of these are there, from the first on. Halving: of one prefix, the end is evicted first."""
        stored, expected = self._stored, self._expected
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if names[middle] in stored or names[middle] in expected:
                low = middle + 1
            else:
                high = middle
        return low


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + CACHE_NAME_LENGTH] for at in range(0, len(packed), CACHE_NAME_LENGTH)]


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


_TOTALS = [item.name for item in fields(EngineStats) if item.type == "int"]
_BLOCKS = [item.name for item in fields(KVUsage) if item.name != "block_size"]


def summed(found: Sequence[EngineStats]) -> EngineStats:
    """All of them together; there is at least one."""
    kv = replace(found[0].kv, **{name: sum(getattr(stats.kv, name) for stats in found) for name in _BLOCKS})
    totals = {name: sum(getattr(stats, name) for stats in found) for name in _TOTALS}
    step_sizes = tuple(map(sum, zip(*(stats.step_sizes for stats in found), strict=True)))
    is_sleeping = all(stats.is_sleeping for stats in found)
    return EngineStats(**totals, kv=kv, step_sizes=step_sizes, is_sleeping=is_sleeping)


def left_behind(stats: EngineStats) -> EngineStats:
    """What still counts of an engine that is gone: what it has done."""
    nothing = dict.fromkeys(_BLOCKS, 0)
    return replace(stats, num_running=0, num_waiting=0, is_sleeping=True, kv=replace(stats.kv, **nothing))


def facts_of_all(found: Sequence[ModelFacts]) -> ModelFacts:
    """One model's facts, with the room of all engines that have it, and a context that fits into each."""
    return replace(
        found[0],
        max_model_len=min(facts.max_model_len for facts in found),
        num_blocks=sum(facts.num_blocks for facts in found),
        max_num_seqs=sum(facts.max_num_seqs for facts in found),
        max_num_batched_tokens=sum(facts.max_num_batched_tokens for facts in found),
    )


def same_model(facts: ModelFacts, other: ModelFacts) -> bool:
    """Whether requests made for one can be run by the other, if their length fits."""
    names = ("fingerprint", "vocab_size", "eos_token_ids", "block_size", "generates", "pooling")
    return all(getattr(facts, name) == getattr(other, name) for name in names)
