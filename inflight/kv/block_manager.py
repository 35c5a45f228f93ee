"""Block tables: every request's map from token positions to blocks."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.events import KVUsage
from inflight.kv.block_pool import BlockPool
from inflight.kv.prefix_cache import PrefixCache
from inflight.request import Request


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, cache: PrefixCache) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = cache
        self._num_places = 0  # token places in all block tables, shared blocks counted in each

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: Request) -> list[int]:
        """Cached blocks that hold the request's leading tokens. Takes nothing yet."""
        return self.cache.match(request)

    def fits(self, hits: list[int], num_tokens: int) -> bool:
        """Whether a request with these hits could hold `num_tokens` tokens now."""
        pool = self.pool
        spare = pool.num_available - self.blocks_for(num_tokens) + len(hits)
        # Hits that nobody holds are among the available ones. Mostly there is no need to count them.
        return spare >= len(hits) or spare >= sum(map(pool.is_cached, hits))

    def attach(self, request: Request, hits: list[int]) -> None:
        """Start the request's table with shared blocks."""
        self.pool.acquire(hits)
        request.block_ids = list(hits)
        request.num_published = len(hits)
        request.num_places = len(hits) * self.block_size
        self._num_places += request.num_places
        self.cache.num_queries += len(request.token_ids)
        self.cache.num_hits += request.num_places

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend the table to hold `num_tokens`. The new blocks, or None where memory does not reach."""
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
        added = len(new_ids) * self.block_size
        request.num_places += added
        self._num_places += added
        return new_ids

    def publish(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks among the first `num_tokens` tokens."""
        self.cache.publish(request, num_tokens)

    def free(self, request: Request) -> int:
        """Give up the request's table. Returns how many blocks no one else holds."""
        # Tail first: of one prefix, the blocks at its end are evicted before those at its start.
        num_freed = self.pool.release(reversed(request.block_ids), self.cache.knows)
        self._num_places -= request.num_places
        request.block_ids = []
        request.num_places = request.num_published = 0
        return num_freed

    def usage(self, num_resident: int) -> KVUsage:
        """The state of memory when running requests have `num_resident` tokens in their tables."""
        pool = self.pool
        # Shared blocks are full, so unused places are in unshared ones and can be counted by table.
        unused = self._num_places - num_resident
        return KVUsage(
            num_blocks=pool.num_blocks,
            num_free=pool.num_empty,
            num_cached=pool.num_cached,
            num_used=pool.num_used,
            block_size=self.block_size,
            num_tokens=pool.num_used * self.block_size - unused,
        )

    def drop_cache(self) -> None:
        """Forget all content; blocks in use stay with their holders, unfindable."""
        while self.pool.num_cached:
            self.pool.evict()
        self.cache.clear()

    def check(self, holders: Iterable[Request]) -> None:
        """Assert that the holders' tables explain every reference."""
        self.pool.check(block_id for request in holders for block_id in request.block_ids)
