"""Blocks of KV memory: their reference counts, and the block table of every request.

Each block is in exactly one of three states:

         allocate                     release (last holder)
    EMPTY ───────► USED (refs ≥ 1) ──────────────────────────► EMPTY
      ▲              ▲   │                  not published
      │      acquire │   │ release (last holder), published
      │   prefix hit │   ▼
      └─────────── CACHED (refs = 0, content available for prefix hits)
         evict, least recently used first

so empty + cached + used == total at all times. Every operation is O(1) per block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from inflight.events import KVUsage
from inflight.kv.prefix_cache import PrefixCache
from inflight.request import Request

MAX_EVICTIONS = 64  # the most blocks that `BlockPool.state` lists as those to be evicted next


class BlockPool:
    """All blocks, and how many holders each has."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, for locality
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._empty) - len(self._cached)

    @property
    def num_available(self) -> int:
        """The number of blocks that could be allocated now, evicting cached ones if needed."""
        return len(self._empty) + len(self._cached)

    def refs(self, block_id: int) -> int:
        return self._refs[block_id]

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def take_empty(self) -> int:
        """Allocate an empty block with one holder."""
        block_id = self._empty.pop()
        self._refs[block_id] = 1
        return block_id

    def evict(self) -> int:
        """Empty the least recently used cached block and return its id. The caller must forget its content."""
        block_id, _ = self._cached.popitem(last=False)
        self._empty.append(block_id)
        return block_id

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a holder to each of these used or cached blocks."""
        refs, cached = self._refs, self._cached
        for block_id in block_ids:
            if refs[block_id] == 0:
                del cached[block_id]
            refs[block_id] += 1

    def release(self, block_ids: Iterable[int], keep: Callable[[int], bool]) -> int:
        """Remove a holder from each of these blocks, and return how many had no other.

        A block without holders becomes cached if `keep` returns true for it, otherwise empty.
        """
        refs, num_freed = self._refs, 0
        for block_id in block_ids:
            refs[block_id] -= 1
            if refs[block_id] == 0:
                num_freed += 1
                if keep(block_id):
                    self._cached[block_id] = None
                else:
                    self._empty.append(block_id)
        return num_freed

    def state(self) -> tuple[array[int], array[int], list[int]]:
        """Return the holders of every block, the empty blocks, and the cached ones to be evicted next."""
        next_ids = list(islice(self._cached, MAX_EVICTIONS))
        return array("i", self._refs), array("i", self._empty), next_ids

    def check(self, held: Iterable[int]) -> None:
        """Assert that every block has one state and that `held` (with repeats) accounts for every reference."""
        refs = [0] * self.num_blocks
        for block_id in held:
            refs[block_id] += 1
        assert refs == self._refs, "reference counts differ from the block tables"
        states = [*self._empty, *self._cached, *(i for i, count in enumerate(refs) if count)]
        assert sorted(states) == list(range(self.num_blocks)), "a block is in two states or in none"


class BlockManager:
    """Allocates, shares and frees the blocks of requests."""

    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = cache
        self._total_capacity = 0  # tokens that fit into all block tables, counting shared blocks in each

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[int]:
        """Return cached blocks that hold the request's leading tokens, without acquiring them."""
        return self.cache.match(request)

    def fits(self, hits: list[int], num_tokens: int) -> bool:
        """Return whether a request with these hits could hold `num_tokens` tokens now."""
        pool = self.pool
        spare = pool.num_available - self.blocks_for(num_tokens) + len(hits)
        # Hits without a holder are among the available blocks. Usually there is no need to count them.
        return spare >= len(hits) or spare >= sum(map(pool.is_cached, hits))

    def attach(self, request: Request, hits: list[int]) -> None:
        """Start the request's block table with shared blocks."""
        self.pool.acquire(hits)
        request.block_ids = list(hits)
        request.num_published = len(hits)
        request.kv_capacity = len(hits) * self.block_size
        self._total_capacity += request.kv_capacity
        self.cache.num_queries += len(request.token_ids)
        self.cache.num_hits += request.kv_capacity

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the block table to hold `num_tokens`. Return the new blocks, or None if there are not enough."""
        needed = self.blocks_for(num_tokens) - len(request.block_ids)
        pool = self.pool
        if needed > pool.num_available:
            return None
        new_ids = []
        for _ in range(needed):
            if pool.num_empty == 0:
                self.cache.forget(pool.evict())
            new_ids.append(pool.take_empty())
        request.block_ids += new_ids
        num_added = len(new_ids) * self.block_size
        request.kv_capacity += num_added
        self._total_capacity += num_added
        return new_ids

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens available to prefix hits."""
        self.cache.publish(request, num_tokens)

    def free(self, request: Request) -> int:
        """Release the request's blocks. Return how many have no other holder."""
        # Tail first, so that the end of a prefix is evicted before its start.
        num_freed = self.pool.release(reversed(request.block_ids), self.cache.knows)
        self._total_capacity -= request.kv_capacity
        request.block_ids = []
        request.kv_capacity = request.num_published = 0
        return num_freed

    def usage(self, num_resident: int) -> KVUsage:
        """Return the state of memory, given the number of tokens resident in all block tables."""
        pool = self.pool
        # Shared blocks are full, so unused capacity is in unshared blocks and can be counted per table.
        unused = self._total_capacity - num_resident
        return KVUsage(
            num_blocks=pool.num_blocks,
            num_empty=pool.num_empty,
            num_cached=pool.num_cached,
            num_used=pool.num_used,
            block_size=self.block_size,
            num_tokens=pool.num_used * self.block_size - unused,
        )

    def drop_cache(self) -> None:
        """Forget all content. Blocks in use stay with their holders, but get no more prefix hits."""
        while self.pool.num_cached:
            self.pool.evict()
        self.cache.clear()

    def check(self, holders: Iterable[Request]) -> None:
        """Assert that the holders' block tables account for every reference."""
        self.pool.check(block_id for request in holders for block_id in request.block_ids)
