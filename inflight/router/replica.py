"""The engines behind a router: the health, load and cached prefixes of each, and the choice of one for a request."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from inflight.engine.client import Health, ModelFacts, ReplicaClient
from inflight.engine.stats import EngineStats, ExpertStats
from inflight.events import CACHE_HASH_LENGTH, CacheUpdate, KVUsage

if TYPE_CHECKING:
    from inflight.router.routed import RoutedRequest


class KnownBlocks:
    """The cached blocks of one replica, as reported and as expected from requests on their way.

    Blocks are known by the first bytes of their hashes (`kv/prefix_cache.py`).
    """

    def __init__(self) -> None:
        self._stored: set[bytes] = set()
        # Blocks of requests without a token yet: the replica reports them only once computed, and requests with the
        # same prefix often arrive together.
        self._expected: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._stored)

    def update(self, update: CacheUpdate) -> None:
        if update.cleared:
            self._stored.clear()
        self._stored.update(_split(update.stored))
        self._stored.difference_update(_split(update.evicted))

    def clear(self) -> None:
        """Forget everything: the replica lost its cache."""
        self._stored.clear()
        self._expected.clear()

    def expect(self, hashes: Sequence[bytes]) -> None:
        self._expected.update(hashes)

    def expect_no_more(self, hashes: Sequence[bytes]) -> None:
        self._expected.subtract(hashes)
        for block_hash in hashes:
            if self._expected[block_hash] <= 0:
                del self._expected[block_hash]

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are there, by bisection: the end of a prefix is evicted first."""
        stored, expected = self._stored, self._expected
        return bisect_left(hashes, True, key=lambda name: name not in stored and name not in expected)


def _split(packed: bytes) -> list[bytes]:
    return [packed[start : start + CACHE_HASH_LENGTH] for start in range(0, len(packed), CACHE_HASH_LENGTH)]


ReplicaState = Literal[
    "starting", "running", "draining", "stalled", "restarting", "dead", "closing", "closed"
]

# Tokens that a request adds to a replica's load besides its prompt, since it takes a token of every step.
REQUEST_TOKENS = 16
# Weight of a token that does not fit into KV memory: it waits until another request has ended.
OVERFLOW_WEIGHT = 8


@dataclass(eq=False, slots=True)
class Replica:
    """One replica. Only the router changes it, in its event loop.

    `health` is what its client last reported. The three flags are the router's own: between a loss and the next health
    check, and while it is drained or stopped, they know more than `health`.
    """

    replica_id: str
    client: ReplicaClient
    stats: EngineStats | None = None  # as last reported
    health: Health = field(default_factory=lambda: Health(True, 0.0))
    draining: bool = False  # gets no new requests
    is_gone: bool = False  # its engine is lost; another one may be starting
    is_leaving: bool = False  # it is being stopped on purpose
    requests: set[RoutedRequest] = field(default_factory=set)
    on_trial: RoutedRequest | None = None  # the only suspect request here
    blocks: KnownBlocks = field(default_factory=KnownBlocks)
    num_queued_tokens: int = 0  # prompt tokens still to be computed
    recent_tokens: float = 0.0  # decaying count of tokens sent here
    chosen_at: int = 0  # number of requests placed when it was last chosen

    def __post_init__(self) -> None:
        self.client.watch_cache(self.blocks.update)

    @property
    def available(self) -> bool:
        """Whether it can take requests."""
        return self.health.healthy and not (self.draining or self.is_gone)

    @property
    def state(self) -> ReplicaState:
        return "draining" if self.draining and self.health.healthy else self.health.state

    def load(self, num_tokens: int) -> float:
        """Return the load, in tokens, for a request that needs `num_tokens` to be computed."""
        return (
            self.num_queued_tokens
            + REQUEST_TOKENS * len(self.requests)
            + OVERFLOW_WEIGHT * self._overflow(num_tokens)
        )

    def _overflow(self, num_tokens: int) -> int:
        """Return by how many tokens the KV memory would be exceeded."""
        if self.stats is None:
            return 0
        kv = self.stats.kv
        free = (kv.num_blocks - kv.num_used) * kv.block_size
        return max(0, self.num_queued_tokens + num_tokens - free)

    def lose_engine(self) -> tuple[set[RoutedRequest], RoutedRequest | None]:
        """Mark the engine as lost. Return the requests that were on it, and the one among them that was on trial."""
        lost, on_trial, self.requests = self.requests, self.on_trial, set()
        self.is_gone = True
        self.num_queued_tokens = 0
        self.on_trial = None
        self.blocks.clear()
        return lost, on_trial


_TOTALS = [item.name for item in fields(EngineStats) if item.type == "int"]
_BLOCKS = [item.name for item in fields(KVUsage) if item.name not in ("block_size", "groups")]


