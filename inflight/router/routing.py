"""Which replica gets a request. Costs are in tokens to compute; of equals, the one that was not chosen for longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from inflight.router.replica import Replica

# A token that is found need not be computed: that is time for the request itself, for those behind it, and for those of
# its successors who will begin as it does.
SAVED_WEIGHT = 3
# Where replicas are idle whenever a request comes, nothing is queued, and all would go where a popular beginning was
# first computed. So what a replica has done lately counts too, as if it were still to do.
RECENT_TOKENS = 1 << 14  # sent to all replicas together, until what was sent before counts half


class KnownTokens(NamedTuple):
    """What a request brings."""

    num_tokens: int
    block_size: int
    names: Sequence[bytes]  # of some of its full blocks that may be found, as they travel
    marks: Sequence[int]  # how many blocks there are up to the end of each of these

    def num_missing(self, replica: Replica) -> int:
        """Tokens that the replica would have to compute."""
        num_found = replica.blocks.num_leading(self.names)
        return self.num_tokens - (self.block_size * self.marks[num_found - 1] if num_found else 0)


class Routing(Protocol):
    def choose(self, tokens: KnownTokens, among: Sequence[Replica]) -> Replica: ...


class RoundRobin:
    """One after the other."""

    def choose(self, tokens: KnownTokens, among: Sequence[Replica]) -> Replica:  # noqa: ARG002
        return min(among, key=lambda replica: replica.chosen_at)


class LeastLoaded:
    """Where the fewest tokens are to be computed before, and memory reaches."""

    def choose(self, tokens: KnownTokens, among: Sequence[Replica]) -> Replica:
        return min(among, key=lambda replica: (replica.load(tokens.num_tokens), replica.chosen_at))


class PrefixAware:
    """Tokens that a replica has already, against tokens that it has to compute before: those who begin alike go to the
    same replica until so much waits there that another one is faster, which then has the beginning too."""

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
