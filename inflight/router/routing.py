"""Routing strategies: which replica gets a request. Costs are in tokens; ties go to the least recently chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from inflight.router.replica import Replica

# A cached token saves time for the request, for those queued behind it, and for later requests with the same prefix.
SAVED_WEIGHT = 3
# With idle replicas nothing is queued, and all requests would go where a popular prefix was first computed. So recent
# work counts as load too.
RECENT_TOKENS = 1 << 14  # sent to all replicas together, after which earlier work counts half


class KnownTokens(NamedTuple):
    """The tokens of a request, and the names of its blocks that may be cached."""

    num_tokens: int
    block_size: int
    names: Sequence[bytes]  # of some of its full blocks, shortened as in cache updates
    marks: Sequence[int]  # number of blocks up to the end of each of these

    def num_missing(self, replica: Replica) -> int:
        """Return how many tokens the replica would have to compute."""
        num_cached = replica.blocks.num_leading(self.names)
        return self.num_tokens - (self.block_size * self.marks[num_cached - 1] if num_cached else 0)


class Routing(Protocol):
    def choose(self, tokens: KnownTokens, among: Sequence[Replica]) -> Replica: ...


class RoundRobin:
    """Chooses replicas in turn."""

    def choose(self, tokens: KnownTokens, among: Sequence[Replica]) -> Replica:  # noqa: ARG002
        return min(among, key=lambda replica: replica.chosen_at)


class LeastLoaded:
    """Chooses the replica with the least work queued and enough memory."""

    def choose(self, tokens: KnownTokens, among: Sequence[Replica]) -> Replica:
        return min(among, key=lambda replica: (replica.load(tokens.num_tokens), replica.chosen_at))


class PrefixAware:
    """Weighs cached tokens against load: requests with the same prefix go to the same replica until so much is queued
    there that another one is faster, which then has the prefix too."""

    def choose(self, tokens: KnownTokens, among: Sequence[Replica]) -> Replica:
        def cost(replica: Replica) -> tuple[float, int]:
            num_missing = tokens.num_missing(replica)
            load = replica.load(num_missing) + replica.recent_tokens
            return SAVED_WEIGHT * num_missing + load, replica.chosen_at

        return min(among, key=cost)


ROUTINGS: dict[str, Callable[[], Routing]] = {
    "prefix_aware": PrefixAware,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
