"""The memory of requests: the blocks in their tables, what they share, and whether more fits.

The scheduler asks in tokens, and KV groups are known only here. All tables have the same block size, so those of a
request grow together; tables with a window lose their oldest blocks meanwhile.

Blocks that are allocated, shared and freed together are a bundle, known by its first block: one block for each table of
a KV group, or those of a snapshot. Where a group has one table, a bundle is a block. Requests hold one bundle per group
and block of tokens. Each bundle is in one of three states:

         allocate                     release (last holder)
    EMPTY ───────► USED (refs ≥ 1) ──────────────────────────► EMPTY
      ▲              ▲   │                  not published
      │      acquire │   │ release (last holder), published
      │   prefix hit │   ▼
      └─────────── CACHED (refs = 0, content available for prefix hits)
         evict, least recently used first

so empty + cached + used == total at all times. The snapshot that a running request overwrites again and again counts as
cached, though its content is available only once the request ends. Every operation is O(1) per block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

from inflight.events import KVUsage
from inflight.kv.layout import KVLayout
from inflight.kv.prefix_cache import PrefixCache, PrefixHit
from inflight.kv.snapshots import Snapshots, StateCopies
from inflight.request import Request


class TableUpdate(NamedTuple):
    """`block_ids` continue a block table of `row` from index `first`."""

    row: int
    first: int
    block_ids: list[int]
    table: int = 0


class BlockManager:
    """Allocates, shares and frees the blocks of requests."""

    def __init__(self, num_blocks: int, layout: KVLayout, cache: PrefixCache) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.pool = BlockPool(num_blocks)
        self.cache = cache
        self._groups = layout.groups
        # How many tokens before its own a token can see, if not all, and the tables of each group.
        self._shapes = [(None if g.window is None else g.window - 1, g.tables) for g in self._groups]
        self._windowed = [
            (index, reach) for index, (reach, _) in enumerate(self._shapes) if reach is not None
        ]
        self._num_tables = len(layout.windows)
        self._names = [group.name for group in self._groups]
        self._num_used = [0] * len(self._groups)  # blocks
        self._total_capacity = 0  # tokens that fit into all block tables, counting shared blocks in each
        self.snapshots: Snapshots | None = None
        if layout.snapshot_blocks:
            size = layout.snapshot_blocks
            self.snapshots = Snapshots(self.pool, cache, layout.block_size, size, self._take)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_tokens(self, chunk: int) -> int:
        """Return the longest request that fits on its own, computed `chunk` tokens at a time."""
        return self.layout.max_tokens(self.pool.num_blocks, chunk)

    # ---- admission ----

    def match(self, request: Request) -> PrefixHit:
        """Return the cached prefix of the request, without acquiring it."""
        hit = self.cache.match(request)
        if self.snapshots is not None and self.snapshots.grows(request, hit):
            return replace(hit, grows=True)
        return hit

    def fits(
        self, hit: PrefixHit, num_tokens: int, chunk: int, num_growth: int = 0, num_kept: int = 0
    ) -> bool:
        """Return whether a request with this hit could hold `num_tokens` tokens now, computed `chunk` tokens at a time.

        Memory for `num_growth` more tokens, of any requests, and `num_kept` blocks is left.
        """
        size, spare, num_shared = self.block_size, self.pool.num_available - num_kept, 0
        if self.snapshots is not None:
            spare += self.snapshots.num_planned_blocks
        for group in self._groups:
            if group.window is None:
                num_needed = self.blocks_for(num_tokens + num_growth) - hit.num_blocks
                num_shared += hit.num_blocks * len(group.tables)
            else:  # a window moves on, from blocks that are shared to the request's own
                num_needed = group.most_held(num_tokens, chunk, size) + self.blocks_for(num_growth)
            spare -= num_needed * len(group.tables)
        # Hits without a holder are among the available blocks. Usually there is no need to count them.
        return spare >= num_shared or spare >= self._num_cached(hit)

    def _num_cached(self, hit: PrefixHit) -> int:
        """Return the number of blocks without a holder in the groups of a hit that keep all tokens."""
        is_cached = self.pool.is_cached
        return sum(
            sum(map(is_cached, bundles)) * len(group.tables)
            for group, bundles in zip(self._groups, hit.tables, strict=False)
            if group.window is None
        )

    def blocks_to_finish(self, request: Request, chunk: int) -> int:
        """Return how many more blocks a running request needs for all its tokens and the first of another block."""
        size, total = self.block_size, 0
        for group, table, first in zip(self._groups, request.tables, request.first_blocks, strict=True):
            most = group.most_held(request.num_tokens, chunk, size) + 1
            total += max(0, most - len(table) + first) * len(group.tables)
        return total

    def attach(self, request: Request, hit: PrefixHit) -> None:
        """Start the request's block tables with shared blocks."""
        num_cached, size = hit.num_blocks * self.block_size, self.block_size
        request.tables = [list(bundles) for bundles in hit.tables] or [[] for _ in self._groups]
        request.first_blocks = [
            0 if reach is None else max(0, num_cached - reach) // size for reach, _ in self._shapes
        ]
        request.branch = hit.num_present if hit.num_present > hit.num_blocks else 0
        request.num_continued = max(
            hit.num_blocks, hit.num_present, request.num_prompt_tokens // self.block_size
        )
        for index, (table, first) in enumerate(zip(request.tables, request.first_blocks, strict=True)):
            self._num_used[index] += self.pool.acquire(table[first:] if first else table)
        if self.snapshots is not None:
            self.snapshots.attach(request, hit)
        request.num_published = hit.num_blocks
        request.kv_capacity = num_cached
        self._total_capacity += num_cached
        self.cache.num_queries += len(request.token_ids)
        self.cache.num_hits += num_cached

    # ---- running requests ----

    def grow(self, request: Request, num_tokens: int) -> list[TableUpdate] | None:
        """Extend the block tables to hold `num_tokens`. Return the new blocks, or None if there are not enough.

        Blocks that no token from `request.num_computed` on can see leave their tables first.
        """
        size = self.block_size
        first = request.kv_capacity // size
        needed = -(-num_tokens // size) - first
        updates: list[TableUpdate] = []
        has_room = needed * self._num_tables <= self.pool.num_available
        if needed == 1 and has_room and self._windowed and num_tokens == request.num_computed + 1:
            self._slide(request, first, updates)
        else:
            for index, reach in self._windowed:
                seen = (request.num_computed - reach) // size
                if seen > request.first_blocks[index]:
                    self._release_unseen(request, index, seen)
            if needed > 0:
                if not has_room and not self._make_room(needed):
                    return None
                self._extend(request, first, needed, updates)
        if self.snapshots is not None:
            self.snapshots.begin_entry(request, num_tokens)
        return updates

    def make_room_for_drafts(
        self, request: Request, count: int, num_kept: int
    ) -> tuple[int, list[TableUpdate]]:
        """Extend the block tables for up to `count` drafts, and leave `num_kept` blocks per table to others.

        Return how many drafts fit, and the new blocks. With recurrent layers, drafts end with the block: snapshots are
        taken where an entry begins, and refused tokens must not be in one.
        """
        num_free = request.kv_capacity - request.num_computed
        if count <= num_free or self.snapshots is not None:
            return min(count, num_free), []
        needed = -(-(count - num_free) // self.block_size)
        if (needed + num_kept) * self._num_tables > self.pool.num_available:
            return num_free, []
        updates: list[TableUpdate] = []
        self._extend(request, request.kv_capacity // self.block_size, needed, updates)
        return count, updates

    def _extend(self, request: Request, first: int, count: int, updates: list[TableUpdate]) -> None:
        # Hot: every request runs it at every block boundary, and decodes need one block.
        take, num_used, row = self._take, self._num_used, request.row
        for index, (_, numbers) in enumerate(self._shapes):
            table, size = request.tables[index], len(numbers)
            num_used[index] += size * count
            bundles = [take(size)] if count == 1 else [take(size) for _ in range(count)]
            table += bundles
            if size == 1:
                updates.append(TableUpdate(row, first, bundles, numbers[0]))
            else:
                columns = zip(*map(self.pool.blocks, bundles), strict=True)
                for number, block_ids in zip(numbers, columns, strict=True):
                    updates.append(TableUpdate(row, first, list(block_ids), number))
        num_added = count * self.block_size
        request.kv_capacity += num_added
        self._total_capacity += num_added

    def _slide(self, request: Request, first: int, updates: list[TableUpdate]) -> None:
        """Extend the block tables by a block for a decode, reusing blocks that leave a window if nobody else could.

        Caching them instead would be of little use: see `_release_unseen`.
        """
        # Hot like `_extend`.
        row, size, first_blocks = request.row, self.block_size, request.first_blocks
        for index, (reach, numbers) in enumerate(self._shapes):
            table, bundle = request.tables[index], -1
            if reach is not None:
                begin, seen = first_blocks[index], (request.num_computed - reach) // size
                if (
                    seen == begin + 1 <= len(table)
                    and begin >= request.num_continued
                    and self.pool.refs(table[begin]) == 1
                ):
                    bundle = table[begin]  # not published
                    table[begin] = -1
                    first_blocks[index] = seen
                elif seen > begin:
                    self._release_unseen(request, index, seen)
            if bundle < 0:
                bundle = self._take(len(numbers))
                self._num_used[index] += len(numbers)
            table.append(bundle)
            if len(numbers) == 1:
                updates.append(TableUpdate(row, first, [bundle], numbers[0]))
            else:
                for number, block in zip(numbers, self.pool.blocks(bundle), strict=True):
                    updates.append(TableUpdate(row, first, [block], number))
        request.kv_capacity += size
        self._total_capacity += size

    def _take(self, size: int) -> int:
        """Allocate a bundle, evicting others if needed."""
        pool = self.pool
        while (bundle := pool.take_empty(size)) < 0:
            self._forget(pool.evict())
        return bundle

    def _forget(self, bundle: int) -> None:
        self.cache.forget(bundle)
        if self.snapshots is not None:
            self.snapshots.forget(bundle)

    def _make_room(self, needed: int) -> bool:
        """Give up the snapshots of this step if there is no room for `needed` blocks per table otherwise."""
        num_blocks = needed * self._num_tables
        if num_blocks > self.pool.num_available and self.snapshots is not None:
            self.snapshots.cancel()
        return num_blocks <= self.pool.num_available

    def _release_unseen(self, request: Request, index: int, first: int) -> None:
        """Release the bundles of a windowed group before block `first`.

        They stay cached, but only a request that continues from just behind them could use them. That is likely
        where the request's own prefix was shared, where it should have been, and at the end of its prompt; others are
        evicted before anything else.
        """
        table, begin, size = request.tables[index], request.first_blocks[index], self.block_size
        request.first_blocks[index] = first
        release, knows = self.pool.release, self.cache.knows
        shared, branch, prompt = request.num_cached // size, request.branch, request.num_prompt_tokens // size
        reach = -(-(self._groups[index].window or 0) // size)  # blocks of a window
        for block in range(begin, min(first, len(table))):
            last_useful = block + reach
            is_useful = (
                block < shared <= last_useful
                or block < branch <= last_useful
                or block < prompt <= last_useful
            )
            self._num_used[index] -= release((table[block],), knows, not is_useful)
            table[block] = -1

    def table_updates(self, request: Request) -> Iterator[TableUpdate]:
        """Yield all blocks of a request."""
        row = request.row
        for group, table, first in zip(self._groups, request.tables, request.first_blocks, strict=True):
            if len(group.tables) == 1:
                yield TableUpdate(row, first, table[first:], group.tables[0])
            elif first < len(table):
                columns = zip(*map(self.pool.blocks, table[first:]), strict=True)
                for number, block_ids in zip(group.tables, columns, strict=True):
                    yield TableUpdate(row, first, list(block_ids), number)

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` tokens available to prefix hits."""
        self.cache.publish(request, num_tokens)
        if self.snapshots is not None:
            self.snapshots.end_entry(request)

    def take_copies(self) -> StateCopies | None:
        """Return the copies of recurrent states that the step just formed makes; None if the model has no such state.

        Call it when nothing can be added to the step any more: its snapshots can be hit from then on.
        """
        return None if self.snapshots is None else self.snapshots.take_copies()

    def free(self, request: Request) -> int:
        """Release the request's blocks. Return how many have no other holder."""
        if self._windowed:
            self.cache.publish_windows(request)
        refs = self.pool.refs
        for index, group in enumerate(self._groups if request.tables else ()):
            bundles = request.tables[index][request.first_blocks[index] :]
            self._num_used[index] -= len(group.tables) * sum(refs(bundle) == 1 for bundle in bundles)
        num_freed = self.pool.release(self._bundles(request), self.cache.knows)
        if self.snapshots is not None:
            self.snapshots.leave(request)
        self._total_capacity -= request.kv_capacity
        request.tables, request.first_blocks = [], []
        request.kv_capacity = request.num_published = 0
        return num_freed

    def _bundles(self, request: Request) -> Iterator[int]:
        """Yield the bundles of a request, tail first, so that the end of a prefix is evicted before its start."""
        if len(request.tables) == 1:
            yield from reversed(request.tables[0][request.first_blocks[0] :])
        else:
            for block in range(
                request.kv_capacity // self.block_size - 1, min(request.first_blocks, default=0) - 1, -1
            ):
                for table in request.tables:
                    if table[block] >= 0:
                        yield table[block]

    # ---- the whole memory ----

    def num_held(self, request: Request) -> int:
        """Return the number of blocks that a request holds."""
        tables = zip(self._groups, request.tables, request.first_blocks, strict=False)
        return sum(len(group.tables) * (len(table) - first) for group, table, first in tables)

    def usage(self, num_resident: int) -> KVUsage:
        """Return the state of memory, given the number of tokens resident in all block tables."""
        pool = self.pool
        # Shared blocks are full, so unused capacity is in unshared blocks and can be counted per table.
        unused = (self._total_capacity - num_resident) * self._num_tables
        return KVUsage(
            num_blocks=pool.num_blocks,
            num_empty=pool.num_empty,
            num_cached=pool.num_cached,
            num_used=pool.num_used,
            block_size=self.block_size,
            num_tokens=pool.num_used * self.block_size - unused,
            groups=self._group_usage(),
        )

    def _group_usage(self) -> dict[str, int]:
        if len(self._groups) == 1 and self.snapshots is None:
            return {}
        usage = dict(zip(self._names, self._num_used, strict=True))
        if self.snapshots is not None:
            usage["snapshots"] = self.snapshots.count * self.layout.snapshot_blocks
        return usage

    def drop_cache(self) -> None:
        """Forget all content. Blocks in use stay with their holders, but get no more prefix hits."""
        while self.pool.num_cached:
            self.pool.evict()
        self.cache.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    def check(self, holders: Iterable[Request]) -> None:
        """Assert that the holders' block tables account for every reference."""
        references = [bundle for request in holders for bundle in self._bundles(request)]
        if self.snapshots is not None:
            references += self.snapshots.bundles_in_use()
        self.pool.check(references)
        num_planned = 0 if self.snapshots is None else self.snapshots.num_planned_blocks
        assert sum(self._num_used) + num_planned == self.pool.num_used, "the groups' blocks do not add up"


MAX_EVICTIONS = 64  # the most blocks that `BlockPool.state` lists as those to be evicted next


class BlockPool:
    """All blocks, and how many holders each bundle has."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self._refs = [0] * num_blocks  # by a bundle's first block
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, for locality
        self._cached: OrderedDict[int, None] = OrderedDict()  # bundles, least recently used first
        self._bundles: dict[int, list[int]] = {}  # the blocks of each bundle that has several

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._empty) - self.num_cached

    @property
    def num_available(self) -> int:
        """The number of blocks that could be allocated now, evicting cached ones if needed."""
        return len(self._empty) + self.num_cached

    def refs(self, bundle: int) -> int:
        return self._refs[bundle]

    def is_cached(self, bundle: int) -> bool:
        return bundle in self._cached

    def blocks(self, bundle: int) -> list[int]:
        """Return the blocks of a bundle."""
        return self._bundles.get(bundle) or [bundle]

    def take_empty(self, size: int = 1) -> int:
        """Allocate a bundle of empty blocks with one holder. Return -1 if there are not enough."""
        empty = self._empty
        if len(empty) < size:
            return -1
        bundle = empty.pop()
        self._refs[bundle] = 1
        if size > 1:
            self._bundles[bundle] = [bundle, *empty[:-size:-1]]
            del empty[1 - size :]
        return bundle

    def evict(self) -> int:
        """Empty the least recently used cached bundle and return it. The caller must forget its content."""
        bundle = next(iter(self._cached))
        self.drop(bundle)
        return bundle

    def drop(self, bundle: int) -> None:
        """Empty a cached bundle. The caller must forget its content."""
        del self._cached[bundle]
        self.num_cached -= self._size(bundle)
        self._clear(bundle)

    def acquire(self, bundles: Iterable[int]) -> int:
        """Add a holder to each of these used or cached bundles, and return how many blocks had none."""
        refs, cached, before = self._refs, self._cached, self.num_cached
        for bundle in bundles:
            if refs[bundle] == 0:
                del cached[bundle]
                self.num_cached -= self._size(bundle)
            refs[bundle] += 1
        return before - self.num_cached

    def release(self, bundles: Iterable[int], keep: Callable[[int], bool], soon: bool = False) -> int:
        """Remove a holder from each of these bundles, and return how many blocks have no other.

        A bundle without holders becomes cached if `keep` returns true for it, otherwise empty. With `soon`, it will be
        evicted before all that are cached now.
        """
        refs, several, num_freed = self._refs, self._bundles, 0
        for bundle in bundles:
            refs[bundle] -= 1
            if refs[bundle] == 0:
                size = len(several[bundle]) if bundle in several else 1
                num_freed += size
                if keep(bundle):
                    self._cached[bundle] = None
                    self.num_cached += size
                    if soon:
                        self._cached.move_to_end(bundle, last=False)
                else:
                    self._clear(bundle)
        return num_freed

    def _size(self, bundle: int) -> int:
        return len(self._bundles[bundle]) if bundle in self._bundles else 1

    def _clear(self, bundle: int) -> None:
        if bundle in self._bundles:
            self._empty += self._bundles.pop(bundle)
        else:
            self._empty.append(bundle)

    def touch(self, bundle: int) -> None:
        """Mark a cached bundle as just used."""
        self._cached.move_to_end(bundle)

    def state(self) -> tuple[array[int], array[int], list[int]]:
        """Return the holders of every block, the empty blocks, and the cached ones to be evicted next."""
        refs = array("i", self._refs)
        for bundle, blocks in self._bundles.items():
            for block_id in blocks:
                refs[block_id] = refs[bundle]
        next_ids = chain.from_iterable(map(self.blocks, self._cached))
        return refs, array("i", self._empty), list(islice(next_ids, MAX_EVICTIONS))

    def check(self, references: Iterable[int]) -> None:
        """Assert that every block has one state and that `references` (bundles, repeated) account for every holder."""
        refs = [0] * self.num_blocks
        for bundle in references:
            refs[bundle] += 1
        assert refs == self._refs, "reference counts differ from the block tables"
        bundles = [*self._cached, *(bundle for bundle, count in enumerate(refs) if count)]
        states = [*self._empty, *chain.from_iterable(map(self.blocks, bundles))]
        assert sorted(states) == list(range(self.num_blocks)), "a block is in two states or in none"
        assert self.num_cached == sum(len(self.blocks(bundle)) for bundle in self._cached)
        assert self._bundles.keys() <= set(bundles), "an empty bundle is still known"