def summed(all_stats: Sequence[EngineStats]) -> EngineStats:
    """Return the totals of at least one engine."""
    groups: Counter[str] = sum((Counter(stats.kv.groups) for stats in all_stats), Counter())
    kv = replace(
        all_stats[0].kv,
        groups=dict(groups),
        **{name: sum(getattr(stats.kv, name) for stats in all_stats) for name in _BLOCKS},
    )
    totals = {name: sum(getattr(stats, name) for stats in all_stats) for name in _TOTALS}
    step_sizes = tuple(map(sum, zip(*(stats.step_sizes for stats in all_stats), strict=True)))
    is_sleeping = all(stats.is_sleeping for stats in all_stats)
    experts = _summed_experts([stats.experts for stats in all_stats if stats.experts is not None])
    return EngineStats(**totals, kv=kv, step_sizes=step_sizes, is_sleeping=is_sleeping, experts=experts)


def _summed_experts(experts: Sequence[ExpertStats]) -> ExpertStats | None:
    if not experts:
        return None
    return ExpertStats(
        tuple(map(sum, zip(*(stats.tokens for stats in experts), strict=True))),
        sum(stats.imbalance for stats in experts) / len(experts),
        max(stats.worst_imbalance for stats in experts),
    )


def work_done(stats: EngineStats) -> EngineStats:
    """Return the part of a lost engine's stats that still counts: the work it did."""
    nothing: dict[str, Any] = dict.fromkeys(_BLOCKS, 0)
    return replace(stats, num_running=0, num_waiting=0, is_sleeping=True, kv=replace(stats.kv, **nothing))


def facts_of_all(all_facts: Sequence[ModelFacts]) -> ModelFacts:
    """Return the model's facts with the capacity of all engines and the shortest context."""
    return replace(
        all_facts[0],
        max_model_len=min(facts.max_model_len for facts in all_facts),
        num_blocks=sum(facts.num_blocks for facts in all_facts),
        max_num_seqs=sum(facts.max_num_seqs for facts in all_facts),
        max_num_batched_tokens=sum(facts.max_num_batched_tokens for facts in all_facts),
    )


def same_model(facts: ModelFacts, other: ModelFacts) -> bool:
    """Return whether requests for one engine can run on the other, if their length fits."""
    names = ("fingerprint", "vocab_size", "eos_token_ids", "block_size", "generates", "pooling")
    return all(getattr(facts, name) == getattr(other, name) for name in names)


# ---- routing: costs are in tokens, and ties go to the least recently chosen replica ----

# A cached token saves time for the request, for those queued behind it, and for later requests with the same prefix.
SAVED_WEIGHT = 3
# With idle replicas nothing is queued, and all requests would go where a popular prefix was first computed. So recent
# work counts as load too.
RECENT_TOKENS = 1 << 14  # sent to all replicas together, after which earlier work counts half
NUM_EACH = 64  # marks at every block; beyond, half as many between consecutive powers of two


class BlockMarks:
    """Prefix lengths, in blocks, at which prompts are hashed: each of the first ones, then fewer and fewer.

    They are the same for all prompts. A few hundred hashes tell, for a prompt of any length, how much of it a cache
    holds, to within a thirty-second.
    """

    def __init__(self) -> None:
        self._marks = list(range(1, NUM_EACH + 1))

    def up_to(self, num_blocks: int) -> list[int]:
        marks = self._marks
        while marks[-1] < num_blocks:
            step = marks[-1] // NUM_EACH * 2
            marks += range(marks[-1] + step, 2 * marks[-1] + step, step)
        return marks[: bisect_right(marks, num_blocks)]


class KnownTokens(NamedTuple):
    """The tokens of a request, and the hashes of its blocks that may be cached."""

    num_tokens: int
    block_size: int
    hashes: Sequence[bytes]  # of some of its full blocks, truncated as in cache updates
    marks: Sequence[int]  # number of blocks up to the end of each of these

    def num_missing(self, replica: Replica) -> int:
        """Return how many tokens the replica would have to compute."""
        num_cached = replica.blocks.num_leading(self.hashes)
        return self.num_tokens - (self.block_size * self.marks[num_cached - 1] if num_cached else 0)


def _prefix_aware(tokens: KnownTokens, replica: Replica) -> float:
    """Weigh cached tokens against load: requests with the same prefix go to the same replica until so much is queued
    there that another one is faster, which then has the prefix too."""
    num_missing = tokens.num_missing(replica)
    return SAVED_WEIGHT * num_missing + replica.load(num_missing) + replica.recent_tokens


# What it costs to send a request to a replica.
ROUTINGS: dict[str, Callable[[KnownTokens, Replica], float]] = {
    "prefix_aware": _prefix_aware,
    "least_loaded": lambda tokens, replica: replica.load(tokens.num_tokens),
    "round_robin": lambda *_: 0.0,  # in turn
}


def choose(routing: str, tokens: KnownTokens, among: Sequence[Replica]) -> Replica:
    """Return the replica with the lowest cost; of several, the least recently chosen."""
    return min(among, key=lambda replica: (ROUTINGS[routing](tokens, replica), replica.chosen_at))
